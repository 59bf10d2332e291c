"""What a gate may ask of a run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from delays import clock_to_set

from frameworm.config.load import load_config_from_mapping
from frameworm.config.schema import Config
from frameworm.data.steps import StepBatch
from frameworm.engine.gate import Gate, Passage
from frameworm.engine.run import train_workload
from frameworm.hardware.resolve import resolve_here
from frameworm.models.workloads import build_workload


class Validating(Gate):
    """Asks for validation before some steps."""

    def __init__(self, *before: int) -> None:
        self.before = set(before)
        self.losses: list[float | None] = []

    def enter(self, step: int) -> Passage:
        if step not in self.before:
            return "go"
        self.before.remove(step)
        return "validate"

    def validated(self, loss: float | None) -> None:
        self.losses.append(loss)


def small_config() -> Config:
    model = {"d_model": 16, "n_heads": 2, "num_layers": 1, "dim_feedforward": 16, "max_seq_len": 16, "dropout": 0.2}
    training = {"epochs": 2, "max_steps": 55, "global_batch": 120, "lr": 3e-3}  # an epoch has 50
    values = {
        "workload": "text_classifier",
        "model": model,
        "data": {"dataset": "generated", "num_workers": 0},
        "training": training,
        "gpu": {"device": "cpu"},
        "observe": {"sinks": [], "progress": False},
    }
    return resolve_here(load_config_from_mapping(values, environ={}), 1)


@pytest.mark.slow
def test_validation_on_the_way_leaves_training_as_it_is() -> None:
    config = small_config()
    ends = []
    gates = Validating(), Validating(20, 51)
    for gate in gates:
        record = train_workload(config, build_workload(config), gate=gate)
        ends.append([(epoch.train_loss, epoch.val_loss, epoch.val_accuracy) for epoch in record.epochs])
    assert ends[0] == ends[1], "dropout and the order of samples go on as if nothing had been asked"
    assert gates[0].losses == []
    first, after_epoch = gates[1].losses
    assert first is not None
    assert after_epoch == ends[0][0][1], "before step 51 nothing has changed since the first epoch ended"
    assert first > after_epoch


COMPILING_S = 100.0


class Resets(Gate):
    """The first steps take long, as where the compiler works; then the figures start over."""

    def __init__(self, at: int | None, pass_by: Callable[[float], None]) -> None:
        self._at = at
        self._pass_by = pass_by
        self._slow = 20

    def enter(self, step: int) -> Passage:
        return "reset" if step == self._at else "go"

    def admit(self, batch: StepBatch) -> None:
        if self._slow > 0:
            self._slow -= 1
            self._pass_by(COMPILING_S)


@pytest.mark.slow
def test_figures_that_start_over_hold_later_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    config, pass_by = small_config(), clock_to_set(monkeypatch)
    shares = []
    for at in (None, 21):
        record = train_workload(config, build_workload(config), gate=Resets(at, pass_by))
        shares.append(record.phases["forward"].mean_s)
        assert record.steps == 55
    delay_s = COMPILING_S * 15 / 55
    assert shares[0] > delay_s, "the delay counts as forward: 15 of 20 steps are not warm-up"
    assert shares[1] < delay_s / 2
