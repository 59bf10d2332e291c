"""What two sides learn is compared where something is learned: a long climb of the rate is made short for it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from live_workloads import learnable_config
from test_tune_runner import QUICK

from frameworm.engine.schedule import SHAPES
from frameworm.guard.drift import ROUNDING_UNITS, check_losses
from frameworm.tune.context import apply_changes
from frameworm.tune.live_rank import _soon
from frameworm.tune.outcomes import ProofRequest
from frameworm.tune.runner import TrialRunner


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0.005, 0.02, 0.3])
def test_the_rate_is_at_its_peak_halfway(schedule: str, warmup: float) -> None:
    long = {"training.epochs": 10_000, "training.schedule": schedule, "training.warmup": warmup}
    total = _soon(apply_changes(learnable_config(), long), 16)["max_steps"]
    factors = [SHAPES[schedule](step, total, warmup) for step in range(16)]
    assert max(factors) == pytest.approx(1.0, abs=0.01)
    assert factors[8] > 0.9
    assert factors[0] < 0.2
    assert factors[15] > 0.5


def test_a_run_that_ends_sooner_keeps_its_end() -> None:
    config = apply_changes(learnable_config(), {"training.warmup": 0.01, "training.schedule": "cosine"})
    assert _soon(config, 16) == {"max_steps": 800}
    assert _soon(apply_changes(config, {"training.max_steps": 100}), 16) == {"max_steps": 100}
    assert _soon(apply_changes(config, {"training.warmup": 0.0}), 16) == {}
    assert _soon(apply_changes(config, {"training.schedule": "onecycle"}), 16) == {}


@pytest.mark.slow
def test_curves_of_a_run_with_a_long_climb_can_tell(tmp_path: Path) -> None:
    long = {"training.epochs": 10_000, "training.schedule": "cosine", "training.warmup": 0.02}
    config, unit = apply_changes(learnable_config(), long), ROUNDING_UNITS["fp32"]
    request = ProofRequest("same", config, config, config, config, "rounding", unit, False, "same")
    evidence = TrialRunner(tmp_path, effort=QUICK)._learn(request, tmp_path, time.monotonic() + 120, 0.01)
    losses = evidence.baseline.losses
    assert losses[-1] < losses[0] - 0.1, "something is learned"
    assert check_losses(losses, evidence.candidate.losses, [item.losses for item in evidence.references], unit).passed
    half = [losses[0], *(loss + 0.02 * step for step, loss in enumerate(losses[1:]))]
    assert check_losses(losses, half, [item.losses for item in evidence.references], unit).passed is False
