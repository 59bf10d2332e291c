"""Whether a run has warmed up: from the pace of its windows, and from what their single steps took.

Windows alone do not tell: where every new width of a batch makes libraries load kernels, the first windows are all
equally slow. So each step tells how often its shapes had come before. The first steps of a shape may cost what no later
one does, and how often shapes come that were seen never or once follows from those seen once or twice so far
(Good and Turing's estimate).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Literal, NamedTuple

# Not this much faster than the window before: no faster.
_NO_FASTER = 0.9
# What the first steps of shapes may add to the mean step from here on.
_COLD_SHARE = 0.05
# A shape is new in its first step and may be prepared (captured, compiled for good) in its second.
_FIRST_VISITS = 2
# Steps that a mean is taken of: at least, and at most.
_LEAST_STEPS = 3
_LATELY = 32
# Where no shape has come back after so many steps, none will.
_NO_REPEATS = 32
# Beside a step of this length what a new shape costs is small; more so where the device has more to do than the host.
_LONG_STEP_S = 0.5
_LONG_DEVICE_STEP_S = 0.05
# Steps are even while their mean lies no further above what the quicker ones take.
_EVEN = 1.3
# So many windows are waited for that steps become even; a run may be uneven by nature.
_PATIENCE = 2
# A host this far ahead of its device, in steps, waits for it at places that say nothing.
_AHEAD = 0.5

State = Literal["faster", "cold", "warm"]


class StepNote(NamedTuple):
    """One step as its host saw it."""

    host_s: float  # from its batch to the next step, so without the wait for data
    visits: int  # steps with batches of the same shapes before it


class Warmth:
    """Looks at one window after the other."""

    def __init__(self) -> None:
        self._before_s: float | None = None
        self._notes: list[StepNote] = []
        self._uneven = 0

    def look(self, seconds: float, notes: Sequence[StepNote], ahead_s: float = 0.0) -> State:
        """What the run is after one more window.

        Args:
            seconds: What the window took.
            notes: Its steps.
            ahead_s: How long the device was still busy after the last of them.

        Returns:
            `faster` than the window before, `cold` if it is not but should become so, else `warm`.
        """
        step_s = seconds / len(notes)
        before_s, self._before_s = self._before_s, step_s
        self._notes += notes
        if before_s is None or step_s <= _NO_FASTER * before_s:
            return "faster"
        device_bound = ahead_s > _AHEAD * step_s
        share = self._cold_share(step_s)
        long_s = _LONG_DEVICE_STEP_S if device_bound else _LONG_STEP_S
        if share is None and step_s < long_s and len(self._notes) < _NO_REPEATS:
            return "cold"
        if share is not None and share > _COLD_SHARE:
            return "cold"
        if device_bound or self._is_even(notes) or self._uneven >= _PATIENCE:
            return "warm"
        self._uneven += 1
        return "cold"

    def _cold_share(self, step_s: float) -> float | None:
        """What first steps of shapes will add to the mean step; None: no shape has come back yet to compare with."""
        usual = self._taken(range(_FIRST_VISITS, len(self._notes)))
        visits = _FIRST_VISITS
        if len(usual) < _LEAST_STEPS:
            usual, visits = self._taken(range(1, len(self._notes))), 1
        if len(usual) < _LEAST_STEPS:
            return None
        usual_s = fmean(usual)
        added_s = 0.0
        for before in range(visits):
            first = self._taken((before,))
            # Widths that come rarely are often the large ones: that they take somewhat longer is no cold start.
            if first and fmean(first) > _EVEN * usual_s:
                added_s += self._chance(before) * (fmean(first) - usual_s)
        return added_s / step_s

    def _taken(self, visits: Sequence[int]) -> list[float]:
        """What the last steps took whose shapes had come so often."""
        return [note.host_s for note in self._notes if note.visits in visits][-_LATELY:]

    def _chance(self, visits: int) -> float:
        """How likely the shapes of the next step have come so often."""
        counts = [sum(note.visits == count for note in self._notes) for count in (visits, visits + 1)]
        # The very first steps are not among them, so that a shape may seem to have begun with its second.
        return (visits + 1) * max(0, counts[0] - counts[1]) / len(self._notes)

    def _is_even(self, notes: Sequence[StepNote]) -> bool:
        """Whether a window's steps, less those of new shapes, take about what the quicker ones took lately."""
        taken = [note.host_s for note in notes if note.visits] or [note.host_s for note in notes]
        lately = sorted(note.host_s for note in self._notes[-max(len(notes), _LATELY) :])
        return fmean(taken) <= _EVEN * lately[len(lately) // 4]
