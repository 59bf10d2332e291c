"""Batch scripts on a real SLURM of two nodes: trained, stopped, requeued and resumed, followed, and left alone."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from frameworm.launch.environment import detect
from frameworm.launch.slurm import SlurmJob, batch_script
from frameworm.launch.slurm_environment import contradictions
from frameworm.launch.slurm_queue import JobState, parse_job

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(400)]

REPOSITORY = Path(__file__).parents[2]
# Steps that mostly sleep: long enough to be stopped half-way on any machine, and no work for a busy one.
WORKLOAD = """
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from frameworm import Workload


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))

    def forward(self, inputs):
        if self.training:
            time.sleep(0.08)  # a run is to last for seconds after what stops it is sent
        return self.layers(inputs)


def build(config):
    inputs = torch.randn(192, 8, generator=torch.Generator().manual_seed(config.seed))
    labels = inputs[:, :3].argmax(1)
    return Workload(Model(), TensorDataset(inputs[:160], labels[:160]), TensorDataset(inputs[160:], labels[160:]))
"""
CONFIG = """
name: pauses
workload: pauses:build
data: {num_workers: 0}
training: {epochs: 20, global_batch: 32, lr: 1.0e-2, schedule: onecycle}
checkpoint: {every_steps: 100000}
"""


class Cluster:
    """A working folder on the cluster, with a `frameworm` on its PATH that is the one under test."""

    def __init__(self, lab: Any, folder: Path, cache: Path) -> None:
        self.lab = lab
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        self.program("frameworm", f'exec {sys.executable} -m frameworm "$@"')
        (folder / "pauses.py").write_text(WORKLOAD)
        (folder / "pauses.yaml").write_text(CONFIG)
        (folder / "configs").symlink_to(REPOSITORY / "configs")
        (folder / "scripts").symlink_to(REPOSITORY / "scripts")
        self.environment: dict[str, str] = lab.environment(
            PATH=f"{programs}:{os.environ['PATH']}",
            OMP_NUM_THREADS="1",
            FRAMEWORM_DATA_CACHE_DIR=str(cache),
            PYTHONPATH=os.pathsep.join(filter(None, [str(REPOSITORY / "src"), os.environ.get("PYTHONPATH")])),
            TERM="dumb",
        )

    def program(self, name: str, body: str) -> None:
        """Put a program of this name before all others; running ones are not disturbed."""
        draft = self.folder / "bin" / f".{name}"
        draft.write_text(f"#!/bin/bash\n{body}\n")
        draft.chmod(0o755)
        draft.replace(self.folder / "bin" / name)

    def run(self, *command: str, timeout_s: float = 150, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def submit(self, script: str | Path, **variables: str) -> int:
        """Submit a file as it is, or a text."""
        if isinstance(script, str):
            path = self.folder / "job.sh"
            path.write_text(script)
        else:
            path = script
        done = self.run("sbatch", "--parsable", str(path), **variables)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def state(self, job: int) -> JobState:
        return parse_job(self.lab.ask("scontrol", "show", "job", str(job)), job)

    def wait(self, job: int, what: Callable[[JobState], bool], limit_s: float = 150) -> JobState:
        deadline = time.monotonic() + limit_s
        while True:
            state = self.state(job)
            if what(state):
                return state
            assert not state.ended, f"{state}\n{self.log(job)}"
            assert time.monotonic() < deadline, f"{state} after {limit_s} s\n{self.log(job)}"
            time.sleep(0.1)

    def ended(self, job: int, limit_s: float = 150) -> JobState:
        return self.wait(job, lambda state: state.ended, limit_s)

    def requeued(self, job: int, limit_s: float = 100) -> None:
        """Wait for a requeue, and do not wait the two minutes that SLURM holds the job back."""
        self.wait(job, lambda state: state.restarts == 1 and state.state == "PENDING", limit_s)
        time.sleep(2)  # a job started in the very second of its end is refused by the nodes: the reason for that wait
        self.lab.ask("scontrol", "update", f"jobid={job}", "starttime=now")

    def log(self, job: int) -> str:
        path = self.state(job).log
        return path.read_text() if path is not None and path.exists() else ""


@pytest.fixture
def cluster(slurm_lab: Any, tmp_path: Path, data_cache_dir: Path) -> Iterator[Cluster]:
    yield Cluster(slurm_lab, tmp_path, data_cache_dir)
    slurm_lab.ask("scancel", "--partition=lab", check=False)  # what a failed test has left


@pytest.fixture(scope="module")
def uninterrupted(slurm_lab: Any, tmp_path_factory: pytest.TempPathFactory, data_cache_dir: Path) -> dict[str, Any]:
    """Summary of the same training in one go, on two processes that frameworm itself starts."""
    here = Cluster(slurm_lab, tmp_path_factory.mktemp("uninterrupted"), data_cache_dir)
    train = ["frameworm", "train", "--config", "pauses.yaml", "--set", "gpu.device=cpu", "--out", "run"]
    workers = ["--distributed", "--nproc-per-node", "2"]
    done = here.run(*train, *workers)
    assert done.returncode == 0, done.stderr
    return _summary(here.folder / "run")


def _summary(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def _train(**changes: Any) -> SlurmJob:
    return dataclasses.replace(SlurmJob("pauses.yaml", "pauses", nodes=2, cpus_per_task=1), **changes)


def test_two_nodes_are_stopped_requeued_and_end_where_one_go_ends(
    cluster: Cluster, uninterrupted: dict[str, Any]
) -> None:
    job = cluster.submit(batch_script(_train()))
    cluster.wait(job, lambda _: "epoch 2/20" in cluster.log(job))
    # What SLURM itself does `--signal=B:USR1@...` before the end of the job's time.
    cluster.lab.ask("scancel", "--batch", "--signal=USR1", str(job))
    cluster.requeued(job)
    run = cluster.folder / "runs" / f"pauses-{job}"
    assert _summary(run)["status"] == "preempted"
    stopped_at = _summary(run)["steps"]
    assert 10 <= stopped_at < uninterrupted["steps"]
    end = cluster.ended(job)
    assert (end.state, end.exit_code, end.restarts) == ("COMPLETED", 0, 1), cluster.log(job)
    assert "back into the queue" in cluster.log(job)
    summary = _summary(run)
    assert summary["status"] == "completed"
    assert summary["batch"]["world_size"] == 2
    assert summary["steps"] == uninterrupted["steps"]
    assert summary["quality"] == uninterrupted["quality"]  # bit for bit
    assert sorted(path.name for path in (cluster.folder / "runs").iterdir()) == [run.name]
    logs = cluster.folder / "logs" / run.name
    assert sorted(str(path.relative_to(logs)) for path in logs.rglob("*.log")) == [
        f"attempt-{attempt}/rank-0000{rank}.log" for attempt in (0, 1) for rank in (0, 1)
    ]
    assert (logs / "attempt-1" / "rank-00001.log").read_text().startswith("rank 1 of 2 on ")


def test_one_task_per_worker_joins_and_the_job_is_followed(cluster: Cluster, uninterrupted: dict[str, Any]) -> None:
    command = ["frameworm", "slurm", "--config", "pauses.yaml", "--nodes", "1", "--gpus-per-node", "2"]
    options = ["--launcher", "srun", "--cpus-per-task", "1", "--out", "job.sh", "--submit"]
    done = cluster.run(*command, *options, FRAMEWORM_PARALLEL_BACKEND="gloo", timeout_s=200)
    assert done.returncode == 0, done.stderr
    assert "running (n0)" in done.stderr
    assert "completed" in done.stderr
    assert "epoch 20/20" in done.stdout
    (run,) = (cluster.folder / "runs").iterdir()
    assert _summary(run)["quality"] == uninterrupted["quality"]
    assert (cluster.folder / "job.sh").read_text().startswith("#!/bin/bash\n")


def test_shipped_scripts_are_submitted_as_they_are(cluster: Cluster) -> None:
    # What sbatch exports reaches the training; the scripts stay as they are.
    slice_on_cpu = {
        "FRAMEWORM_DATA_ROOT": str(_slice_of_ag_news(cluster.folder / "slice", rows=256)),
        "FRAMEWORM_DATA_NUM_WORKERS": "0",
        "FRAMEWORM_GPU_DEVICE": "cpu",
        "FRAMEWORM_TRAINING_EPOCHS": "1",
        "FRAMEWORM_MODEL_MAX_SEQ_LEN": "32",
        "FRAMEWORM_MODEL_D_MODEL": "32",
    }
    names = {"run_agnews_single_gpu_optimized.sh": 1, "run_agnews_ddp_optimized.sh": 4}
    jobs = {cluster.submit(Path("scripts") / name, **slice_on_cpu): size for name, size in names.items()}
    for job, world_size in jobs.items():
        end = cluster.ended(job, limit_s=200)
        assert end.exit_code == 0, cluster.log(job)
        (run,) = (cluster.folder / "runs").glob(f"*-{job}")
        summary = _summary(run)
        assert (summary["status"], len(summary["epochs"]), summary["steps"]) == ("completed", 1, 2)
        assert summary["batch"]["world_size"] == world_size
        assert len(list((cluster.folder / "logs" / run.name).rglob("rank-*.log"))) == world_size


def _slice_of_ag_news(folder: Path, rows: int) -> Path:
    """The first rows of the real data where it is, else rows of the same kind."""
    folder.mkdir()
    real = Path(os.environ.get("FRAMEWORM_DATA", "")) / "ag_news"
    for name, sources in (("train", ("train.csv.gz", "train_subset.csv.gz")), ("test", ("test.csv", "test.csv.gz"))):
        text = [f'"{1 + row % 4}","Title {row}","News of kind {row % 4}, number {row}."\n' for row in range(rows)]
        for path in [real / source for source in sources if (real / source).exists()]:
            with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
                text = list(itertools.islice(file, rows))
        (folder / f"{name}.csv").write_text("".join(text))
    return folder


SWEEP = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --output=sweep.out
export MASTER_ADDR=127.0.0.1  # the names of the lab's hosts are known to SLURM only
frameworm scale --config pauses.yaml --set training.epochs=3 --set gpu.device=cpu --world-sizes 1,2 \\
    --nproc-per-node 1 --repeats 1 --out sweep
"""


