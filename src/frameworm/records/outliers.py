"""Finds steps that stand out, as they arrive and in bounded memory."""

from __future__ import annotations

import heapq
import itertools
from collections import deque

from frameworm.records.schema import StepRecord

MOST_KEPT = 10
RECENT_STEPS = 256
JUDGE_EVERY = 64
FEWEST_STEPS = 16
# In standard deviations, estimated as 1.4826 times the median absolute deviation.
DISTANCE = 6.0
# Relative to the median: without it, any hiccup among nearly identical steps would be an outlier.
SMALLEST_EXCESS = 0.2

_TO_STD = 1.4826


class SlowSteps:
    """Keeps the slowest steps that lie far above the median of their neighbours; validation time is not counted.

    Args:
        limit: Most steps to keep.
        distance: How far above the median a step must lie, in robust standard deviations.
    """

    def __init__(self, limit: int = MOST_KEPT, distance: float = DISTANCE) -> None:
        assert limit > 0, "nothing would be kept"
        self._limit = limit
        self._distance = distance
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._unjudged: list[StepRecord] = []  # the first steps, until there are enough neighbours to compare with
        self._threshold_s: float | None = None
        self._since = 0
        self._order = itertools.count()
        self._kept: list[tuple[float, int, StepRecord]] = []  # a heap, the fastest first

    def add(self, step: StepRecord) -> None:
        """Add one step; cheap enough for every step."""
        step_s = _training_s(step)
        self._recent.append(step_s)
        if self._threshold_s is None:
            self._unjudged.append(step)
            if len(self._unjudged) >= FEWEST_STEPS:
                self._judge()
            return
        if step_s > self._threshold_s:
            self._keep(step)
        self._since += 1
        if self._since >= JUDGE_EVERY:
            self._judge()

    def steps(self) -> list[StepRecord]:
        """Return the outliers, slowest first; empty while there are too few steps to tell."""
        return [step for _, _, step in sorted(self._kept, reverse=True)]

    def _judge(self) -> None:
        ordered = sorted(self._recent)
        median = ordered[len(ordered) // 2]
        deviations = sorted(abs(value - median) for value in ordered)
        spread = deviations[len(deviations) // 2] * _TO_STD
        self._threshold_s = median + max(self._distance * spread, SMALLEST_EXCESS * median)
        self._since = 0
        for step in self._unjudged:
            if _training_s(step) > self._threshold_s:
                self._keep(step)
        self._unjudged.clear()

    def _keep(self, step: StepRecord) -> None:
        item = (_training_s(step), next(self._order), step)
        if len(self._kept) < self._limit:
            heapq.heappush(self._kept, item)
        else:
            heapq.heappushpop(self._kept, item)


def _training_s(step: StepRecord) -> float:
    return step.step_s - step.phases["validation"] if "validation" in step.phases else step.step_s
