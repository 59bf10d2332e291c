"""Curves over the steps of a run, of bounded length however long the run is."""

from __future__ import annotations

import math
from typing import NamedTuple

from frameworm.records.schema import StepRecord

SERIES_LIMIT = 2_000


class SeriesPoint(NamedTuple):
    """Neighbouring steps drawn as one point: their mean loss and mean step time."""

    step: int  # the last of them
    epoch: int  # of that step
    loss: float | None
    step_s: float
    steps: int


class Series:
    """A curve over the steps with at most `limit` points, each the mean of equally many steps."""

    __slots__ = ("_bins", "_epoch", "_limit", "_loss", "_losses", "_seconds", "_step", "_steps", "_stride")

    def __init__(self, limit: int = SERIES_LIMIT) -> None:
        assert limit >= 3, "a curve needs points"
        # Full bins are joined in pairs, so their number is even; one place is reserved for the bin being filled.
        self._limit = (limit - 1) // 2 * 2
        self._stride = 1
        self._bins: list[_Bin] = []
        self._step = self._epoch = self._losses = self._steps = 0
        self._loss = self._seconds = 0.0

    def add(self, step: StepRecord) -> None:
        """Add one step."""
        loss = step.loss
        if loss is not None and math.isfinite(loss):
            self._loss += loss
            self._losses += 1
        self._seconds += step.step_s
        self._step = step.step
        self._epoch = step.epoch
        self._steps += 1
        if self._steps < self._stride:
            return
        self._bins.append(self._bin())
        self._losses = self._steps = 0
        self._loss = self._seconds = 0.0
        if len(self._bins) > self._limit:
            # The bin just added becomes the start of the first wider one.
            first = self._bins.pop()
            self._step, self._epoch, self._loss, self._losses, self._seconds, self._steps = first
            self._bins = [_joined(left, right) for left, right in zip(self._bins[::2], self._bins[1::2])]
            self._stride *= 2

    def points(self) -> list[SeriesPoint]:
        """Return the curve so far, up to the last step."""
        bins = [*self._bins, self._bin()] if self._steps else self._bins
        return [
            SeriesPoint(step, epoch, loss / losses if losses else None, seconds / steps, steps)
            for step, epoch, loss, losses, seconds, steps in bins
        ]

    def _bin(self) -> _Bin:
        return self._step, self._epoch, self._loss, self._losses, self._seconds, self._steps


_Bin = tuple[int, int, float, int, float, int]  # step, epoch, sum of losses, their number, seconds, steps


def _joined(left: _Bin, right: _Bin) -> _Bin:
    return right[0], right[1], left[2] + right[2], left[3] + right[3], left[4] + right[4], left[5] + right[5]