def test_a_sweep_runs_on_the_hosts_of_its_allocation(cluster: Cluster) -> None:
    job = cluster.submit(SWEEP)
    end = cluster.ended(job, 200)
    told = (cluster.folder / "sweep.out").read_text()
    assert (end.state, end.exit_code) == ("COMPLETED", 0), told
    sizes = {
        _summary(path.parent)["batch"]["world_size"] for path in (cluster.folder / "sweep").glob("runs/*/summary.json")
    }
    assert sizes == {1, 2}
    assert {path.name for path in (cluster.folder / "sweep").glob("*.*")} >= {
        "scaling.json", "comprehensive_summary.csv", "summary_table.tex", "performance_report.txt", "report.html",
    }  # fmt: skip


def test_a_job_that_fails_gives_its_exit_code(cluster: Cluster) -> None:
    command = ["frameworm", "slurm", "--config", "configs/quickstart.yaml", "--nodes", "1", "--gpus-per-node", "0"]
    missing = ["--set", "data.dataset=ag_news", "--set", "data.root=nowhere"]
    done = cluster.run(*command, *missing, "--cpus-per-task", "1", "--submit", "--json")
    assert done.returncode == 2, done.stderr
    result = json.loads(done.stdout)
    assert (result["state"], result["exit_code"]) == ("FAILED", 2)
    assert "nowhere" in Path(result["log"]).read_text()


