"""Charts of ranks side by side, and of gradient buckets alongside backward: first the data, then the drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from frameworm.records.observations import Bucket, RankSummary
from frameworm.records.schema import PHASES, RunRecord
from frameworm.report.kit import tables
from frameworm.report.kit.svg import WIDTH, drawing, nice_ticks, tick_label
from frameworm.report.run.charts import TIME_UNITS, phase_class, phase_label

MOST_RANKS = 16
MOST_BUCKETS = 16
_SLOW_SHOWN = 12
_LEFT = 92
_RIGHT = 12
_ROW, _BAR = 30, 22
_AXIS_HEIGHT = 44
_WAITING = frozenset({"communication_exposed"})


@dataclass(frozen=True, slots=True)
class RankPart:
    """One phase of one rank's mean step, starting at `start_s`."""

    name: str
    label: str
    start_s: float
    length_s: float


@dataclass(frozen=True, slots=True)
class RankBar:
    """The mean step of one rank; `wait_s` is the part of its exposed communication spent waiting for others."""

    rank: int
    host: str
    step_s: float
    work_s: float  # without exposed communication
    parts: tuple[RankPart, ...]
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class BucketBar:
    """One bucket, or several consecutive ones combined; times since the beginning of backward."""

    label: str
    buckets: int
    bytes: int
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Overlap:
    """Backward, and the buckets sent during and after it."""

    backward_s: float
    bars: tuple[BucketBar, ...]
    end_s: float


def rank_bars(record: RunRecord) -> list[RankBar]:
    """One bar per rank with known phases; if there are many, the slowest and the fastest ranks."""
    bars = [bar for rank in record.ranks if (bar := _rank_bar(rank)) is not None]
    if len(bars) > MOST_RANKS:
        ordered = sorted(bars, key=lambda bar: -bar.work_s)
        bars = ordered[:_SLOW_SHOWN] + ordered[_SLOW_SHOWN - MOST_RANKS :]
    return sorted(bars, key=lambda bar: bar.rank)


def _rank_bar(rank: RankSummary) -> RankBar | None:
    order = [*(name for name in PHASES if name in rank.phases), *(name for name in rank.phases if name not in PHASES)]
    start_s = 0.0
    parts = []
    for name in order:
        length_s = rank.phases[name]
        if not math.isfinite(length_s) or length_s <= 0:
            continue
        parts.append(RankPart(name, phase_label(name), start_s, length_s))
        start_s += length_s
    if not parts:
        return None
    exposed = sum(part.length_s for part in parts if part.name in _WAITING)
    step_s = rank.step_s if rank.step_s is not None and math.isfinite(rank.step_s) else start_s
    wait_s = None if rank.rank_wait_s is None else min(max(rank.rank_wait_s, 0.0), exposed)
    return RankBar(rank.rank, tables.plain(rank.host or ""), step_s, start_s - exposed, tuple(parts), wait_s)


def rank_chart(bars: Sequence[RankBar]) -> Markup:
    """Stacked phases per rank on one time axis; empty for fewer than two ranks."""
    if len(bars) < 2:
        return Markup("")
    end_s = max(part.start_s + part.length_s for bar in bars for part in bar.parts)
    scale = _Scale(end_s)
    shapes = []
    for row, bar in enumerate(bars):
        top = row * _ROW + 4
        shapes.append(f'<text x="{_LEFT - 6}" y="{top + 16}" text-anchor="end">rank {escape(bar.rank)}</text>')
        for part in bar.parts:
            text = f"rank {bar.rank}: {part.label} {tables.seconds(part.length_s)}"
            shapes.append(_box(scale, phase_class(part.name), part.start_s, part.length_s, top, text))
            if part.name in _WAITING and bar.wait_s:
                text = f"rank {bar.rank}: waits {tables.seconds(bar.wait_s)} for a slower rank"
                shapes.append(_box(scale, "hatched", part.start_s, bar.wait_s, top, text))
    bottom = len(bars) * _ROW + 4
    content = "".join(shapes) + scale.axis(bottom, "time in the mean step")
    return drawing(bottom + _AXIS_HEIGHT, "Phases of the mean step on each rank", content)


def overlap(record: RunRecord) -> Overlap | None:
    """Backward and buckets of rank 0, or None if either was not recorded.

    With accumulation only the last backward pass of a step sends; all passes are assumed to be equally long.
    """
    buckets = [bucket for bucket in record.communication.buckets if _is_drawable(bucket)]
    first = next((rank.phases for rank in record.ranks if rank.rank == 0), {})
    backward_s = first.get("backward")
    if backward_s is None and "backward" in record.phases:
        backward_s = record.phases["backward"].mean_s
    if not buckets or backward_s is None or not math.isfinite(backward_s) or backward_s <= 0:
        return None
    backward_s /= max(record.batch.accumulation or 1, 1)
    size = math.ceil(len(buckets) / MOST_BUCKETS)
    bars = tuple(_bucket_bar(buckets, index, size) for index in range(0, len(buckets), size))
    return Overlap(backward_s, bars, max(backward_s, *(bar.end_s for bar in bars)))


