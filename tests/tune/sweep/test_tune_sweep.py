"""What a sweep runs, and in which folder; real runs are in tests/cli/test_cli_scale.py."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from frameworm.config.load import load_config_from_mapping
from frameworm.config.resolve import resolve
from frameworm.config.schema import Config
from frameworm.errors import ConfigError, RunFolderError, TrainingInterruptedError
from frameworm.records.schema import Batch, EpochRecord, RunRecord, Throughput
from frameworm.records.store import RunFolder
from frameworm.report.scaling.report import WrittenReport
from frameworm.tune.sweep import run as sweep
from frameworm.tune.sweep.plan import SweepPlan, parse_world_sizes
from frameworm.tune.sweep.process import run_to_end
from frameworm.tune.sweep.run import run_sweep


def _config(**training: Any) -> Config:
    values = {"name": "small", "gpu": {"device": "cpu"}, "training": {"global_batch": 32, **training}}
    return load_config_from_mapping(values, environ={})


def _batch(plan: SweepPlan, world_size: int) -> tuple[int | None, object, object]:
    config = load_config_from_mapping(plan.config.model_dump(), plan.settings(world_size), environ={})
    training = resolve(config, world_size=world_size, device="cpu", bf16=False).training
    return training.global_batch, training.micro_batch, training.accumulation


def test_rounds_visit_every_size_and_turn_around() -> None:
    plan = SweepPlan(_config(), (1, 2, 4), repeats=3)
    assert plan.runs() == [(1, 1), (2, 1), (4, 1), (4, 2), (2, 2), (1, 2), (1, 3), (2, 3), (4, 3)]


def test_strong_scaling_shares_one_batch_out() -> None:
    plan = SweepPlan(_config(), (1, 2, 4))
    assert [_batch(plan, size) for size in (1, 2, 4)] == [(32, 32, 1), (32, 16, 1), (32, 8, 1)]


def test_strong_scaling_never_makes_the_micro_batch_larger() -> None:
    plan = SweepPlan(_config(micro_batch=8), (1, 2, 8))
    assert [_batch(plan, size) for size in (1, 2, 8)] == [(32, 8, 4), (32, 8, 2), (32, 4, 1)]
    older = SweepPlan(_config(global_batch=None, batch_size=32), (1, 4))
    assert [_batch(older, size) for size in (1, 4)] == [(32, 32, 1), (32, 8, 1)]


def test_weak_scaling_keeps_the_batch_of_each_device() -> None:
    plan = SweepPlan(_config(micro_batch=8), (1, 2, 4), "weak")
    assert [_batch(plan, size) for size in (1, 2, 4)] == [(32, 8, 4), (64, 8, 4), (128, 8, 4)]
    from_two = SweepPlan(_config(), (2, 4), "weak")
    assert [_batch(from_two, size) for size in (2, 4)] == [(32, 16, 1), (64, 16, 1)]


def test_ddp_on_one_device_is_no_ddp() -> None:
    config = load_config_from_mapping({"parallel": {"strategy": "ddp"}}, environ={})
    plan = SweepPlan(config, (1, 2))
    assert "parallel.strategy=single" in plan.settings(1)
    assert "parallel.strategy=single" not in plan.settings(2)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="32 does not divide among 3 processes"):
        SweepPlan(_config(), (1, 3)).settings(3)


@pytest.mark.parametrize(("text", "sizes"), [("1,2,4", (1, 2, 4)), ("4, 1,4", (1, 4)), ("8", (8,))])
def test_world_sizes_are_sorted(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_world_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "1,two", "-1", "1.5", "1;2", "999999999"])
def test_what_is_no_list_of_sizes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--world-sizes"):
        parse_world_sizes(text)


class FakeTraining:
    """Stands in for the process of a run: leaves the folder that `frameworm train` would."""

    def __init__(self, fails: tuple[int, ...] = (), stops_after: int | None = None) -> None:
        self.made: list[str] = []
        self.fails = fails
        self.stops_after = stops_after

    def __call__(self, command: list[str], log: Path, keep_open: int | None = None) -> tuple[int, str]:
        if self.stops_after is not None and len(self.made) == self.stops_after:
            raise TrainingInterruptedError("interrupted")
        out = Path(command[command.index("--out") + 1])
        self.made.append(out.name)
        log.write_text("said")
        size = int(command[command.index("--nproc-per-node") + 1]) if "--nproc-per-node" in command else 1
        if size in self.fails:
            return 1, "no such luck"
        folder = RunFolder.create(out, "small")
        folder.write_config("name: small\ndata: {dataset: generated}\n")
        epochs = [EpochRecord(number, 10.0 / size, 0.5, 0.5, 0.9, 10.0 * size) for number in (1, 2)]
        folder.write_epochs(epochs)
        batch = Batch(32 // size, 1, size, 32)
        record = RunRecord("small", "completed", {}, batch, throughput=Throughput(10.0 * size), epochs=epochs)
        folder.write_summary(record)
        return 0, ""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    training = FakeTraining()
    monkeypatch.setattr(sweep, "run_to_end", training)
    # Figures take seconds, and have tests of their own.
    monkeypatch.setattr(sweep, "write_report", lambda *_: WrittenReport(cast(Any, None), ()))
    return training


def test_a_sweep_goes_on_where_it_stopped(tmp_path: Path, fake: FakeTraining) -> None:
    plan = SweepPlan(_config(), (1, 2), repeats=2)
    fake.stops_after = 3
    with pytest.raises(TrainingInterruptedError):
        run_sweep(plan, tmp_path / "out")
    assert fake.made == ["ws0001-run01", "ws0002-run01", "ws0002-run02"]
    # A run that was cut off is made anew.
    (tmp_path / "out/runs/ws0002-run02/summary.json").unlink()
    fake.stops_after, fake.made = None, []
    with pytest.raises(RunFolderError, match="--resume"):
        run_sweep(plan, tmp_path / "out")
    result = run_sweep(plan, tmp_path / "out", resume=True)
    assert fake.made == ["ws0002-run02", "ws0001-run02"]
    assert [run.status for run in result.runs] == ["completed"] * 4
    assert result.analysis.curves[0].rows[1].speedup.value == pytest.approx(2.0)
    data = json.loads((tmp_path / "out/scaling.json").read_text())
    assert data["curves"][0]["rows"][1]["grade"] == "excellent"
    assert {run["folder"] for run in data["runs"]} == {f"runs/ws000{size}-run0{n}" for size in (1, 2) for n in (1, 2)}


def test_more_sizes_and_repeats_may_be_asked_for_later(tmp_path: Path, fake: FakeTraining) -> None:
    run_sweep(SweepPlan(_config(), (1, 2), repeats=1), tmp_path)
    fake.made = []
    run_sweep(SweepPlan(_config(), (1, 2, 4), repeats=2), tmp_path, resume=True)
    assert fake.made == ["ws0004-run01", "ws0004-run02", "ws0002-run02", "ws0001-run02"]


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        (SweepPlan(_config(lr=0.1), (1, 2)), "another config"),
        (SweepPlan(_config(), (1, 2), "weak"), "strong scaling sweep"),
        (SweepPlan(_config(), (2, 4)), "another config"),
    ],
)
def test_a_changed_sweep_is_refused(tmp_path: Path, fake: FakeTraining, plan: SweepPlan, what: str) -> None:
    run_sweep(SweepPlan(_config(), (1, 2), repeats=1), tmp_path)
    fake.made = []
    with pytest.raises(RunFolderError, match=what):
        run_sweep(plan, tmp_path, resume=True)
    assert not fake.made


def test_a_size_that_fails_does_not_stop_the_others(tmp_path: Path, fake: FakeTraining) -> None:
    fake.fails = (2,)
    result = run_sweep(SweepPlan(_config(), (1, 2, 4), repeats=2), tmp_path)
    assert [run.status for run in result.runs if run.world_size == 2] == ["failed", "skipped"]
    assert "no such luck" in str(result.failed[0].reason)
    assert [row.world_size for row in result.analysis.curves[0].rows] == [1, 4]


def test_a_folder_of_something_else_is_refused(tmp_path: Path, fake: FakeTraining) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(RunFolderError, match="other than a sweep"):
        run_sweep(SweepPlan(_config(), (1,)), tmp_path)
    with pytest.raises(RunFolderError, match="is a file"):
        run_sweep(SweepPlan(_config(), (1,)), tmp_path / "thesis.tex")
    assert not fake.made


def test_nothing_runs_when_one_size_cannot(tmp_path: Path, fake: FakeTraining) -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        run_sweep(SweepPlan(_config(), (1, 3)), tmp_path / "out")
    assert not fake.made
    assert not (tmp_path / "out").exists()


def test_two_sweeps_never_share_a_folder(tmp_path: Path, fake: FakeTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "LOCK_PATIENCE_S", 0.5)
    plan = SweepPlan(_config(), (1,), repeats=1)
    run_sweep(plan, tmp_path)
    with (tmp_path / sweep.LOCK_NAME).open("a") as other:
        sweep.fcntl.flock(other, sweep.fcntl.LOCK_EX)
        with pytest.raises(RunFolderError, match="another sweep works"):
            run_sweep(plan, tmp_path, resume=True)
    run_sweep(plan, tmp_path, resume=True)


def test_a_run_ends_with_a_signal_to_the_sweep(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    mark = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(mark)!r}).write_text(str(os.getpid())); time.sleep(300)"

    def interrupt() -> None:
        deadline = time.monotonic() + 120
        while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(TrainingInterruptedError, match="--resume"):
        run_to_end([sys.executable, "-c", code], tmp_path / "log")
    thread.join()
    assert not psutil.pid_exists(int(mark.read_text()))
    assert signal.getsignal(signal.SIGINT) is before


def test_what_a_run_said_last_is_kept(tmp_path: Path) -> None:
    code = "import sys; print('first'); print('half\\rwhole'); sys.exit(3)"
    assert run_to_end([sys.executable, "-c", code], tmp_path / "log") == (3, "whole")
    assert (tmp_path / "log").read_text().startswith("first")
