"""Windows measured in turns: does the interval of the speedup hold what it promises?"""

from __future__ import annotations

import math
import random
from itertools import chain

import pytest

from frameworm.guard.gain import LEAST_PAIRS, Speedup, Window, speedup_of


def _speedup(before: list[float], after: list[float]) -> Speedup:
    pairs = ((Window("before", old), Window("after", new)) for old, new in zip(before, after, strict=True))
    found = speedup_of(list(chain.from_iterable(pairs)), resamples=400)
    assert found is not None
    return found


def _windows(seed: int, count: int, factor: float, noise: float = 0.03) -> tuple[list[float], list[float]]:
    """Windows in turns on a machine whose speed wanders."""
    draw = random.Random(seed)
    before, after, state = [], [], 0.0
    for _ in range(count):
        state += draw.gauss(0, 0.05)
        before.append(math.exp(state + draw.gauss(0, noise)))
        after.append(factor * math.exp(state + draw.gauss(0, noise)))
    return before, after


@pytest.mark.parametrize("count", [5, 10])
def test_windows_without_a_change_are_within_noise(count: int) -> None:
    found = [_speedup(*_windows(seed, count, 1.0)) for seed in range(200)]
    alarms = sum(item.low > 1 or item.high < 1 for item in found)
    assert alarms <= 16, "more than 8% where 5% are promised"


def test_windows_show_a_tenth() -> None:
    found = [_speedup(*_windows(seed, 8, 0.9)) for seed in range(50)]
    assert sum(item.low > 1 and item.high > 1 / 0.9 > item.low / 1.05 for item in found) >= 45


def test_one_disturbed_window_does_not_decide() -> None:
    before, after = [1.0, 1.01, 0.99, 1.0, 1.01, 1.0, 0.99], [0.9, 0.91, 0.9, 9.0, 0.9, 0.89, 0.9]
    assert 1 / _speedup(before, after).value == pytest.approx(0.9, abs=0.02)


def test_the_same_windows_give_the_same_interval() -> None:
    assert _speedup([1.0] * 4, [2.0] * 4) == _speedup([1.0] * 4, [2.0] * 4)
    few = [Window("before", 1.0), Window("after", 1.0)] * (LEAST_PAIRS - 1)
    assert speedup_of(few) is None
