"""Learning rates over a run."""

from __future__ import annotations

import itertools

import pytest
import torch

from frameworm.engine.optim.schedule import SHAPES, Schedule
from frameworm.errors import ConfigError


def _rates(kind: str, total: int, warmup: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = Schedule(optimizer, kind, total, warmup)
    rates = []
    for step in range(total):
        schedule.before_step(step)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_onecycle_is_torchs_without_momentum() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    reference = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=50, cycle_momentum=False)
    expected = []
    for _ in range(50):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()
    assert _rates("onecycle", 50, 0.0) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_climbs_and_falls_to_nothing(kind: str) -> None:
    rates = _rates(kind, 100, 0.1)
    assert rates[:10] == pytest.approx([0.05 * (index + 1) for index in range(10)])
    assert max(rates) == pytest.approx(0.5)
    assert all(first >= second for first, second in itertools.pairwise(rates[10:]))
    assert 0 < rates[-1] < 0.01


def test_constant_stays() -> None:
    assert set(_rates("constant", 10, 0.0)) == {0.5}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("total", [1, 2, 3])
def test_short_runs_have_finite_positive_rates(kind: str, total: int) -> None:
    assert all(0 < rate <= 0.5 for rate in _rates(kind, total, 0.0))


def test_a_length_is_needed_and_said() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    with pytest.raises(ConfigError, match=r"training\.max_steps"):
        Schedule(optimizer, "cosine", None, 0.0)
    Schedule(optimizer, "constant", None, 0.0).before_step(12345)
