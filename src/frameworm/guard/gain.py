"""Speedup from interleaved windows, with an interval that is not too narrow for few windows."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from frameworm.records.estimate import Interval, quantile

Side = Literal["before", "after"]

LEAST_PAIRS = 4
RESAMPLES = 1000
# Fraction trimmed from each end, so that one disturbed window in five pairs has no effect.
_TRIMMED = 0.2


class Window(NamedTuple):
    """One measured period of one side; windows are listed in the order of measurement."""

    side: Side
    seconds_per_sample: float


@dataclass(frozen=True, slots=True)
class Speedup(Interval[float]):
    """Speedup factor, with its 95% interval and the number of pairs of windows behind it."""

    low: float
    high: float
    pairs: int


def pair_windows(windows: Sequence[Window]) -> list[tuple[float, float]]:
    """Pair neighbouring windows of different sides as (before, after), each used once.

    A B A B and A B B A both give two pairs; the latter also cancels a machine that slows down steadily.
    """
    found: list[tuple[float, float]] = []
    waiting: Window | None = None
    for window in windows:
        if not (math.isfinite(window.seconds_per_sample) and window.seconds_per_sample > 0):
            continue
        if waiting is None or waiting.side == window.side:
            waiting = window
            continue
        before, after = (waiting, window) if waiting.side == "before" else (window, waiting)
        found.append((before.seconds_per_sample, after.seconds_per_sample))
        waiting = None
    return found


def speedup_of(windows: Sequence[Window], *, resamples: int = RESAMPLES, seed: int = 0) -> Speedup | None:
    """Estimate the speedup of `after` over `before` with a bootstrap over pairs of windows.

    The trimmed mean of the logarithms of the ratios is resampled. With few pairs such an interval is too narrow, so it
    is widened by the ratio of Student's t to the normal distribution for that many degrees of freedom.

    Args:
        windows: In the order of measurement.
        resamples: Number of bootstrap resamples.
        seed: Makes the interval reproducible.

    Returns:
        The speedup, or None with fewer than `LEAST_PAIRS` pairs.
    """
    ratios = [math.log(before / after) for before, after in pair_windows(windows)]
    count = len(ratios)
    if count < LEAST_PAIRS:
        return None
    middle = _trimmed_mean(ratios)
    draw = random.Random(seed)
    means = sorted(_trimmed_mean(draw.choices(ratios, k=count)) for _ in range(resamples))
    wider = _widening(count)
    low = middle - wider * (middle - means[int(0.025 * resamples)])
    high = middle + wider * (means[min(int(0.975 * resamples), resamples - 1)] - middle)
    return Speedup(math.exp(middle), math.exp(min(low, middle)), math.exp(max(high, middle)), count)


def _cut(count: int) -> int:
    return int(_TRIMMED * count)


def _trimmed_mean(values: Sequence[float]) -> float:
    cut = _cut(len(values))
    kept = sorted(values)[cut : len(values) - cut]
    return math.fsum(kept) / len(kept)


def _widening(count: int) -> float:
    freedom = count - 2 * _cut(count) - 1
    return quantile(freedom) / quantile(None) * math.sqrt(count / (count - 1))
