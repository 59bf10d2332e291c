"""A run is judged at its end: the planted fault is the verdict, in the record and in the run folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from delays import clock_to_set
from torch import nn
from torch.utils.data import Dataset
from workbench import classification, fit, mlp

from frameworm.engine import summary
from frameworm.records.events import Listener
from frameworm.records.schema import RunRecord, StepRecord

DELAY_S = 0.02
LONG_S = 20.0  # by a clock that is set forward


class SlowSamples(Dataset[Any]):
    """Each sample takes its time."""

    def __init__(self, samples: int, delay_s: float, pass_by: Callable[[float], None]) -> None:
        self._samples = classification(samples)
        self._delay_s = delay_s
        self._pass_by = pass_by

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        self._pass_by(self._delay_s)
        return self._samples[index]


class SlowLayer(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        time.sleep(DELAY_S)
        return values


class SlowCallback(Listener):
    def __init__(self, pass_by: Callable[[float], None]) -> None:
        self._pass_by = pass_by

    def on_step(self, step: StepRecord) -> None:
        self._pass_by(LONG_S)


def slow_compute() -> nn.Module:
    return nn.Sequential(SlowLayer(), mlp())


def test_a_slow_data_set_is_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = SlowSamples(120, LONG_S / 4, clock_to_set(monkeypatch))
    record, _, _ = fit(mlp(), data, batch_size=4, loader="torch", run_dir=tmp_path / "run")
    assert record.verdict == "input_bound"
    finding = record.findings[0]
    assert finding.severity == "critical"
    assert finding.evidence["data_wait_s"] >= LONG_S
    assert finding.evidence["measured_steps"] == 25
    assert finding.evidence["num_workers"] == record.environment["num_workers"] == 0
    stored = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert stored["verdict"] == "input_bound"
    assert RunRecord.from_dict(stored).findings == record.findings
    text = (tmp_path / "run" / "summary.txt").read_text()
    assert "verdict     input bound" in text
    assert "try: " in text
    assert "targets" in text


@pytest.mark.timing
def test_a_run_that_computes_is_healthy_and_hears_nothing_of_workers() -> None:
    for _ in range(3):
        record, _, _ = fit(slow_compute(), classification(120), batch_size=4, loader="torch")
        if not any("vary too much" in note for note in record.notes):  # a stall is no fault of the run
            break
    assert record.verdict == "healthy", (record.verdict, record.findings, record.notes)
    assert next(finding.code for finding in record.findings) == "compute_bound"
    assert not [remedy for finding in record.findings for remedy in finding.remedies if "worker" in remedy.knob]


def test_a_slow_callback_is_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer_steps = 30
    from frameworm import Trainer
    from frameworm.distributed import OptimizedDataLoader

    model = mlp()
    callback = SlowCallback(clock_to_set(monkeypatch))
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[callback], run_dir=None, device="cpu"
    )
    record = trainer.train(OptimizedDataLoader.create(classification(4 * trainer_steps), 4, num_workers=0))
    assert record.verdict == "logging_stall", (record.verdict, record.phases)
    assert record.findings[0].evidence["between_steps_s"] >= LONG_S


def test_a_short_run_says_that_it_was_too_short(tmp_path: Path) -> None:
    record, _, _ = fit(mlp(), classification(16), batch_size=4, run_dir=tmp_path / "run")
    assert (record.verdict, record.findings) == ("inconclusive", [])
    assert any("train longer" in note for note in record.notes)
    assert "verdict     inconclusive" in (tmp_path / "run" / "summary.txt").read_text()


def test_a_fault_in_judging_does_not_lose_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(summary, "judge", broken)
    record, _, _ = fit(mlp(), classification(16), batch_size=4)
    assert record.status == "completed"
    assert any("judging failed with ZeroDivisionError: planted" in note for note in record.notes)
