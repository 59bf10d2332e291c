"""What two sides learn is compared where something is learned: a long climb of the rate is made short for it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from live_workloads import learnable_config
from test_tune_runner import QUICK
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from frameworm.config.load import load_config_from_mapping
from frameworm.config.schema import Config
from frameworm.engine.optim.schedule import SHAPES
from frameworm.guard.drift import ROUNDING_UNITS, check_losses
from frameworm.tune.knobs.context import apply_changes
from frameworm.tune.trials.live_rank import _soon
from frameworm.tune.trials.outcomes import ProofRequest
from frameworm.tune.trials.runner import TrialRunner


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
    config, unit = load_config_from_mapping(values, environ={}), ROUNDING_UNITS["fp32"]
    other = apply_changes(config, changes)
    request = ProofRequest("images", config, other, config, other, "rounding", unit, False, "images")
    evidence = TrialRunner(tmp_path, effort=QUICK)._learn(request, tmp_path, time.monotonic() + 120, 0.1)
    references = [item.losses for item in evidence.references]
    checked = check_losses(evidence.baseline.losses, evidence.candidate.losses, references, unit)
    assert checked.passed is passes, checked.detail
