"""Every way to start the processes trains the same model, and none of them outlives a failure.

Run as a script, this file is the program of a user who starts the ranks with torch.multiprocessing.spawn.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader
from workbench import classification, make_optimizer, mlp

from frameworm import Trainer
from frameworm.distributed import DDPTrainer, ZeROStage1Optimizer, cleanup, setup_ddp
from frameworm.errors import EnvironmentSetupError
from frameworm.launch.slurm_environment import derived_port
from frameworm.records.writer import read_steps

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
TINY = (
    "data.limit=101",  # the last step is short, and its halves are unequal
    "model.d_model=16",
    "model.n_heads=2",
    "model.num_layers=1",
    "model.dim_feedforward=32",
    "model.max_seq_len=16",
    "training.epochs=16",  # some seconds of steps, so that a signal comes before the end
    "training.global_batch=32",
)


class Started:
    """Processes of this test, each with its variables; one thread each, so that rounding does not differ."""

    def __init__(self, folder: Path, data_cache_dir: Path) -> None:
        self.folder = folder
        self._cache = str(data_cache_dir)
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, *command: str | Path, **variables: object) -> subprocess.Popen[str]:
        added = {"FRAMEWORM_DATA_CACHE_DIR": self._cache, "OMP_NUM_THREADS": "1", "TERM": "dumb"}
        self._processes.append(
            subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=self.folder,
                env={**os.environ, **added, **{name: str(value) for name, value in variables.items()}},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return self._processes[-1]

    def ends(self, timeout_s: float = 280) -> list[tuple[int, str, str]]:
        """Exit code and output of each, in the order of their starts."""
        deadline = time.monotonic() + timeout_s
        found = []
        while self._processes:
            stdout, stderr = self._processes[0].communicate(timeout=max(0.1, deadline - time.monotonic()))
            found.append((self._processes.pop(0).returncode, stdout, stderr))
        return found

    def close(self) -> None:
        from conftest import kill_tree

        for process in self._processes:
            kill_tree(process.pid)


@pytest.fixture
def started(tmp_path: Path, data_cache_dir: Path) -> Iterator[Started]:
    processes = Started(tmp_path, data_cache_dir)
    yield processes
    processes.close()


def _train(out: str) -> list[str]:
    settings = [part for setting in TINY for part in ("--set", setting)]
    return ["-m", "frameworm", "train", "--config", str(QUICKSTART), *settings, "--out", out]


def _alone(started: Started) -> None:
    started.start(*_train("alone"))


def _torchrun(started: Started) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    started.start(*torchrun, *_train("torchrun"))


def _once_per_node(started: Started) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for rank in (1, 0):  # the second node may come first
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "RANK": rank}
        started.start(*_train("once_per_node"), "--distributed", "--nproc-per-node", "1", **place)


def _srun(started: Started) -> None:
    step = {
        "SLURM_JOB_ID": _job_with_a_free_port(),
        "SLURM_STEP_ID": 0,
        "SLURM_NTASKS": 2,
        "SLURM_NODEID": 0,
        "SLURM_STEP_NUM_NODES": 1,
        "SLURM_STEP_TASKS_PER_NODE": 2,
        "SLURM_STEP_NODELIST": "localhost",
    }
    for task in (1, 0):
        started.start(*_train("srun"), "--distributed", **step, SLURM_PROCID=task, SLURM_LOCALID=task)


def _own_launcher(started: Started) -> None:
    """Ctrl-C after the first steps, then the same command again."""
    # Every step waits for its checkpoint, which leaves some seconds for the signal to come before the end.
    saves = ["--set", "checkpoint.every_steps=1", "--set", "checkpoint.mode=sync"]
    command = [*_train("own_launcher"), *saves, "--distributed", "--nproc-per-node", "2"]
    process = started.start(*command)
    deadline = time.monotonic() + 120
    while not (started.folder / "own_launcher" / "steps-rank0.jsonl").exists() and process.poll() is None:
        assert time.monotonic() < deadline, "no step within two minutes"
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    ((code, stdout, stderr),) = started.ends()
    assert code == 130, stderr
    assert "quickstart · interrupted" in stdout
    assert stderr.count("resume with: frameworm train") == 1
    started.start(*command, "--resume", "auto")


def _job_with_a_free_port() -> int:
    while True:
        job = random.randrange(1, 100_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", derived_port(job, 0)))
            except OSError:
                continue
            return job


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_launch_forms_train_the_same_model(started: Started) -> None:
    losses: dict[str, dict[str, float]] = {}
    for form in (_alone, _torchrun, _once_per_node, _srun, _own_launcher):
        name = form.__name__[1:]
        form(started)
        ends = started.ends()
        assert [code for code, _, _ in ends] == [0] * len(ends), ends
        assert sum("quickstart · completed" in stdout for _, stdout, _ in ends) == 1, "rank 0 alone prints"
        summary = json.loads((started.folder / name / "summary.json").read_text())
        losses[name] = summary["quality"]
        world_size = 1 if name == "alone" else 2
        assert summary["batch"] == {
            "micro": 32 // world_size,
            "accumulation": 1,
            "world_size": world_size,
            "global": 32,
        }
        assert summary["strategy"] == ("single" if name == "alone" else "ddp")
        files = sorted((started.folder / name).glob("steps-rank*.jsonl"))
        steps = [step for file in files for step in read_steps(file)]
        assert len(steps) == 64 * world_size
        assert sum(step.samples for step in steps) == 16 * 101, "every sample once per epoch"
    together = losses["torchrun"]
    for name, found in losses.items():
        assert found == pytest.approx(together, rel=1e-4 if name == "alone" else 1e-6), losses


def _data(job: int) -> DataLoader[Any]:
    return DataLoader(classification(52, seed=job), batch_size=8, shuffle=False)


def train_rank(rank: int, world_size: int, job: int, folder: str) -> None:
    """What a user's script does in each process; no port is chosen anywhere."""
    torch.set_num_threads(1)
    setup_ddp(rank, world_size)
    model = mlp()
    trainer = DDPTrainer(model, make_optimizer("adamw", model), rank, world_size, device="cpu", run_dir=None)
    loader = DataLoader(classification(52, seed=job), batch_size=4, shuffle=False)
    record = trainer.train(loader, epochs=3)
    trainer.cleanup()
    (Path(folder) / f"job-{job}-rank-{rank}.json").write_text(json.dumps(record.losses))


