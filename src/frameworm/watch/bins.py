"""Many curves over one axis in bounded memory: neighbouring points are merged into bins of min, max and mean."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Container, Mapping, Sequence
from typing import Any

MOST_CHANNELS = 64
_DIGITS = 6
_NOTHING: Sequence[float | None] = (None, None, None)


class Bin:
    """Neighbouring points: their range, and for each channel the count, sum, minimum and maximum of its values."""

    __slots__ = ("_shown", "channels", "count", "first", "last", "time")

    def __init__(self, x: float, time: float) -> None:
        self.first = self.last = x
        self.time = time  # of the last point
        self.count: float = 0
        self.channels: dict[str, list[float]] = {}
        self._shown: dict[str, list[float | None]] | None = None

    def shown(self) -> dict[str, list[float | None]]:
        """Mean, minimum and maximum of each channel, with the digits that a curve can show."""
        if self._shown is None:
            sums = self.channels.items()
            self._shown = {name: [short(item[1] / item[0]), short(item[2]), short(item[3])] for name, item in sums}
        return self._shown

    def add(self, x: float, time: float, values: Mapping[str, float], weight: float = 1) -> None:
        """Add one point; values that are not finite are ignored."""
        self.last, self.time, self._shown = x, time, None
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
        """Merge a later bin into this one."""
        self.last, self.time, self._shown = later.last, later.time, None
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
    """Curves of at most `limit` bins, all but the last with equally many points.

    Args:
        limit: Most bins to keep; if there would be more, neighbours are merged in pairs.
    """

    def __init__(self, limit: int = 2_000) -> None:
        assert limit >= 2, "a curve needs points"
        self.stride = 1
        self._limit = limit // 2 * 2
        self._bins: list[Bin] = []
        self._groups: tuple[int, list[Bin]] = (1, [])  # bins per group, and the groups that are complete

    def __len__(self) -> int:
        return len(self._bins)

    @property
    def last(self) -> float | None:
        """Position of the last point."""
        return self._bins[-1].last if self._bins else None

    def add(self, x: float, time: float, values: Mapping[str, float], weight: float = 1) -> None:
        """Add one point. The axis never goes back: a point before the last one is moved to the last position.

        Args:
            x: Its position.
            time: Its time.
            values: One value per channel.
            weight: How many points it stands for, if it is one of a sample.
        """
        bins = self._bins
        if bins and x < bins[-1].last:
            x = bins[-1].last
        if not bins or bins[-1].count >= self.stride:
            if len(bins) >= self._limit:
                for left, right in zip(bins[::2], bins[1::2]):
                    left.join(right)
                self._bins = bins = bins[::2]
                self._groups = (1, [])
                self.stride *= 2
            bins.append(Bin(x, time))
        bins[-1].add(x, time, values, weight)

    def between(self, first: float | None, last: float | None) -> list[Bin]:
        """The bins that contain any point of a range."""
        low = 0 if first is None else bisect_left(self._bins, first, key=lambda item: item.last)
        high = len(self._bins) if last is None else bisect_left(self._bins, last, key=lambda item: item.first)
        if last is not None and high < len(self._bins) and self._bins[high].first <= last:
            high += 1
        return self._bins[low:high]

    def joined(self, most: int) -> list[Bin]:
        """All bins, merged into at most `most`; complete groups are kept for the next time."""
        size = _group_size(len(self._bins), most)
        if self._groups[0] != size:
            self._groups = (size, [])
        groups = self._groups[1]
        complete = (len(self._bins) - 1) // size  # the last bin still grows
        groups += joined(self._bins[len(groups) * size : complete * size], complete - len(groups))
        return groups + joined(self._bins[complete * size :], 1)


def joined(bins: Sequence[Bin], most: int) -> list[Bin]:
    """Merge bins into at most `most`, each of equally many, without changing the given ones."""
    size = _group_size(len(bins), most)
    found = []
    for start in range(0, len(bins), size):
        group = bins[start : start + size]
        bin_ = Bin(group[0].first, group[0].time)
        for item in group:
            bin_.join(item)
        found.append(bin_)
    return found


def _group_size(count: int, most: int) -> int:
    return max(1, math.ceil(count / max(most, 1)))


def table(bins: Sequence[Bin], bands: Container[str] = ()) -> dict[str, Any]:
    """Bins as columns: the end of each, its time, its number of points, and the mean of each channel.

    Args:
        bins: The bins.
        bands: Channels for which minimum and maximum are included too.
    """
    channels: dict[str, dict[str, list[float | None]]] = {}
    shown = [item.shown() for item in bins]
    for name in dict.fromkeys(name for item in shown for name in item):
        columns = [item.get(name, _NOTHING) for item in shown]
        channels[name] = {"mean": [part[0] for part in columns]}
        if name in bands:
            channels[name] |= {"min": [part[1] for part in columns], "max": [part[2] for part in columns]}
    return {
        "x": [item.last for item in bins],
        "time": [round(item.time, 3) for item in bins],
        "count": [round(item.count) for item in bins],
        "channels": channels,
    }


def short(value: float) -> float | None:
    """A number with the digits that a curve can show; None if it is not finite."""
    if not math.isfinite(value):
        return None
    return value if isinstance(value, int) and abs(value) < 10**_DIGITS else float(f"{value:.{_DIGITS}g}")
