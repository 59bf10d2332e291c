"""Metrics of a run from its steps: exact where that is cheap, and in bounded memory for any number of steps."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from frameworm.records.observations import ModelFlops
from frameworm.records.outliers import MOST_KEPT, SlowSteps
from frameworm.records.schema import PHASES, Phase, Statistics, StepRecord, Throughput
from frameworm.records.series import SERIES_LIMIT, Series
from frameworm.records.series import SeriesPoint as SeriesPoint

DEFAULT_WARMUP = 5
EXACT_LIMIT = 10_000
RELATIVE_ERROR = 0.005

_GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_PER_LOG = 1 / math.log(_GROWTH)
_SMALLEST_S = 1e-9


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which a fraction `share` of sorted values lies, by linear interpolation."""
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def statistics(values: Iterable[float]) -> Statistics | None:
    """Compute the spread of the finite values; None if there are none.

    `std` is the population's, because these are all the values. Percentiles interpolate linearly.
    """
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return None
    mean = math.fsum(ordered) / len(ordered)
    return Statistics(
        mean=mean,
        std=math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)),
        min=ordered[0],
        max=ordered[-1],
        p50=percentile(ordered, 0.50),
        p95=percentile(ordered, 0.95),
        p99=percentile(ordered, 0.99),
    )


class Spread:
    """Statistics of a stream of positive numbers in bounded memory.

    Mean, std, min and max cover every value. Percentiles are exact up to `exact_limit` values; beyond that, values are
    counted in buckets that grow by about 1%, so that a percentile is within 0.5% of the exact one.
    """

    __slots__ = ("_buckets", "_exact", "_exact_limit", "_max", "_mean", "_min", "_squares", "count", "total")

    def __init__(self, exact_limit: int = EXACT_LIMIT) -> None:
        self.count = 0
        self.total = 0.0
        self._exact_limit = exact_limit
        self._exact: array[float] | None = array("d")
        self._buckets: dict[int, int] = {}
        self._mean = 0.0
        self._squares = 0.0  # sum of squared distances from the mean, by Welford's algorithm
        self._min = math.inf
        self._max = -math.inf

    def add(self, value: float) -> None:
        """Add one value; a non-finite value is ignored."""
        if not math.isfinite(value):
            return
        self.count += 1
        self.total += value
        exact = self._exact
        if exact is not None:
            exact.append(value)
            if self.count > self._exact_limit:
                self._exact = None
                for number, item in enumerate(exact, start=1):
                    self._count(item, number)
            return
        self._count(value, self.count)

    def _count(self, value: float, number: int) -> None:
        """Count value number `number` in the buckets."""
        distance = value - self._mean
        self._mean += distance / number
        self._squares += distance * (value - self._mean)
        if value < self._min:
            self._min = value
        if value > self._max:
            self._max = value
        index = math.ceil(math.log(max(value, _SMALLEST_S)) * _PER_LOG)
        self._buckets[index] = self._buckets.get(index, 0) + 1

    def statistics(self) -> Statistics | None:
        """Return the statistics so far; None before the first value."""
        if self.count == 0:
            return None
        if self._exact is not None:
            return statistics(self._exact)
        return Statistics(
            mean=self.total / self.count,
            std=math.sqrt(self._squares / self.count),
            min=self._min,
            max=self._max,
            p50=self._percentile(0.50),
            p95=self._percentile(0.95),
            p99=self._percentile(0.99),
        )

    def _percentile(self, share: float) -> float:
        position = share * (self.count - 1)
        low = math.floor(position)
        first, second = self._at(low), self._at(min(low + 1, self.count - 1))
        return first + (second - first) * (position - low)

    def _at(self, rank: int) -> float:
        """The value at a rank of the sorted values, within the relative error."""
        seen = 0
        for index in sorted(self._buckets):
            seen += self._buckets[index]
            if seen > rank:
                middle = 2 * _GROWTH**index / (1 + _GROWTH)
                return min(max(middle, self._min), self._max)
        return self._max


