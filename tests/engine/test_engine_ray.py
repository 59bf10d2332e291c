"""A run as a Ray Train job, on a real cluster of several hosts, of which some are lost."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ray_cluster import RayCluster

from conftest import kill_tree
from frameworm import Trainer
from frameworm.config.schema import Config
from frameworm.engine import ray_reports
from frameworm.engine.checkpoint.load import load_newest
from frameworm.engine.ray_job import RayJob, _on_gpu, first_failure, in_words
from frameworm.engine.ray_reports import RayReports
from frameworm.engine.run import evaluate_run
from frameworm.errors import ConfigError, EnvironmentSetupError, MissingPackageError
from frameworm.parallel.shards import loaded

GUIDE = Path(__file__).parents[2] / "docs" / "clusters.md"
RUN_S = 400.0  # on a busy machine Ray takes minutes to start its workers

WORKLOAD = """
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

from frameworm.errors import DataError


class Slow(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        time.sleep(0.01)  # training is to go on for seconds when something is taken away from it
        values = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return values, (values.sum() > 0).long()


def make(config):
    layers = torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 2)
    return torch.nn.Sequential(*layers), Slow(480), Slow(16)


def no_data(config):
    with Path("asked").open("a") as file:
        file.write("once more\\n")
    raise DataError("the data are gone")
"""
CONFIG = """
name: slow
workload: slow_workload:make
data: {num_workers: 0}
training: {epochs: 3, global_batch: 8, lr: 0.01}
gpu: {device: cpu}
checkpoint: {every_steps: 10}
"""


def on_a_cluster(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that runs jobs on the cluster."""
    return pytest.mark.slow(pytest.mark.cluster(pytest.mark.timeout(4 * RUN_S)(test)))


@pytest.fixture(scope="module")
def cluster(network_lab_script: ModuleType) -> Iterator[RayCluster]:
    """A head, and three hosts with one processor each."""
    pytest.importorskip("ray.train", reason="needs pip install 'frameworm[ray]'")
    with network_lab_script.NetworkLab(hosts=4) as lab, RayCluster(lab) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a workload of one's own, its config and its runs are, on all hosts."""
    made = tmp_path_factory.mktemp("slow")
    (made / "slow_workload.py").write_text(WORKLOAD)
    (made / "slow.yaml").write_text(CONFIG)
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, torch.Tensor]:
    """What two ranks come to without Ray, and without a failure."""
    command = [sys.executable, "-m", "frameworm", "train", "--config", "slow.yaml", "--out", "plain"]
    command += ["--distributed", "--nproc-per-node", "2"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=RUN_S)
    return _weights(folder / "plain")


def _weights(run: Path) -> dict[str, torch.Tensor]:
    newest = load_newest(run / "checkpoints", print)
    assert newest is not None
    assert newest[0].step == 180
    weights: dict[str, torch.Tensor] = loaded(newest[1].shared["model"])
    return weights


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Started:
    """A job that was started on the cluster; ended in any case."""

    def __init__(self, cluster: RayCluster, folder: Path, run: str, *arguments: str) -> None:
        self.run = folder / run
        where = ("--address", cluster.address, "--out", run)
        workers = () if "--num-workers" in arguments else ("--num-workers", "2")
        self.process = cluster.frameworm("ray", "--config", "slow.yaml", *where, *workers, *arguments, cwd=folder)

    def until_step(self, step: int) -> None:
        """Wait until the file of steps, which is written now and then, has so many."""
        deadline = time.monotonic() + RUN_S
        path = self.run / "steps-rank0.jsonl"
        while not path.exists() or len(path.read_bytes().splitlines()) < step:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        try:
            stdout, stderr = self.process.communicate(timeout=RUN_S)
        finally:
            kill_tree(self.process.pid)
        return self.process.returncode, stdout, stderr