def _is_drawable(bucket: Bucket) -> bool:
    times = (bucket.ready_s, bucket.start_s, bucket.end_s)
    return all(math.isfinite(time) for time in times) and 0 <= bucket.ready_s <= bucket.start_s <= bucket.end_s


def _bucket_bar(buckets: Sequence[Bucket], first: int, size: int) -> BucketBar:
    group = buckets[first : first + size]
    last = first + len(group)
    return BucketBar(
        f"{first + 1}" if len(group) == 1 else f"{first + 1}-{last}",
        len(group),
        sum(bucket.bytes for bucket in group),
        min(bucket.ready_s for bucket in group),
        min(bucket.start_s for bucket in group),
        max(bucket.end_s for bucket in group),
    )


def overlap_chart(data: Overlap) -> Markup:
    """Backward on top, the buckets below; the parts after the end of backward are hatched."""
    scale = _Scale(data.end_s)
    shapes = [
        f'<text x="{_LEFT - 6}" y="20" text-anchor="end">backward</text>',
        _box(scale, "phase-backward", 0.0, data.backward_s, 4, f"backward computes {tables.seconds(data.backward_s)}"),
    ]
    for row, bar in enumerate(data.bars, start=1):
        top = row * _ROW + 4
        name = f"bucket {bar.label}" if bar.buckets == 1 else f"buckets {bar.label}"
        size = tables.data_size(bar.bytes)
        shapes.append(f'<text x="{_LEFT - 6}" y="{top + 16}" text-anchor="end">{size}</text>')
        if bar.start_s > bar.ready_s:
            text = f"{name}: ready at {tables.seconds(bar.ready_s)}, waits for other ranks"
            shapes.append(_box(scale, "waiting", bar.ready_s, bar.start_s - bar.ready_s, top, text))
        hidden_end_s = min(max(data.backward_s, bar.start_s), bar.end_s)
        if hidden_end_s > bar.start_s:
            text = f"{name}: on its way from {tables.seconds(bar.start_s)}, hidden behind backward"
            shapes.append(_box(scale, "hidden-part", bar.start_s, hidden_end_s - bar.start_s, top, text))
        if bar.end_s > hidden_end_s:
            text = f"{name}: exposed until {tables.seconds(bar.end_s)}"
            length_s = bar.end_s - hidden_end_s
            shapes.append(_box(scale, "phase-communication_exposed", hidden_end_s, length_s, top, text))
            shapes.append(_box(scale, "hatched", hidden_end_s, length_s, top, text))
    bottom = (len(data.bars) + 1) * _ROW + 4
    edge = scale.at(data.backward_s)
    shapes.append(f'<line class="edge" x1="{edge:.1f}" y1="0" x2="{edge:.1f}" y2="{bottom}"/>')
    content = "".join(shapes) + scale.axis(bottom, "since backward began")
    return drawing(bottom + _AXIS_HEIGHT, "Gradient buckets sent during backward", content)


class _Scale:
    """Maps times from zero to `end_s` to x positions in the drawing."""

    def __init__(self, end_s: float) -> None:
        self._end_s = end_s
        self._factor, self._unit = next((item for item in TIME_UNITS if end_s >= item[0]), TIME_UNITS[-1])

    def at(self, time_s: float) -> float:
        return _LEFT + time_s / self._end_s * (WIDTH - _LEFT - _RIGHT)

    def axis(self, top: float, label: str) -> str:
        """The time axis below the bars, with its label."""
        ticks = [tick for tick in nice_ticks(0.0, self._end_s / self._factor) if tick * self._factor <= self._end_s]
        step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
        shapes = [f'<line class="axis" x1="{_LEFT}" y1="{top}" x2="{WIDTH - _RIGHT}" y2="{top}"/>']
        for tick in ticks:
            x = self.at(tick * self._factor)
            anchor = "end" if x > WIDTH - _RIGHT - 16 else "middle"
            shapes.append(f'<line class="axis" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + 4}"/>')
            shapes.append(f'<text x="{x:.1f}" y="{top + 18}" text-anchor="{anchor}">{tick_label(tick, step)}</text>')
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        name = escape(f"{label}, in {self._unit}")
        shapes.append(f'<text x="{middle}" y="{top + 38}" text-anchor="middle">{name}</text>')
        return "".join(shapes)


def _box(scale: _Scale, css_class: str, start_s: float, length_s: float, top: float, text: str) -> str:
    left, right = scale.at(start_s), scale.at(start_s + length_s)
    return (
        f'<rect class="{css_class}" x="{left:.2f}" y="{top}" width="{max(right - left, 0.5):.2f}" height="{_BAR}">'
        f"<title>{escape(text)}</title></rect>"
    )
