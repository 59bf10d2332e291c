"""The machine over the run: curves of its samples, as data and as drawings."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from frameworm.records.observations import SystemSample
from frameworm.records.samples import SampleSeries
from frameworm.report.kit import tables
from frameworm.report.kit.svg import Line, Point, line_chart
from frameworm.report.run.charts import MOST_POINTS

CURVE_CLASSES = ("curve-a", "curve-b", "curve-c", "curve-d")
# A resumed run appends to its files: the time between its parts is not part of the run.
_SHORTEST_PAUSE_S = 60.0
_PAUSE_INTERVALS = 20.0
_TOGETHER_BINS = 300
_TIME_UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))

Value = Callable[[SystemSample], float | None]


@dataclass(frozen=True, slots=True)
class Curve:
    """One named curve."""

    label: str
    points: list[Point]
    css_class: str


@dataclass(frozen=True, slots=True)
class SystemChart:
    """Curves that share an axis."""

    title: str
    y_label: str
    curves: tuple[Curve, ...]
    x_unit: str
    y_top: float | None = None
    note: str = ""


class RunClock:
    """Seconds since the first sample, without the pauses between the parts of a resumed run.

    Args:
        times: The sample times of each rank.
    """

    def __init__(self, times: Iterable[Sequence[float]]) -> None:
        by_rank = [sorted(found) for found in times]
        longest_s = max(_SHORTEST_PAUSE_S, _PAUSE_INTERVALS * max((_interval_s(found) for found in by_rank), default=0))
        ordered = sorted(time for found in by_rank for time in found)
        self._began = ordered[0] if ordered else 0.0
        self._resumed: list[float] = []  # start of each part after a pause
        self._paused = [0.0]  # total pause before each part
        for time, later in itertools.pairwise(ordered):
            if later - time > longest_s:
                self._resumed.append(later)
                self._paused.append(self._paused[-1] + later - time)
        self.length_s = self.at(ordered[-1]) if ordered else 0.0

    @property
    def pauses(self) -> int:
        """Number of pauses that are left out."""
        return len(self._resumed)

    def part(self, time: float) -> int:
        """The part of the run that contains a moment."""
        return bisect_right(self._resumed, time)

    def at(self, time: float) -> float:
        """Convert a moment to seconds of the run."""
        return time - self._began - self._paused[self.part(time)]


def system_charts(samples: Mapping[int, Sequence[SystemSample]]) -> list[SystemChart]:
    """Charts of the samples, by rank; metrics without any sample are omitted."""
    thin = {rank: thinned_samples(found) for rank, found in sorted(samples.items()) if found}
    if not thin:
        return []
    clock = RunClock([sample.time for sample in found] for found in thin.values())
    factor, unit = next((item for item in _TIME_UNITS if clock.length_s >= 3 * item[0]), _TIME_UNITS[-1])
    first = min(thin)
    left_out = "" if not clock.pauses else f"Pauses of the run, {clock.pauses} in number, are left out."

    def chart(title: str, y_label: str, curves: list[Curve], y_top: float | None = None, note: str = "") -> SystemChart:
        drawn = tuple(Curve(item.label, [(x / factor, y) for x, y in item.points], item.css_class) for item in curves)
        return SystemChart(title, y_label, drawn, unit, y_top, " ".join(part for part in (note, left_out) if part))

    charts = [
        chart("GPU busy", "%", _by_rank(thin, clock, lambda sample: _percent(sample.gpu_busy)), 100.0),
        chart("CPU", "%", _cpu_curves(thin[first], clock), 100.0, _cpu_note(thin, first)),
    ]
    for title, value, total in (
        ("GPU memory", lambda sample: _number(sample.gpu_memory_bytes), _total_bytes(thin)),
        ("process memory", lambda sample: _number(sample.rss_bytes), None),
    ):
        size, name = _size_unit(thin, value)
        scaled = _scaled(value, 1 / size)
        note = "" if total is None else f"The device has {tables.data_size(total)}."
        charts.append(chart(title, name, _by_rank(thin, clock, scaled), None, note))
    charts.append(chart("GPU power", "W", _by_rank(thin, clock, lambda sample: _number(sample.gpu_power_w))))
    return [item for item in charts if item.curves]


def system_chart(data: SystemChart) -> Markup:
    """Draw one chart."""
    return line_chart(
        [Line(curve.points, curve.css_class) for curve in data.curves],
        f"{data.title} over the run",
        f"time in {data.x_unit}",
        f"{data.title} in {data.y_label}",
        from_zero=True,
        y_top=data.y_top,
        whole_x=False,
    )


def thinned_samples(samples: Iterable[SystemSample]) -> list[SystemSample]:
    """Reduce samples to the number of points of a curve."""
    found: list[SystemSample] = []
    series = SampleSeries(MOST_POINTS)
    for sample in samples:
        if len(found) <= MOST_POINTS:
            found.append(sample)
        series.add(sample)
    return found if len(found) <= MOST_POINTS else series.points()


def _interval_s(times: Sequence[float]) -> float:
    gaps = sorted(later - time for time, later in itertools.pairwise(times))
    return gaps[len(gaps) // 2] if gaps else 0.0


def _by_rank(samples: Mapping[int, Sequence[SystemSample]], clock: RunClock, value: Value) -> list[Curve]:
    """One curve per rank that has the metric; for many ranks the lowest, the mean and the highest."""
    known = {rank: found for rank, found in samples.items() if any(value(sample) is not None for sample in found)}
    if len(known) <= len(CURVE_CLASSES):
        return [
            Curve(f"rank {rank}", _points(found, clock, value), css_class)
            for (rank, found), css_class in zip(known.items(), CURVE_CLASSES)
        ]
    return _together(known, clock, value)


def _together(samples: Mapping[int, Sequence[SystemSample]], clock: RunClock, value: Value) -> list[Curve]:
    bins: dict[int, list[float]] = {}
    fewest = min(len(found) for found in samples.values())
    count = max(1, min(_TOGETHER_BINS, fewest // 2))
    width = clock.length_s / count or 1.0
    for found in samples.values():
        for sample in found:
            figure = value(sample)
            if figure is not None:
                bins.setdefault(min(int(clock.at(sample.time) / width), count - 1), []).append(figure)
    places = [((index + 0.5) * width, figures) for index, figures in sorted(bins.items())]
    return [
        Curve(f"mean of {len(samples)} ranks", [(x, sum(figures) / len(figures)) for x, figures in places], "curve-a"),
        Curve("highest", [(x, max(figures)) for x, figures in places], "curve-b"),
        Curve("lowest", [(x, min(figures)) for x, figures in places], "curve-c"),
    ]


def _cpu_curves(samples: Sequence[SystemSample], clock: RunClock) -> list[Curve]:
    found: tuple[tuple[str, Value], ...] = (
        (
            "all cores",
            lambda sample: _percent(sum(sample.cpu_cores) / len(sample.cpu_cores) if sample.cpu_cores else None),
        ),
        ("busiest core", lambda sample: _percent(max(sample.cpu_cores, default=None))),
        ("waiting for disks", lambda sample: _percent(sample.io_wait)),
    )
    return [
        Curve(label, _points(samples, clock, value), css_class)
        for (label, value), css_class in zip(found, CURVE_CLASSES)
        if any(value(sample) is not None for sample in samples)
    ]


def _cpu_note(samples: Mapping[int, Sequence[SystemSample]], first: int) -> str:
    return "" if len(samples) == 1 else f"As rank {first} sees its machine."


def _points(samples: Sequence[SystemSample], clock: RunClock, value: Value) -> list[Point]:
    """The curve, interrupted where the run paused."""
    points: list[Point] = []
    part = None
    for sample in samples:
        at = clock.at(sample.time)
        if part not in (None, clock.part(sample.time)):
            points.append((at, None))
        part = clock.part(sample.time)
        points.append((at, value(sample)))
    return points


def _total_bytes(samples: Mapping[int, Sequence[SystemSample]]) -> float | None:
    found = (_number(sample.gpu_memory_total_bytes) for items in samples.values() for sample in items)
    return next((total for total in found if total), None)


def _size_unit(samples: Mapping[int, Sequence[SystemSample]], value: Value) -> tuple[float, str]:
    highest = max((value(sample) or 0.0 for found in samples.values() for sample in found), default=0.0)
    return (2.0**30, "GiB") if highest >= 2**30 else (2.0**20, "MiB")


def _scaled(value: Value, factor: float) -> Value:
    def scaled(sample: SystemSample) -> float | None:
        figure = value(sample)
        return None if figure is None else figure * factor

    return scaled


def _number(value: float | None) -> float | None:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _percent(value: float | None) -> float | None:
    figure = _number(value)
    return None if figure is None else figure * 100