@pytest.fixture
def start(cluster: RayCluster, folder: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def begin(*arguments: str) -> Started:
        started.append(Started(cluster, folder, *arguments))
        return started[-1]

    yield begin
    for item in started:
        kill_tree(item.process.pid)
        item.process.wait(60)
        for pipe in (item.process.stdout, item.process.stderr):
            if pipe is not None:
                pipe.close()


def _in_use(cluster: RayCluster) -> list[int]:
    return [host for host in (1, 2, 3) if cluster.workers(host)]


@on_a_cluster
def test_a_killed_worker_changes_nothing(
    cluster: RayCluster,
    start: Callable[..., Started],
    expected: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = start("killed", "--json")
    job.until_step(80)  # of 60 in an epoch
    hosts = _in_use(cluster)
    assert len(hosts) == 2
    (worker,) = cluster.workers(hosts[1])
    worker.send_signal(signal.SIGKILL)
    code, stdout, stderr = job.end()
    assert code == 0, stderr
    summary = json.loads(stdout)
    assert (summary["status"], summary["steps"], summary["batch"]["world_size"]) == ("completed", 180, 2)
    assert _same(_weights(job.run), expected)
    # Every step is there once.
    steps = [json.loads(line)["step"] for line in (job.run / "steps-rank1.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 181))
    # What Ray keeps is a run of its own, of the last step.
    monkeypatch.syspath_prepend(job.run.parent)
    step, score, _ = evaluate_run(summary["ray"]["checkpoint"], ["workload=slow_workload:make"])
    assert step == 180
    assert score.loss == pytest.approx(summary["quality"]["val_loss"], rel=1e-5)
    kept = json.loads((Path(summary["ray"]["path"]) / "checkpoint_manager_snapshot.json").read_text())
    last = kept["latest_checkpoint_result"]["metrics"]
    assert (last["epoch"], last["status"], last["checkpoint_step"]) == (3, "completed", 180)
    assert last["val_loss"] == summary["quality"]["val_loss"]
    names = [item["checkpoint_dir_name"] for item in kept["checkpoint_results"]]
    assert len(names) == 3  # checkpoint.keep
    assert all((Path(summary["ray"]["path"]) / name / "config.yaml").is_file() for name in names)


@on_a_cluster
@pytest.mark.long
def test_a_lost_node_is_replaced_by_a_spare_one(
    cluster: RayCluster, start: Callable[..., Started], expected: dict[str, torch.Tensor]
) -> None:
    job = start("lost")
    job.until_step(80)
    lost = _in_use(cluster)[0]
    cluster.kill_node(lost)
    try:
        code, _, stderr = job.end()
    finally:
        cluster.start_node(lost)
    assert code == 0, stderr
    assert "resumed" in stderr
    assert _same(_weights(job.run), expected)


@on_a_cluster
def test_an_error_that_would_recur_ends_the_job_at_once(start: Callable[..., Started], folder: Path) -> None:
    job = start("refused", "--set", "workload=slow_workload:no_data")
    code, _, stderr = job.end()
    assert code == 2
    assert stderr.splitlines()[-1] == "frameworm: the data are gone"
    assert (folder / "asked").read_text() == "once more\n" * 2  # by each worker
    assert not job.run.exists()


@on_a_cluster
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--num-workers", "4", "--wait", "0"), "it has 3 CPU ("),
        (("--use-gpu", "yes", "--set", "gpu.device=auto", "--wait", "0"), "GPUs are asked for, and no node"),
    ],
)
@pytest.mark.long
def test_a_cluster_without_room(start: Callable[..., Started], arguments: tuple[str, ...], said: str) -> None:
    job = start("none", *arguments)
    code, _, stderr = job.end()
    assert code == 2
    assert said in stderr
    assert not job.run.exists()


@on_a_cluster
def test_the_guides_train_function_of_ones_own(cluster: RayCluster, tmp_path: Path) -> None:
    (code,) = [
        text for text in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL) if "RayReports" in text
    ]
    (tmp_path / "own.py").write_text(f"import ray\nray.init(address={cluster.address!r})\n{code}")
    process = cluster.python("own.py", cwd=tmp_path)
    try:
        stdout, stderr = process.communicate(timeout=RUN_S)
    finally:
        kill_tree(process.pid)
    assert process.returncode == 0, stderr
    metrics, path = stdout.strip().splitlines()[-1].split(" in ")
    assert "'status': 'completed'" in metrics
    assert load_newest(Path(path) / "checkpoints", print) is not None


class FakeTrain(SimpleNamespace):
    """What `RayReports` asks of ray.train, on one worker."""

    def __init__(self, rank: int, kept: Path) -> None:
        self.reports: list[tuple[dict[str, Any], Path | None]] = []
        local = type("LocalFileSystem", (), {})
        self.file_system = SimpleNamespace(LocalFileSystem=local)
        storage = SimpleNamespace(storage_filesystem=local(), experiment_fs_path=str(kept))
        super().__init__(get_context=lambda: SimpleNamespace(get_world_rank=lambda: rank, get_storage=lambda: storage))

    class Checkpoint:
        """A folder."""

        def __init__(self, path: str, filesystem: Any = None) -> None:
            self.path = path

        @classmethod
        def from_directory(cls, path: str) -> FakeTrain.Checkpoint:
            """As Ray's."""
            return cls(path)

    def report(self, metrics: dict[str, Any], checkpoint: Any = None, checkpoint_upload_fn: Any = None) -> None:
        """Keep what is reported."""
        kept = None if checkpoint is None else checkpoint_upload_fn(checkpoint, f"kept-{len(self.reports)}")
        self.reports.append((metrics, None if kept is None else Path(kept.path)))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], FakeTrain]:
    def make(rank: int) -> FakeTrain:
        (tmp_path / "kept").mkdir()
        train = FakeTrain(rank, tmp_path / "kept")
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(train=train))
        monkeypatch.setitem(sys.modules, "ray.train", train)
        monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(fs=train.file_system))
        monkeypatch.setitem(sys.modules, "pyarrow.fs", train.file_system)
        return train

    return make


