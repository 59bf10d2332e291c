"""A delay planted in one part of the step is found in that phase, and nowhere else."""

from __future__ import annotations

import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from delays import Slow, close, median
from torch import nn
from torch.utils.data import DataLoader
from workbench import Steps, classification

from frameworm import Trainer
from frameworm.data.steps import StepSource
from frameworm.engine.checkpoint.training_state import TrainingState
from frameworm.records.schema import StepRecord
from frameworm.records.writer import read_steps

pytestmark = pytest.mark.timing

WAIT_S = 0.03
STEPS = 12
WARM_UP = 3


class SlowOptimizer(torch.optim.SGD):
    """Takes its time over an update."""

    def __init__(self, parameters: Any, wait_s: float) -> None:
        super().__init__(parameters, lr=0.1)
        self.wait_s = wait_s

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(self.wait_s)
        super().step(closure)


class SlowLoader(DataLoader[Any]):
    """Takes its time over a batch."""

    wait_s = 0.0

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            time.sleep(self.wait_s)
            yield batch


def _train(folder: Path, planted: str, monkeypatch: pytest.MonkeyPatch) -> list[StepRecord]:
    def wait_in(phase: str) -> float:
        return WAIT_S if phase == planted else 0.0

    slow = Slow(wait_in("forward"), wait_in("backward"))
    model = nn.Sequential(nn.Linear(6, 16), slow, nn.Linear(16, 3))
    steps = Steps()
    capture = TrainingState.capture

    def slow_capture(self: TrainingState, *how: Any) -> Any:
        time.sleep(wait_in("checkpoint"))
        return capture(self, *how)

    monkeypatch.setattr(TrainingState, "capture", slow_capture)
    trainer = Trainer(
        model,
        SlowOptimizer(model.parameters(), wait_in("optimizer")),
        callbacks=[steps],
        device="cpu",
        run_dir=folder,
        every_steps=1 if planted == "checkpoint" else 1000,
        when_busy="wait",
    )
    loader = SlowLoader(classification(4 * STEPS), batch_size=4)
    loader.wait_s = wait_in("data_wait")
    trainer.train(loader)
    return steps.records


@pytest.mark.parametrize("planted", ["data_wait", "forward", "backward", "optimizer", "checkpoint"])
def test_a_delay_is_found_in_its_phase(planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = _train(tmp_path / "run", planted, monkeypatch)[WARM_UP:]
    found = {name: median(step.phases.get(name, 0.0) for step in steps) for name in steps[0].phases}
    if planted == "checkpoint":  # saving takes a while by itself
        assert found[planted] >= WAIT_S
    else:
        assert close(found[planted], WAIT_S), found
    for name, seconds in found.items():
        assert name == planted or seconds < WAIT_S / 2, found
    for step in steps:
        assert sum(step.phases.values()) == pytest.approx(step.step_s, rel=1e-6)


def test_a_slow_validation_is_a_phase_of_the_last_step() -> None:
    steps = Steps()
    model = nn.Linear(6, 3)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[steps], device="cpu", run_dir=None)
    validation = SlowLoader(classification(8), batch_size=4)
    validation.wait_s = WAIT_S
    trainer.train(DataLoader(classification(20), batch_size=4), validation)
    assert ["validation" in step.phases for step in steps.records] == [False] * 4 + [True]
    assert steps.records[-1].phases["validation"] >= 2 * WAIT_S


class SlowToStart(DataLoader[Any]):
    """Takes its time before the first batch, as one does that starts processes."""

    def __iter__(self) -> Any:
        time.sleep(WAIT_S)
        return super().__iter__()


def test_starting_a_loader_is_a_wait_for_data_in_each_epoch(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path / "run", progress=False)
    record = trainer.train(SlowToStart(classification(12), 4), epochs=6)
    steps = read_steps(tmp_path / "run" / "steps-rank0.jsonl")
    assert [step.step for step in steps] == list(range(1, 19))
    firsts = [step for step in steps if step.step % 3 == 1]
    others = [step for step in steps if step.step % 3 != 1]
    assert close(median(step.phases["data_wait"] for step in firsts), WAIT_S)
    assert median(step.phases["data_wait"] for step in others) < WAIT_S / 3
    assert all(sum(step.phases.values()) == pytest.approx(step.step_s, rel=1e-5) for step in steps)
    assert sum(epoch.epoch_time_s for epoch in record.epochs) >= 6 * WAIT_S
    assert record.verdict == "input_bound"


def test_what_the_host_spends_on_copying_a_batch_is_no_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = types.SimpleNamespace(copied_s=1.0)  # from before the epoch, and nobody's

    class Copying(DataLoader[Any]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                time.sleep(0.02)
                time.sleep(WAIT_S)
                copies.copied_s += WAIT_S
                yield batch

    monkeypatch.setattr(StepSource, "copies", property(lambda self: copies))
    steps = Steps()
    model = nn.Linear(6, 3)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[steps], device="cpu", run_dir=None)
    trainer.train(Copying(classification(32), batch_size=4))
    assert close(median(step.phases["transfer"] for step in steps.records), WAIT_S)
    assert close(median(step.phases["data_wait"] for step in steps.records), 0.02)
    assert max(step.phases["transfer"] for step in steps.records) < 2 * WAIT_S


def test_a_run_that_fails_leaves_its_short_steps_in_the_file(tmp_path: Path) -> None:
    class Ending(DataLoader[Any]):
        def __iter__(self) -> Any:
            for number, batch in enumerate(super().__iter__()):
                if number == 9:
                    raise OSError("the store is gone")
                yield batch

    model = nn.Linear(6, 3)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu", run_dir=tmp_path / "run")
    with pytest.raises(OSError, match="the store is gone"):
        trainer.train(Ending(classification(80), batch_size=4))
    assert [step.step for step in read_steps(tmp_path / "run" / "steps-rank0.jsonl")] == list(range(1, 10))
