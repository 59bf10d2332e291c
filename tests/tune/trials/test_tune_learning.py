"""Two sides are compared where something is learned: a long climb of the rate is made short for it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from live_workloads import learnable_config
from test_tune_runner import QUICK, request_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from frameworm.config.load import load_config_from_mapping
from frameworm.config.schema import Config
from frameworm.engine.optim.schedule import SHAPES
from frameworm.guard.agreement import Agreement, OutputErrors, StateErrors, judge_agreement
from frameworm.guard.proof import Evidence
from frameworm.tune.knobs.context import apply_changes
from frameworm.tune.trials.live_rank import _soon
from frameworm.tune.trials.runner import TrialRunner, compared_steps, least_alike


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0.005, 0.02, 0.3])
def test_the_rate_is_at_its_peak_halfway(schedule: str, warmup: float) -> None:
    long = {"training.epochs": 10_000, "training.schedule": schedule, "training.warmup": warmup}
    total = _soon(apply_changes(learnable_config(), long), 16)["max_steps"]
    factors = [SHAPES[schedule](step, total, warmup) for step in range(16)]
    assert max(factors) == pytest.approx(1.0, abs=0.01)
    assert factors[8] > 0.8
    assert factors[0] < 0.2
    assert factors[15] > 0.5


def test_a_run_that_ends_sooner_keeps_its_end() -> None:
    config = apply_changes(learnable_config(), {"training.warmup": 0.01, "training.schedule": "cosine"})
    assert _soon(config, 16) == {"max_steps": 800}
    assert _soon(apply_changes(config, {"training.max_steps": 100}), 16) == {"max_steps": 100}
    assert _soon(apply_changes(config, {"training.max_steps": 10}), 16) == {"max_steps": 16}, "all states are reached"
    assert _soon(apply_changes(config, {"training.warmup": 0.0}), 16) == {"max_steps": 32}
    assert _soon(apply_changes(config, {"training.schedule": "onecycle"}), 16) == {"max_steps": 32}


def test_one_wrong_rank_is_enough() -> None:
    rows = [OutputErrors("gradient of weight", 100, 1.0, 1e-7, 1e-7, 1e-7, error, 0.0) for error in (1e-7, 1e-1)]
    fine, wrong = (Agreement([StateErrors(step, [row]) for step in range(6)]) for row in rows)
    few = replace(fine, states=fine.states[:2])
    assert least_alike([fine, wrong, few]) is wrong
    assert least_alike([fine, few]) is few
    assert least_alike([fine, fine]) is fine


@pytest.mark.parametrize(("steps", "states"), [(16, 8), (48, 8), (16, 4), (6, 6), (3, 3), (100, 1)])
def test_states_are_compared_at_different_steps_of_a_warm_run(steps: int, states: int) -> None:
    found = compared_steps(steps, states)
    assert len(set(found)) == states
    assert list(found) == sorted(found)
    assert found[0] > 5, "by then a captured step is replayed"
    assert compared_steps(steps, states, 14)[0] == 15
    assert found[-1] == max(steps, found[0] + states - 1) or states == 1


def compare(before: Config, after: Config, folder: Path) -> Evidence:
    request = request_of(before, after, "rounding")
    return TrialRunner(folder, effort=QUICK)._compare(request, folder, time.monotonic() + 240, 0.01)


def test_sides_of_a_run_with_a_long_climb_are_compared_while_they_learn(tmp_path: Path) -> None:
    long = {"training.epochs": 10_000, "training.schedule": "cosine", "training.warmup": 0.02}
    config = apply_changes(learnable_config(), long)
    evidence = compare(config, config, tmp_path)
    losses = evidence.baseline.losses
    assert losses[-1] < losses[0] - 0.1, "something is learned"
    assert evidence.candidate.losses == losses
    assert evidence.agreement is not None
    assert judge_agreement(evidence.agreement).passed
    assert [item.step for item in evidence.agreement.states][:2] == [1, 3], "the first states are early ones"


class Images(nn.Module):
    """Convolutions, whose sums are of many products, and choices of the largest, which make much of little."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in (8, 8, 16, 16, 32, 32, 64, 64):
            layers += [nn.LazyConv2d(width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if len(layers) % 7 == 6 else []
        self.layers = nn.Sequential(*layers)
        self.layers(torch.zeros(2, 3, 16, 16))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores."""
        scores: Tensor = self.head(self.layers(images).mean((2, 3)))
        return scores


def images(config: Config) -> tuple[Any, ...]:
    """Random images with a tint for each class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (1024,), generator=generator)
    tints = torch.randn(10, 3, 1, 1, generator=generator)
    return Images(), TensorDataset(torch.randn(1024, 3, 16, 16, generator=generator) + tints[labels], labels), None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "passes"), [({"gpu.channels_last": True}, True), ({"training.lr": 1.05e-4}, False)]
)
def test_sums_of_convolutions_in_another_order_are_rounding(
    changes: dict[str, Any], passes: bool, tmp_path: Path
) -> None:
    values = {
        "name": "images",
        "workload": "test_tune_learning:images",
        "data": {"num_workers": 0},
        "training": {"epochs": 100, "global_batch": 64, "lr": 1e-4, "schedule": "constant", "cpu_threads": 1},
        "gpu": {"device": "cpu"},
    }
    config = load_config_from_mapping(values, environ={})
    evidence = compare(config, apply_changes(config, changes), tmp_path)
    assert evidence.agreement is not None
    verdict = judge_agreement(evidence.agreement)
    assert verdict.passed is passes, verdict.detail
    if not passes:
        assert "lr of" in verdict.detail
