"""Whether a run has warmed up: from the speed of its windows, and from the durations of single steps.

Windows alone are not enough: if every new width of a batch makes libraries load kernels, the first windows are all
equally slow. So each step records how often its shapes had been seen before. The first steps of a shape may have a cost
that later ones do not, and the probability of shapes seen never or once so far is estimated from the number of those
seen once or twice (the Good-Turing estimate).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Literal, NamedTuple

# A window that is not faster than the previous one by this factor counts as no faster.
_NO_FASTER = 0.9
# What first steps of shapes may still add to the mean step of a warm run, as a fraction.
_COLD_SHARE = 0.05
# A shape is new in its first step and may be prepared (captured, finally compiled) in its second.
_FIRST_VISITS = 2
# Number of steps averaged: at least, and at most.
_LEAST_STEPS = 3
_LATELY = 32
# If no shape has recurred after this many steps, none will.
_NO_REPEATS = 32
# For steps of this duration the cost of a new shape is negligible; even sooner if the device is the bottleneck.
_LONG_STEP_S = 0.5
_LONG_DEVICE_STEP_S = 0.05
# Steps are even if their mean is at most this multiple of the quicker ones.
_EVEN = 1.3
# Windows to wait for steps to become even; some runs never do.
_PATIENCE = 2
# A host this many steps ahead of its device waits for it in places that mean nothing.
_AHEAD = 0.5

State = Literal["faster", "cold", "warm"]


class StepNote(NamedTuple):
    """One step as seen by its host."""

    host_s: float  # from its batch to the next step, without waiting for data
    visits: int  # earlier steps with batches of the same shapes


class Warmth:
    """Judges one window after another."""

    def __init__(self) -> None:
        self._before_s: float | None = None
        self._notes: list[StepNote] = []
        self._uneven = 0

    def look(self, seconds: float, notes: Sequence[StepNote], ahead_s: float = 0.0) -> State:
        """The state of the run after another window.

        Args:
            seconds: Duration of the window.
            notes: Its steps.
            ahead_s: How long the device was still busy after the last of them.

        Returns:
            `faster` than the previous window, `cold` if it is not but should become faster, else `warm`.
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
        """What first steps of shapes will add to the mean step, as a fraction; None: no shape has recurred yet."""
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
            # Rare widths are often the large ones, which take somewhat longer even when warm.
            if first and fmean(first) > _EVEN * usual_s:
                added_s += self._chance(before) * (fmean(first) - usual_s)
        return added_s / step_s

    def _taken(self, visits: Sequence[int]) -> list[float]:
        """Durations of recent steps whose batch shape had been seen one of these numbers of times before."""
        return [note.host_s for note in self._notes if note.visits in visits][-_LATELY:]

    def _chance(self, visits: int) -> float:
        """Probability that the shapes of the next step have been seen `visits` times."""
        counts = [sum(note.visits == count for note in self._notes) for count in (visits, visits + 1)]
        # The very first steps are not recorded, so a shape may appear to begin with its second step.
        return (visits + 1) * max(0, counts[0] - counts[1]) / len(self._notes)

    def _is_even(self, notes: Sequence[StepNote]) -> bool:
        """Whether a window's steps, without those of new shapes, take about as long as the quicker recent ones."""
        taken = [note.host_s for note in notes if note.visits] or [note.host_s for note in notes]
        lately = sorted(note.host_s for note in self._notes[-max(len(notes), _LATELY) :])
        return fmean(taken) <= _EVEN * lately[len(lately) // 4]
