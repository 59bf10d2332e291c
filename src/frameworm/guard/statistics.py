"""Before and after, from noisy times: the ratio between two sets of runs (for interleaved windows, see `gain`).

Everything is computed in logarithms: a ratio is then a difference, and twice as slow weighs as much as twice as fast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from frameworm.records.estimate import Interval, quantile
from frameworm.records.statistics import percentile

MOST_BATCHES = 20
FEWEST_BATCHES = 8
VALUES_PER_BATCH = 5
# Limit of the remaining autocorrelation between batches; with 20 of them, more cannot be distinguished from a drift.
MOST_CORRELATION = 0.8

# Two runs of one program differ by about this much, however long they are: placement, clocks, neighbours. It replaces
# what a single run cannot show, and counts as one observation in addition to the actual runs.
PRIOR_SPREAD = 0.015
PRIOR_WEIGHT = 1
PRIOR_FREEDOM = 20


@dataclass(frozen=True, slots=True)
class Level:
    """The logarithm of one run's time per step, with the variance estimated from within the run."""

    value: float
    variance: float
    freedom: float


def typical_level(medians: Sequence[float]) -> Level | None:
    """Level of the typical step, from the medians of consecutive blocks of steps; robust to outliers."""
    centre = percentile(sorted(medians), 0.5) if medians else 0.0
    if centre <= 0:
        return None
    batches = [percentile(sorted(batch), 0.5) for batch in divide(medians)]
    return _level(centre, batches)


def mean_level(means: Sequence[float]) -> Level | None:
    """Level of the mean step, from the means of equally long consecutive blocks of steps; includes every stall."""
    centre = math.fsum(means) / len(means) if means else 0.0
    if centre <= 0:
        return None
    return _level(centre, [math.fsum(batch) / len(batch) for batch in divide(means)])


def divide(values: Sequence[float]) -> list[Sequence[float]]:
    """Divide into 8 to 20 consecutive batches, of at least 5 values each if there are enough."""
    count = min(len(values), max(FEWEST_BATCHES, min(MOST_BATCHES, len(values) // VALUES_PER_BATCH)))
    bounds = [index * len(values) // count for index in range(count + 1)] if count else [0]
    return [values[begin:end] for begin, end in itertools.pairwise(bounds)]


def _level(centre: float, batches: Sequence[float]) -> Level | None:
    """Level from nearly independent batches; their remaining correlation widens the error."""
    count = len(batches)
    if count < 3:
        return None
    middle = math.fsum(batches) / count
    rests = [batch - middle for batch in batches]
    squares = math.fsum(rest * rest for rest in rests)
    products = math.fsum(left * right for left, right in itertools.pairwise(rests))
    correlation = products / squares if squares > 0 else 0.0
    # Subtracting the sample mean lowers the measured correlation by about 1 / count.
    correlation = min(max(correlation + 1 / count, 0.0), MOST_CORRELATION)
    inflation = (1 + correlation) / (1 - correlation)
    variance = squares / (count - 1) / count * inflation / (centre * centre)
    return Level(math.log(centre), variance, max((count - 1) / inflation, 2.0))


def run_spread(*groups: Sequence[Level]) -> tuple[float, int]:
    """Estimate how much runs of one program differ beyond the noise within each run.

    Args:
        groups: Levels of runs that should be alike, such as those of the baseline.

    Returns:
        The standard deviation as a fraction, and its degrees of freedom from the runs; with none it is `PRIOR_SPREAD`.
    """
    freedom = 0
    squares = 0.0
    for group in groups:
        if len(group) < 2:
            continue
        middle = math.fsum(level.value for level in group) / len(group)
        within = math.fsum(level.variance for level in group) / len(group)
        observed = math.fsum((level.value - middle) ** 2 for level in group) / (len(group) - 1)
        squares += (len(group) - 1) * max(observed - within, 0.0)
        freedom += len(group) - 1
    variance = (PRIOR_WEIGHT * PRIOR_SPREAD**2 + squares) / (PRIOR_WEIGHT + freedom)
    return math.sqrt(variance), freedom


def independent_ratio(before: Sequence[Level], after: Sequence[Level]) -> Interval[float]:
    """Divide after by before, for runs that were made independently.

    The interval includes the noise within the runs and the spread between them.
    """
    assert before, "there is nothing to compare with"
    assert after, "there is nothing to compare"
    spread, learned = run_spread(before, after)
    parts = [(spread**2 * (1 / len(before) + 1 / len(after)), float(PRIOR_FREEDOM + learned))]
    for group in (before, after):
        parts += [(level.variance / len(group) ** 2, level.freedom) for level in group]
    variance = math.fsum(part for part, _ in parts)
    # Satterthwaite: degrees of freedom of a sum of variances.
    weight = math.fsum(part * part / freedom for part, freedom in parts)
    freedom = int(variance * variance / weight) if weight > 0 else PRIOR_FREEDOM
    centre = _mean([level.value for level in after]) - _mean([level.value for level in before])
    margin = quantile(freedom) * math.sqrt(variance)
    return Interval(math.exp(centre), math.exp(centre - margin), math.exp(centre + margin))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