SAVES = 'trap "echo saved; exit 75" USR1; trap "exit 143" TERM; echo started; for _ in {1..900}; do sleep 0.1; done'


def test_the_signal_of_slurm_itself_leads_to_a_requeue(cluster: Cluster) -> None:
    cluster.program("frameworm", SAVES)
    # SLURM looks at limits every half a minute and sends the signal at the last look before it is due: 15 to 45 s after
    # the start of a job of two minutes. By then the program has long begun, even on a busy machine.
    job = cluster.submit(batch_script(_train(time="2", signal_before_s=75)))
    cluster.requeued(job, limit_s=110)
    log = cluster.log(job)
    assert log.count("saved") == 2
    assert "back into the queue" in log
    cluster.lab.ask("scancel", str(job))


def test_a_cancelled_job_is_not_requeued(cluster: Cluster) -> None:
    cluster.program("frameworm", SAVES.replace("exit 143", "exit 75"))
    job = cluster.submit(batch_script(_train()))
    cluster.wait(job, lambda _: cluster.log(job).count("started") == 2)
    cluster.lab.ask("scancel", str(job))
    end = cluster.ended(job)
    assert (end.state, end.restarts) == ("CANCELLED", 0)


def test_a_failure_after_the_signal_is_a_failure_and_its_rank_is_shown(cluster: Cluster) -> None:
    cluster.program(
        "frameworm",
        'while [ "$1" != --log-dir ]; do shift; done\n'
        'trap "echo frameworm: disk full >> $2/rank-0000$SLURM_PROCID.log; exit $SLURM_PROCID" USR1\n'
        "echo started; for _ in {1..300}; do sleep 0.1; done",
    )
    job = cluster.submit(batch_script(_train()))
    cluster.wait(job, lambda _: cluster.log(job).count("started") == 2)
    cluster.lab.ask("scancel", "--batch", "--signal=USR1", str(job))
    end = cluster.ended(job)
    assert (end.state, end.exit_code, end.restarts) == ("FAILED", 1, 0)
    assert f"logs/pauses-{job}/attempt-0/rank-00001.log:\nframeworm: disk full" in cluster.log(job)


