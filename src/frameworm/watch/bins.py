"""Many curves over one axis in bounded memory: neighbouring points are joined to bins of minimum, maximum and mean."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from typing import Any

MOST_CHANNELS = 64
_DIGITS = 6


class Bin:
    """Neighbouring points: where they lie, and of each channel how many values there are, their sum, least and most."""

    __slots__ = ("channels", "count", "first", "last", "time")

    def __init__(self, x: float, time: float) -> None:
        self.first = self.last = x
        self.time = time  # of the last point
        self.count: float = 0
        self.channels: dict[str, list[float]] = {}

    def add(self, x: float, time: float, values: Mapping[str, float], weight: float = 1) -> None:
        """Take one point in; values that are not finite are left out."""
        self.last, self.time = x, time
        self.count += weight
        channels = self.channels
        for name, value in values.items():
            if not -math.inf < value < math.inf:
                continue
            sums = channels.get(name)
            if sums is None:
                if len(channels) < MOST_CHANNELS:
                    channels[name] = [weight, weight * value, value, value]
                continue
            sums[0] += weight
            sums[1] += weight * value
            if value < sums[2]:
                sums[2] = value
            if value > sums[3]:
                sums[3] = value

    def join(self, later: Bin) -> None:
        """Take the points of a later bin in."""
        self.last, self.time = later.last, later.time
        self.count += later.count
        for name, more in later.channels.items():
            sums = self.channels.get(name)
            if sums is None:
                if len(self.channels) < MOST_CHANNELS:
                    self.channels[name] = list(more)
            else:
                sums[0] += more[0]
                sums[1] += more[1]
                sums[2] = min(sums[2], more[2])
                sums[3] = max(sums[3], more[3])


class Bins:
    """Curves that never hold more than `limit` bins, all but the last of equally many points.

    Args:
        limit: Most bins to keep; where there would be more, neighbours are joined in pairs.
    """

    def __init__(self, limit: int = 2_000) -> None:
        assert limit >= 2, "a curve needs points"
        self.stride = 1
        self._limit = limit // 2 * 2
        self._bins: list[Bin] = []

    def __len__(self) -> int:
        return len(self._bins)

    @property
    def last(self) -> float | None:
        """Where the last point lies."""
        return self._bins[-1].last if self._bins else None

    def add(self, x: float, time: float, values: Mapping[str, float], weight: float = 1) -> None:
        """Take one point in. The axis never goes back: a point that lies before the last is put beside it.

        Args:
            x: Where it lies.
            time: Its moment.
            values: One of each channel.
            weight: How many points it stands for, where it is one of a sample.
        """
        bins = self._bins
        if bins and x < bins[-1].last:
            x = bins[-1].last
        if not bins or bins[-1].count >= self.stride:
            if len(bins) >= self._limit:
                for left, right in zip(bins[::2], bins[1::2]):
                    left.join(right)
                self._bins = bins = bins[::2]
                self.stride *= 2
            bins.append(Bin(x, time))
        bins[-1].add(x, time, values, weight)

    def between(self, first: float | None, last: float | None) -> list[Bin]:
        """The bins that hold any point of a range."""
        low = 0 if first is None else bisect_left(self._bins, first, key=lambda item: item.last)
        high = len(self._bins) if last is None else bisect_left(self._bins, last, key=lambda item: item.first)
        if last is not None and high < len(self._bins) and self._bins[high].first <= last:
            high += 1
        return self._bins[low:high]


def joined(bins: Sequence[Bin], most: int) -> list[Bin]:
    """At most so many bins, each of equally many of those given, which stay as they are."""
    size = max(1, math.ceil(len(bins) / max(most, 1)))
    found = []
    for start in range(0, len(bins), size):
        group = bins[start : start + size]
        bin_ = Bin(group[0].first, group[0].time)
        for item in group:
            bin_.join(item)
        found.append(bin_)
    return found


def table(bins: Sequence[Bin], bands: Container[str] = ()) -> dict[str, Any]:
    """Bins as columns: the end of each, its time and number of points, and of each channel the mean.

    Args:
        bands: Channels of which minimum and maximum are wanted too.
    """
    channels: dict[str, dict[str, list[float | None]]] = {}
    for name in dict.fromkeys(name for item in bins for name in item.channels):
        sums = [item.channels.get(name) for item in bins]
        channels[name] = {"mean": [None if part is None else short(part[1] / part[0]) for part in sums]}
        if name in bands:
            channels[name]["min"] = [None if part is None else short(part[2]) for part in sums]
            channels[name]["max"] = [None if part is None else short(part[3]) for part in sums]
    return {
        "x": [item.last for item in bins],
        "time": [round(item.time, 3) for item in bins],
        "count": [round(item.count) for item in bins],
        "channels": channels,
    }


def short(value: float) -> float | None:
    """A number in the digits that a curve can show; None for one that is not finite."""
    if not math.isfinite(value):
        return None
    return value if isinstance(value, int) and abs(value) < 10**_DIGITS else float(f"{value:.{_DIGITS}g}")
