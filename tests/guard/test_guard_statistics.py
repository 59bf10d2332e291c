"""Ratios with their intervals: do they hold what they promise?"""

from __future__ import annotations

import math

import pytest
from synthetic_runs import CORRELATED, LIVELY, QUIET, Noise, times

from frameworm.guard.statistics import (
    PRIOR_SPREAD,
    Level,
    independent_ratio,
    mean_level,
    run_spread,
    typical_level,
)


@pytest.mark.parametrize("noise", [QUIET, LIVELY, CORRELATED], ids=["quiet", "lively", "correlated"])
def test_a_run_knows_how_well_it_knows_itself(noise: Noise) -> None:
    """The error of one run covers where its level lies; one over single steps would be many times too small."""
    fixed = Noise(noise.scatter, noise.memory, noise.white, noise.outliers, noise.outlier_size, 0.0, between=0.0)
    missed = 0
    for seed in range(60):
        level = typical_level(times(seed, fixed, 600))
        assert level is not None
        missed += abs(level.value - math.log(0.04)) > 2.5 * math.sqrt(level.variance)
    assert missed <= 9


def test_outliers_move_the_mean_and_not_the_typical_step() -> None:
    plain = [1.0, 1.01, 0.99] * 100
    stalled = [10.0 if index % 100 == 50 else value for index, value in enumerate(plain)]
    typical, mean = typical_level(stalled), mean_level(stalled)
    assert typical is not None
    assert mean is not None
    assert math.exp(typical.value) == pytest.approx(1.0, abs=0.001)
    assert math.exp(mean.value) == pytest.approx(1.09, abs=0.005)


def test_the_spread_between_runs_is_learned() -> None:
    alike = [Level(value, 1e-8, 19.0) for value in (0.0, 0.001, -0.001, 0.0, 0.001)]
    apart = [Level(value, 1e-8, 19.0) for value in (0.0, 0.1, -0.1, 0.05, -0.05)]
    assert run_spread(alike[:1], alike[:1]) == (PRIOR_SPREAD, 0)
    assert run_spread(alike)[0] < PRIOR_SPREAD
    assert run_spread(apart)[0] > 0.05
    new = [Level(0.06, 1e-8, 19.0)]
    assert independent_ratio(alike, new).leaves_out(1)
    assert not independent_ratio(apart, new).leaves_out(1)


def test_too_little_has_no_level() -> None:
    assert typical_level([]) is None
    assert mean_level([1.0, 1.0]) is None