@pytest.mark.slow
def test_spawned_ranks_of_two_jobs_side_by_side(started: Started) -> None:
    started.start(__file__, started.folder)
    ((code, _, stderr),) = started.ends()
    assert code == 0, stderr
    for job in (1, 2):
        model = mlp()
        trainer = Trainer(model, make_optimizer("adamw", model), device="cpu", run_dir=None)
        expected = trainer.train(_data(job), epochs=3).losses
        for rank in (0, 1):
            found = json.loads((started.folder / f"job-{job}-rank-{rank}.json").read_text())
            assert found == pytest.approx(expected, rel=1e-6)
        assert expected[2] < expected[0]


FAULTY = """
import os
import time
import torch

class Faulty(torch.utils.data.Dataset):
    def __init__(self):
        self.read = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.read += 1
        if os.environ["RANK"] == "1" and self.read == 2 * 4 + 1:
            with open("fault", "w") as file:
                file.write(str(time.time()))
            raise ValueError("the planted fault of step 3")
        return torch.randn(4), index % 2

def build(config):
    return torch.nn.Linear(4, 2), Faulty(), None
"""


@pytest.mark.slow
def test_failure_of_one_rank_ends_all_and_is_named_last(cli: Callable[..., Any], tmp_path: Path) -> None:
    marker = f"marker-{uuid.uuid4().hex}"
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "faulty.yaml").write_text(
        f"name: {marker}\nworkload: faulty:build\ngpu: {{device: cpu}}\ntraining: {{global_batch: 8}}\n"
        "data: {num_workers: 0}\n"
    )
    flags = ["--distributed", "--nproc-per-node", "2", "--set", f"name={marker}", "--out", "run"]
    ended = cli("train", "--config", "faulty.yaml", *flags, cwd=tmp_path, timeout_s=180)
    since_fault_s = time.time() - float((tmp_path / "fault").read_text())
    assert ended.returncode == 1
    assert since_fault_s < 30
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    assert lines[-1] == "rank 1: ValueError: the planted fault of step 3"
    assert 'faulty.py", line' in ended.stderr, "where in the user's code it happened"
    assert not [process for process in psutil.process_iter(["cmdline"]) if marker in str(process.info["cmdline"])]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_an_interrupt_before_the_first_step_ends_all_at_once(tmp_path: Path) -> None:
    """One rank waits for another that never comes: Python's own handler would not run there."""
    (tmp_path / "late_workload.py").write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        "def build(config):\n"
        "    rank = os.environ['RANK']\n"
        "    Path(f'started-{rank}').touch()\n"
        "    if rank == '1':\n"
        "        time.sleep(300)\n"
        "    import torch\n"
        "    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))\n"
        "    return torch.nn.Linear(4, 2), data, None\n"
    )
    (tmp_path / "late.yaml").write_text("name: late\nworkload: late_workload:build\ntraining: {global_batch: 4}\n")
    command = [sys.executable, "-m", "frameworm", "train", "--config", "late.yaml"]
    job = subprocess.Popen(
        [*command, "--distributed", "--nproc-per-node", "2"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 150
        while not all((tmp_path / f"started-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            assert job.poll() is None, job.communicate()
            time.sleep(0.1)
        time.sleep(2)  # rank 0 is on its way into the group
        sent = time.monotonic()
        job.send_signal(signal.SIGINT)
        _, stderr = job.communicate(timeout=60)
        assert job.returncode == 130
        assert time.monotonic() - sent < 20
        assert "Traceback" not in stderr
    finally:
        from conftest import kill_tree

        kill_tree(job.pid)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backend": "nccl"}, "backend nccl is not used: one process"),
        ({"strategy": "zero1"}, "strategy zero1 divides nothing on one process"),
        ({"strategy": "zero3"}, "strategy zero3 divides nothing on one process"),
        ({}, None),
    ],
)
def test_one_process_says_which_settings_do_nothing(settings: dict[str, str], words: str | None) -> None:
    model = mlp()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), device="auto", **settings)
    try:
        record = trainer.train(DataLoader(classification(8), 4), epochs=1)
    finally:
        cleanup()
    assert record.status == "completed"
    alone = [note for note in record.notes if "one process" in note]
    assert alone == ([] if words is None else [note for note in record.notes if note.startswith(words)])
    assert len(alone) == (words is not None)


def test_a_sharded_optimizer_without_ranks_says_what_it_needs() -> None:
    with pytest.raises(EnvironmentSetupError, match=r"there is none: call setup_ddp\(\).*AdamW only"):
        ZeROStage1Optimizer(mlp().parameters(), torch.optim.AdamW, lr=0.1)


if __name__ == "__main__":
    contexts = [
        torch.multiprocessing.spawn(train_rank, args=(2, job, sys.argv[1]), nprocs=2, join=False) for job in (1, 2)
    ]
    for context in contexts:
        while not context.join():
            pass