@dataclass(slots=True)
class _Totals:
    """Sums over the measured steps."""

    spread: Spread
    training_s: float = 0.0  # validation is part of the step time, but not of the training speed
    samples: int = 0
    tokens: int = 0
    squared_tokens: float = 0.0  # sum of tokens squared over samples: attention scales with it
    tokens_step_s: float = 0.0
    padded_tokens: int = 0
    tokens_where_padded: int = 0
    phased_step_s: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    communication_s: float = 0.0
    communication_steps: int = 0
    rank_wait_s: float = 0.0
    rank_wait_steps: int = 0

    def add(self, step: StepRecord) -> None:
        step_s = training_s = step.step_s
        if "validation" in step.phases:
            training_s -= step.phases["validation"]
        self.spread.add(step_s)
        self.training_s += training_s
        self.samples += step.samples
        tokens = step.tokens
        if tokens is not None:
            self.tokens += tokens
            self.squared_tokens += tokens * tokens / max(step.samples, 1)
            self.tokens_step_s += training_s
            if step.padded_tokens is not None:
                self.padded_tokens += step.padded_tokens
                self.tokens_where_padded += tokens
        if step.communication_s is not None:
            self.communication_s += step.communication_s
            self.communication_steps += 1
        if step.rank_wait_s is not None:
            self.rank_wait_s += step.rank_wait_s
            self.rank_wait_steps += 1
        if step.phases:
            self.phased_step_s += step_s
            phases = self.phases
            for name, seconds in step.phases.items():
                if name in phases:
                    phases[name] += seconds
                else:
                    phases[name] = seconds


