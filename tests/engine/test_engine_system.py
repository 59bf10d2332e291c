"""A run of the engine is watched from beside: the machine, the steps that stand out, and a monitor as a callback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from delays import clock_to_set
from torch.utils.data import DataLoader
from workbench import classification, make_optimizer, mlp, parameters

from frameworm import Callback, PerformanceMonitor, RunRecord, Trainer
from frameworm.config.schema import Config
from frameworm.errors import ConfigError, MissingPackageError
from frameworm.records.samples import read_samples
from frameworm.records.schema import StepRecord
from frameworm.records.writer import read_steps


def train(
    run_dir: Path | None, *callbacks: Callback, steps: int = 40, **observe: Any
) -> tuple[RunRecord, torch.Tensor]:
    model = mlp()
    config = Config()
    for name, value in observe.items():
        setattr(config.observe, name, value)
    config.gpu.device = "cpu"
    trainer = Trainer(model, make_optimizer("sgd", model), config=config, run_dir=run_dir, callbacks=callbacks)
    record = trainer.train(DataLoader(classification(160), 4))
    return record, parameters(model)


class Pause(Callback):
    """Sleeps after one step, or lets time pass otherwise, which lengthens the next."""

    def __init__(self, after: int, seconds: float, pass_by: Callable[[float], None] = time.sleep) -> None:
        self._after = after
        self._seconds = seconds
        self._pass_by = pass_by

    def on_step(self, step: StepRecord) -> None:
        if step.step == self._after:
            self._pass_by(self._seconds)


class PauseUntilLooked(Callback):
    """Waits after one step until the machine was looked at so many times since."""

    def __init__(self, after: int, samples: Path, looks: int) -> None:
        self._after = after
        self._samples = samples
        self._looks = looks

    def on_step(self, step: StepRecord) -> None:
        if step.step == self._after:
            began, deadline = time.time(), time.monotonic() + 120
            while self._since(began) < self._looks and time.monotonic() < deadline:
                time.sleep(0.02)

    def _since(self, began: float) -> int:
        return sum(sample.time > began for sample in read_samples(self._samples)) if self._samples.exists() else 0


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("frameworm-")}


@pytest.mark.slow
def test_the_machine_is_in_the_summary_and_beside_it(tmp_path: Path) -> None:
    before = _threads()
    file = tmp_path / "run" / "system-rank0.jsonl"
    record, _ = train(tmp_path / "run", PauseUntilLooked(10, file, 2), system_interval_s=0.1)
    assert record.system is not None
    assert record.system.samples >= 2
    assert record.system.rss_bytes is not None
    samples = list(read_samples(file))
    assert len(samples) >= record.system.samples, "those before the first and after the last step do not count"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["system"]["rss_bytes"]["max"] == record.system.rss_bytes.max
    assert summary["system"]["gpu_busy"] is None
    assert not _threads() - before


def test_a_step_that_stands_out_is_kept_with_its_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, _ = train(tmp_path / "run", Pause(20, 300.0, clock_to_set(monkeypatch)))
    found = next(step for step in record.slow_steps if step.step == 21)
    assert 300 <= found.phases["other"] <= found.step_s
    assert max(found.phases, key=lambda name: found.phases[name]) == "other"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [step["step"] for step in summary["slow_steps"]] == [step.step for step in record.slow_steps]


def test_off_leaves_no_sampler_and_the_same_weights(tmp_path: Path) -> None:
    record, without = train(tmp_path / "off", system_interval_s=None)
    assert record.system is None
    assert not (tmp_path / "off" / "system-rank0.jsonl").exists()
    watched, observed = train(tmp_path / "on", PerformanceMonitor(), system_interval_s=0.05)
    assert watched.system is not None
    assert torch.equal(without, observed)


def test_a_run_without_folder_is_watched_too() -> None:
    record, _ = train(None, Pause(5, 0.1))
    assert record.system is not None
    assert not any("lost" in note for note in record.notes)


def test_a_file_in_the_way_costs_the_samples_only(tmp_path: Path) -> None:
    class InTheWay(Callback):
        def on_run_start(self, record: RunRecord) -> None:
            (tmp_path / "run" / "system-rank0.jsonl").unlink(missing_ok=True)
            (tmp_path / "run" / "system-rank0.jsonl").mkdir()

    record, _ = train(tmp_path / "run", InTheWay(), Pause(5, 0.2), system_interval_s=0.1)
    assert record.status == "completed"
    assert any("samples of the machine were lost" in note for note in record.notes)


def test_a_failing_run_ends_its_sampler(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_step(self, step: StepRecord) -> None:
            raise ZeroDivisionError

    before = _threads()
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "run", Fails())
    assert not _threads() - before
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["system"]["samples"] >= 1


def test_a_monitor_on_a_trainer_sees_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = PerformanceMonitor(tmp_path / "own")
    record, _ = train(None, Pause(20, 300.0, clock_to_set(monkeypatch)), monitor)
    found = monitor.get_statistics()
    assert {"data_loading_time", "forward_time", "backward_time", "optimizer_time", "total_time"} <= set(found)
    assert found["total_time"]["max"] >= 300
    assert len(read_steps(tmp_path / "own" / "steps-rank0.jsonl")) == record.steps == 40
    assert 21 in [step.step for step in monitor.outlier_steps()]
    assert monitor.record() is record


def test_the_interval_is_checked() -> None:
    with pytest.raises(ConfigError, match="system_interval_s"):
        Config(observe={"system_interval_s": 0})  # type: ignore[arg-type]
    assert Config(observe={"system_interval_s": "off"}).observe.system_interval_s is None  # type: ignore[arg-type]


def test_a_run_that_cannot_begin_leaves_no_thread_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(folder: object) -> None:
        raise MissingPackageError("something is not installed")

    monkeypatch.setattr("frameworm.engine.run_output.EpochTable", missing)
    before = _threads()
    with pytest.raises(MissingPackageError):
        train(tmp_path / "run")
    assert not _threads() - before
    assert not (tmp_path / "run").exists()
