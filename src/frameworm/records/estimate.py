"""Values with their uncertainty: intervals, and estimates with standard errors for means over correlated steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

LARGEST = 1e24  # no time, size or count of a training run exceeds this; the square of a larger one may overflow


End = TypeVar("End", bound="float | None", covariant=True)


@dataclass(frozen=True, slots=True)
class Interval(Generic[End]):
    """A value and the ends of its 95% interval.

    `Interval[float]` always has both ends. In an `OpenInterval` they are None where the value was measured only once,
    so that nothing is known about its spread.
    """

    value: float
    low: End
    high: End

    def scaled(self: Interval[float], factor: float) -> Interval[float]:
        """Multiply by an exactly known, positive factor."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)

    def leaves_out(self: Interval[float], value: float) -> bool:
        """True if a value lies outside the interval: a difference from it is more than noise."""
        return self.low > value or self.high < value


OpenInterval = Interval[float | None]


def without_spread(value: float) -> OpenInterval:
    """Wrap a value that was measured once."""
    return Interval(value, None, None)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value, its standard error, and the degrees of freedom behind that error (None: many)."""

    value: float
    error: float
    freedom: int | None = None

    @property
    def margin(self) -> float:
        """Half the width of the 95% interval."""
        return quantile(self.freedom) * abs(self.error)

    @property
    def low(self) -> float:
        """Lower end of the 95% interval."""
        return self.value - self.margin

    @property
    def high(self) -> float:
        """Upper end of the 95% interval."""
        return self.value + self.margin

    def scaled(self, factor: float) -> Estimate:
        """Multiply by an exactly known factor."""
        return Estimate(self.value * factor, self.error * abs(factor), self.freedom)

    def plus(self, other: Estimate | None) -> Estimate:
        """Add another estimate whose error is taken as independent; None adds nothing."""
        if other is None:
            return self
        return Estimate(self.value + other.value, math.hypot(self.error, other.error), _fewer(self, other))

    def minus(self, other: Estimate | None) -> Estimate:
        """Subtract another estimate; None subtracts nothing."""
        return self if other is None else self.plus(other.scaled(-1.0))


def known(value: Any) -> float | None:
    """Return `value` as a float if it is a plausible measurement, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -LARGEST < value < LARGEST else None


def clamp(share: float) -> float:
    """Limit a fraction to the range 0 to 1."""
    return min(max(share, 0.0), 1.0)


def quantile(freedom: int | None) -> float:
    """Return Student's t at 97.5% by the Cornish-Fisher expansion; within 1% from three degrees of freedom on."""
    if freedom is None:
        return 1.96
    inverse = 1 / max(freedom, 1)
    return 1.96 + inverse * (2.372 + inverse * (2.822 + inverse * 2.556))


def ratio(parts: Sequence[float], wholes: Sequence[float]) -> Estimate | None:
    """Estimate the fraction of `wholes` that `parts` take, from one pair per batch of consecutive steps.

    Steps are correlated, so the error comes from how far the batches deviate from the common fraction, not from single
    steps. A single batch has no error and gives None.
    """
    pairs = [(part, whole) for part, whole in zip(parts, wholes) if whole > 0]
    total = math.fsum(whole for _, whole in pairs)
    if len(pairs) < 2 or total <= 0:
        return None
    share = math.fsum(part for part, _ in pairs) / total
    squares = math.fsum((part - share * whole) ** 2 for part, whole in pairs)
    count = len(pairs)
    return Estimate(share, math.sqrt(squares * count / (count - 1)) / total, count - 1)


def trend(values: Sequence[float]) -> Estimate | None:
    """Fit a line to evenly spaced values and return its change from first to last, relative to their mean."""
    count = len(values)
    if count < 4:
        return None
    mean = math.fsum(values) / count
    if mean <= 0:
        return None
    middle = (count - 1) / 2
    spread = math.fsum((index - middle) ** 2 for index in range(count))
    slope = math.fsum((index - middle) * (value - mean) for index, value in enumerate(values)) / spread
    rest = math.fsum((value - mean - slope * (index - middle)) ** 2 for index, value in enumerate(values))
    error = math.sqrt(rest / (count - 2) / spread)
    length = (count - 1) / mean
    return Estimate(slope * length, error * length, count - 2)


def _fewer(left: Estimate, right: Estimate) -> int | None:
    known_ones = [item for item in (left.freedom, right.freedom) if item is not None]
    return min(known_ones, default=None)


@cache
def student_quantile(error: float, freedom: int) -> float:
    """Return the value that Student's t exceeds with probability `error`, to 1e-9: `(0.025, 9)` gives 2.262."""
    low, high = 0.0, 1.0
    while _student_tail(high, freedom) > error:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _student_tail(middle, freedom) > error else (low, middle)
    return high


def _student_tail(value: float, freedom: int) -> float:
    """Probability that Student's t exceeds a positive value, by the sums of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(value / math.sqrt(freedom))
    square = math.cos(angle) ** 2
    term = total = 1.0
    for index in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= square * (index - 1) / index
        total += term
    if freedom % 2 == 0:
        return (1 - math.sin(angle) * total) / 2
    within = angle if freedom == 1 else angle + math.sin(angle) * math.cos(angle) * total
    return 0.5 - within / math.pi