def test_interrupting_the_follower_leaves_the_job(cluster: Cluster) -> None:
    command = ["frameworm", "slurm", "--config", "configs/quickstart.yaml", "--nodes", "1", "--gpus-per-node", "0"]
    real = [sys.executable, "-m", *command]
    cluster.program("frameworm", SAVES)
    follower = subprocess.Popen(
        [*real, "--submit"], cwd=cluster.folder, env=cluster.environment, stderr=subprocess.PIPE, text=True
    )
    try:
        assert follower.stderr is not None
        job = int(follower.stderr.readline().split()[1].rstrip(":"))
        cluster.wait(job, lambda state: state.state == "RUNNING")
        follower.send_signal(signal.SIGINT)
        _, said = follower.communicate(timeout=60)
    finally:
        follower.kill()
        follower.wait()
    assert follower.returncode == 130
    assert f"scancel {job}" in said
    assert cluster.state(job).state == "RUNNING"
    cluster.lab.ask("scancel", str(job))


def test_what_slurm_sets_is_understood(cluster: Cluster) -> None:
    keep = 'env -0 > "task-$SLURM_PROCID"'
    done = cluster.run("srun", "--nodes=2", "--ntasks=3", "--gpus-per-node=2", "bash", "-c", keep)
    assert done.returncode == 0, done.stderr
    steps = [_variables(cluster.folder / f"task-{rank}") for rank in range(3)]
    parts = ["#!/bin/bash", "#SBATCH --nodes=2 --ntasks=4", "env -0 > batch", "srun -N1 -n1 bash -c 'env -0 > sub'"]
    job = cluster.submit("\n".join(parts) + "\n")
    assert cluster.ended(job).exit_code == 0
    batch, sub = _variables(cluster.folder / "batch"), _variables(cluster.folder / "sub")
    for variables in (*steps, batch, sub):
        assert contradictions(variables) == []
    places = [detect(variables) for variables in steps]
    assert [place.rank for place in places] == [0, 1, 2]
    assert {place.world_size for place in places} == {3}
    assert [(place.node_rank, place.local_rank) for place in places] == [(0, 0), (0, 1), (1, 0)]
    assert len({place.master_port for place in places}) == 1
    assert (detect(sub).world_size, detect(batch).launcher) == (1, "none")


def _variables(file: Path) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in file.read_text().split("\0")[:-1])


def test_a_lab_leaves_nothing_behind(slurm_lab: Any, slurm_lab_script: Any, tmp_path: Path) -> None:
    # Beside another lab: neither disturbs the other.
    with slurm_lab_script.SlurmLab(nodes=1, gpus=0) as lab:
        folder = lab.folder
        command = ["sbatch", "--output=/dev/null", "--wrap", "trap '' TERM; srun sleep 1000"]
        subprocess.run(command, env=lab.environment(), check=True, capture_output=True, timeout=60, cwd=tmp_path)
        deadline = time.monotonic() + 60
        while "RUNNING" not in lab.ask("squeue", "--noheader", "--format=%T"):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert slurm_lab_script.processes_of(folder)
    assert not slurm_lab_script.processes_of(folder)
    assert not folder.exists()
    assert "idle" in slurm_lab.ask("sinfo", "--noheader", "--format=%T")
    assert "slurmstepd" not in [child.name() for child in psutil.Process().children()]