class StepAggregate:
    """Adds up the steps of one rank as they arrive, in bounded memory.

    The first `warmup` steps are excluded from all metrics, but never more than half of the steps, so that a short run
    has metrics too. Sums cover every other step; percentiles are those of `Spread`; `series` covers all steps including
    the warm-up.

    Args:
        warmup: Steps to exclude at the start.
        exact_limit: Number of steps up to which percentiles are exact.
        series_limit: Most points of `series`.
        slow_limit: Most outliers to keep.
    """

    def __init__(
        self,
        warmup: int = DEFAULT_WARMUP,
        exact_limit: int = EXACT_LIMIT,
        series_limit: int = SERIES_LIMIT,
        slow_limit: int = MOST_KEPT,
    ) -> None:
        assert warmup >= 0, "warm-up is a number of steps"
        self.steps = 0
        self.skipped: int | None = None
        self._warmup = warmup
        self._exact_limit = exact_limit
        self._head: list[StepRecord] | None = []
        self._totals = _Totals(Spread(exact_limit))
        self._series = Series(series_limit)
        self._slow = SlowSteps(slow_limit)

    def add(self, step: StepRecord) -> None:
        """Add one step; cheap enough for every step."""
        self.steps += 1
        self._series.add(step)
        if self.steps > self._warmup:
            self._slow.add(step)
        if step.skipped is not None:
            self.skipped = (self.skipped or 0) + step.skipped
        if self._head is None:
            self._totals.add(step)
            return
        # Until there are twice as many steps as the warm-up, it is not known how many to exclude.
        self._head.append(step)
        if len(self._head) >= 2 * self._warmup:
            self._totals = self._measured()
            self._head = None

    @property
    def measured_steps(self) -> int:
        """Number of steps behind the metrics."""
        return self._measured().spread.count

    @property
    def measured_s(self) -> float:
        """Total time of the measured steps."""
        return self._measured().spread.total

    @property
    def measured_samples(self) -> int:
        """Samples of the measured steps on this rank, to be summed over ranks with unequal shards."""
        return self._measured().samples

    @property
    def measured_tokens(self) -> int | None:
        """Tokens of the measured steps on this rank; None if no step knows them."""
        totals = self._measured()
        return totals.tokens if totals.tokens_step_s > 0 else None

    @property
    def measured_training_s(self) -> float:
        """Total time of the measured steps without validation."""
        return self._measured().training_s

    def measured_flops(self, model: ModelFlops) -> float:
        """FLOPs of the measured steps on this rank."""
        totals = self._measured()
        known = totals.tokens_step_s > 0
        return model.of(totals.samples, totals.tokens if known else None, totals.squared_tokens if known else None)

    def throughput(
        self, world_size: int = 1, world_samples: int | None = None, world_tokens: int | None = None
    ) -> Throughput:
        """Return the speed of the whole run, from this rank's steps; validation time does not count.

        Args:
            world_size: Factor for this rank's samples and tokens.
            world_samples: `measured_samples` summed over the ranks, if their shards are unequal.
            world_tokens: `measured_tokens` summed over the ranks, likewise.
        """
        totals = self._measured()
        step_s = totals.training_s
        samples = totals.samples * world_size if world_samples is None else world_samples
        tokens = totals.tokens * world_size if world_tokens is None else world_tokens
        return Throughput(
            samples_per_s=samples / step_s if step_s > 0 else None,
            tokens_per_s=tokens / totals.tokens_step_s if totals.tokens_step_s > 0 else None,
            step_s=totals.spread.statistics(),
        )

    def phases(self) -> dict[str, Phase]:
        """Return mean time and fraction of each phase seen; with `other` they add up to the mean step.

        Phases are parts of a step that do not overlap. If their clocks add up to more than the step, `other` is zero
        and the excess stays visible. Steps without phases are assumed to divide like the others.
        """
        totals = self._measured()
        if totals.phased_step_s <= 0:
            return {}
        mean_step_s = totals.spread.total / totals.spread.count
        seen = {name: seconds / totals.phased_step_s for name, seconds in totals.phases.items() if name != "other"}
        seen["other"] = max(0.0, 1.0 - math.fsum(seen.values()))
        order = [*(name for name in PHASES if name in seen), *(name for name in seen if name not in PHASES)]
        return {name: Phase(mean_s=seen[name] * mean_step_s, share=seen[name]) for name in order}

    def communication_s(self) -> float | None:
        """Mean time gradients were in flight, over the steps that know it."""
        totals = self._measured()
        return totals.communication_s / totals.communication_steps if totals.communication_steps else None

    def rank_wait_s(self) -> float | None:
        """Mean wait for other ranks, over the steps that know it."""
        totals = self._measured()
        return totals.rank_wait_s / totals.rank_wait_steps if totals.rank_wait_steps else None

    def padding_waste(self) -> float | None:
        """Fraction of the computed tokens that were padding; None if unknown."""
        totals = self._measured()
        return 1 - totals.tokens_where_padded / totals.padded_tokens if totals.padded_tokens > 0 else None

    def series(self) -> list[SeriesPoint]:
        """Loss and step time over the run, thinned evenly."""
        return self._series.points()

    def slow_steps(self) -> list[StepRecord]:
        """The steps that took far longer than their neighbours, slowest first, without the warm-up."""
        return self._slow.steps()

    def _measured(self) -> _Totals:
        if self._head is None:
            return self._totals
        totals = _Totals(Spread(self._exact_limit))
        for step in self._head[min(self._warmup, len(self._head) // 2) :]:
            totals.add(step)
        return totals


@dataclass(slots=True)
class StepSummary:
    """Metrics of a sequence of steps."""

    throughput: Throughput
    phases: dict[str, Phase]
    padding_waste: float | None


def summarise_steps(steps: Sequence[StepRecord], warmup: int = DEFAULT_WARMUP, world_size: int = 1) -> StepSummary:
    """Summarise a list of steps by the rules of `StepAggregate`, with exact percentiles."""
    aggregate = StepAggregate(warmup, exact_limit=len(steps))
    for step in steps:
        aggregate.add(step)
    return StepSummary(aggregate.throughput(world_size), aggregate.phases(), aggregate.padding_waste())
