"""Sets of moments as sorted disjoint intervals, with union, difference and overlap."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]


class Intervals:
    """A set of moments. Build it with `covering`; the constructor expects sorted and disjoint intervals."""

    __slots__ = ("ends", "starts")

    def __init__(self, starts: Times, ends: Times) -> None:
        self.starts = starts
        self.ends = ends

    @classmethod
    def covering(cls, starts: Times, ends: Times) -> Intervals:
        """All moments in at least one of the given intervals, which may overlap and be in any order."""
        keep = ends > starts
        starts, ends = starts[keep], ends[keep]
        if not len(starts):
            return cls(starts, ends)
        order = np.argsort(starts, kind="stable")
        starts, reach = starts[order], np.maximum.accumulate(ends[order])
        begins = np.concatenate(([True], starts[1:] > reach[:-1]))
        last = np.concatenate((begins[1:], [True]))
        return cls(starts[begins], reach[last])

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def total(self) -> float:
        """The total length."""
        return float((self.ends - self.starts).sum())

    def __or__(self, other: Intervals) -> Intervals:
        return Intervals.covering(np.concatenate((self.starts, other.starts)), np.concatenate((self.ends, other.ends)))

    def __sub__(self, other: Intervals) -> Intervals:
        borders = np.unique(np.concatenate((self.starts, self.ends, other.starts, other.ends)))
        pieces = borders[:-1]
        keep = self._holds(pieces) & ~other._holds(pieces)
        return Intervals.covering(pieces[keep], borders[1:][keep])

    def within(self, start: float, end: float) -> Intervals:
        """The part between two moments."""
        return Intervals.covering(np.maximum(self.starts, start), np.minimum(self.ends, end))

    def gaps(self, start: float, end: float) -> Intervals:
        """The moments between `start` and `end` that are not in the set."""
        inside = self.within(start, end)
        starts = np.concatenate(([start], inside.ends))
        ends = np.concatenate((inside.starts, [end]))
        keep = ends > starts
        return Intervals(starts[keep], ends[keep])

    def time_before(self, moments: Times) -> Times:
        """For each moment, how much of the set lies before it."""
        if not len(self):
            return np.zeros_like(moments)
        lengths = self.ends - self.starts
        before = np.concatenate(([0.0], np.cumsum(lengths)))
        index = np.searchsorted(self.starts, moments, side="right")
        inside = np.where(index > 0, np.minimum(moments, self.ends[index - 1]) - self.starts[index - 1], 0.0)
        return np.where(index > 0, before[np.maximum(index - 1, 0)] + inside, 0.0)

    def time_between(self, starts: Times, ends: Times) -> Times:
        """For each pair of moments, how much of the set lies between them."""
        return self.time_before(ends) - self.time_before(starts)

    def _holds(self, moments: Times) -> npt.NDArray[np.bool_]:
        begun = np.searchsorted(self.starts, moments, side="right")
        over = np.searchsorted(self.ends, moments, side="right")
        return begun > over


NOTHING = Intervals(np.empty(0), np.empty(0))