def _train(run_dir: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(
        model, optimizer, callbacks=[RayReports()], run_dir=run_dir, every_steps=3, keep=1, mode="sync", seed=0
    )
    trainer.train(loader, loader, epochs=2)


def test_epochs_and_checkpoints_are_reported(fake: Callable[[int], FakeTrain], tmp_path: Path) -> None:
    train = fake(0)
    _train(tmp_path / "run")
    assert [metrics["epoch"] for metrics, _ in train.reports] == [1, 2, 2]
    assert [metrics.get("checkpoint_step") for metrics, _ in train.reports] == [6, 15, 16]
    assert train.reports[-1][0]["status"] == "completed"
    for metrics, kept in train.reports:
        assert {"train_loss", "val_loss", "val_accuracy", "samples_per_s"} <= metrics.keys()
        assert kept is not None
        newest = load_newest(kept / "checkpoints", print)  # also those that the run itself has removed since
        assert newest is not None
        assert newest[0].step == metrics["checkpoint_step"]
        assert (kept / "config.yaml").read_text() == (tmp_path / "run" / "config.yaml").read_text()
    assert not list((tmp_path / "run").glob(".ray-*"))


def test_a_checkpoint_that_is_removed_meanwhile_is_passed_over(
    fake: Callable[[int], FakeTrain], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = fake(0)
    real, gone = ray_reports.list_checkpoints, []

    def with_one_that_goes(folder: Path) -> list[Any]:
        found = real(folder)
        if found and not gone:
            gone.append(dataclasses.replace(found[-1], path=folder / "step-00000001"))
            return gone
        return found

    monkeypatch.setattr(ray_reports, "list_checkpoints", with_one_that_goes)
    _train(tmp_path / "run")
    assert [metrics.get("checkpoint_step") for metrics, _ in train.reports] == [6, 15, 16]


def test_gpus_follow_the_resources_that_are_given() -> None:
    ray = SimpleNamespace(cluster_resources=lambda: {"CPU": 4.0, "GPU": 2.0})
    for given, expected in (({}, True), ({"GPU": 0.0}, False), ({"GPU": 1.0}, True)):
        assert _on_gpu(ray, Config(), RayJob((1, 1), resources=given)) is expected


def test_other_ranks_report_as_often_and_bring_no_checkpoints(fake: Callable[[int], FakeTrain], tmp_path: Path) -> None:
    train = fake(1)
    _train(tmp_path / "run")
    assert [(metrics["epoch"], kept) for metrics, kept in train.reports] == [(1, None), (2, None), (2, None)]


def test_outside_of_a_worker_reports_are_refused(fake: Callable[[int], FakeTrain], tmp_path: Path) -> None:
    train = fake(0)

    def get_context() -> None:
        raise RuntimeError("not in a worker")

    train.get_context = get_context
    with pytest.raises(EnvironmentSetupError, match="TorchTrainer"):
        _train(tmp_path / "run")


def test_without_ray_the_install_line_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'frameworm\[ray\]'"):
        RayReports()


def test_the_first_failure_is_what_the_others_followed_from() -> None:
    lost = RuntimeError("Connection closed by peer")
    died = type("WorkerHealthCheckFailedError", (Exception,), {"__module__": "ray.train"})("its process died")
    own = ConfigError("training.lr: no")
    assert first_failure({0: lost, 1: own, 2: died}) == (1, own)
    assert first_failure({0: lost, 1: died}) == (1, died)
    assert first_failure({1: lost}) == (1, lost)
    assert first_failure({0: lost, 1: ValueError("boom")})[0] == 1
    assert in_words(1, own) == "worker 1 failed: training.lr: no"
    assert in_words(0, ValueError("boom\nmore")) == "worker 0 failed: ValueError: boom"
    assert in_words(2, died) == "worker 2 failed: WorkerHealthCheckFailedError: its process died"
