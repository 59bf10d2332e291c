"""Curves over the steps of a run: first the data, then the drawing."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from frameworm.records.schema import PHASES, RunRecord, StepRecord
from frameworm.records.series import SeriesPoint
from frameworm.report.kit import tables
from frameworm.report.kit.svg import Line, Mark, Part, Point, line_chart, nice_ticks, outlier_limit, stacked_bar

MOST_POINTS = 600
# Largest first; a chart uses the first unit in which its typical value is one or more.
TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_NAMED_CAUSES = 2
# A phase with less than this fraction of a step's excess time is not named as its cause.
_CAUSE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Outlier:
    """One step that took far longer than the others, and the phases that took longer."""

    step: int
    epoch: int
    step_s: float
    times_typical: float | None  # step time as a multiple of the typical one
    causes: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Step times in one unit, with highlighted steps."""

    points: list[Point]
    marks: list[Mark]
    unit: str
    limit: float | None  # where the axis is cut off
    note: str


def thinned(series: Sequence[SeriesPoint], limit: int = MOST_POINTS) -> list[SeriesPoint]:
    """At most `limit` points, each the mean of equally many steps; a short series is returned unchanged."""
    size = math.ceil(len(series) / limit)
    if size <= 1:
        return list(series)
    return [_joined(series[first : first + size]) for first in range(0, len(series), size)]


def _joined(points: Sequence[SeriesPoint]) -> SeriesPoint:
    steps = sum(point.steps for point in points)
    losses = [(point.loss, point.steps) for point in points if point.loss is not None and math.isfinite(point.loss)]
    weight = sum(count for _, count in losses)
    return SeriesPoint(
        points[-1].step,
        points[-1].epoch,
        sum(loss * count for loss, count in losses) / weight if weight else None,
        sum(point.step_s * point.steps for point in points) / steps,
        steps,
    )


def outliers(record: RunRecord) -> list[Outlier]:
    """The slow steps of the run, in the order in which they happened."""
    spread = record.throughput.step_s
    typical = spread.p50 if spread is not None and spread.p50 > 0 else None
    usual = {name: phase.mean_s for name, phase in record.phases.items()}
    return [
        Outlier(
            step.step,
            step.epoch,
            step.step_s,
            None if typical is None else step.step_s / typical,
            _causes(step, usual, typical),
        )
        for step in sorted(record.slow_steps, key=lambda step: step.step)
        if math.isfinite(step.step_s)
    ]


def _causes(step: StepRecord, usual: dict[str, float], typical: float | None) -> str:
    """The phases that took longer than usual, largest increase first, with their times."""
    if not step.phases:
        return "not divided into phases"
    grown = sorted(((seconds - usual.get(name, 0.0), name) for name, seconds in step.phases.items()), reverse=True)
    excess = step.step_s - (typical if typical is not None else sum(usual.values()))
    named = [name for more, name in grown if more > max(0.0, _CAUSE_SHARE * excess)][:_NAMED_CAUSES]
    parts = (f"{phase_label(name)} {tables.seconds(step.phases[name])}" for name in named or [grown[0][1]])
    return ", ".join(parts)


def step_timeline(record: RunRecord, series: Sequence[SeriesPoint]) -> Timeline | None:
    """Step time over the run with slow steps marked; None if no step was recorded."""
    times = [point.step_s for point in series if math.isfinite(point.step_s)]
    if not times:
        return None
    typical = sorted(times)[len(times) // 2]
    factor, unit = next((item for item in TIME_UNITS if typical >= item[0]), TIME_UNITS[-1])
    marked = [item for item in outliers(record) if series[0].step - series[0].steps < item.step <= series[-1].step]
    highest = max([*times, *(item.step_s for item in marked)])
    limit = outlier_limit([time / factor for time in [*times, *(item.step_s for item in marked)]])
    note = ""
    if limit is not None:
        limit = nice_ticks(0.0, limit)[-1]
        beyond = sum(time / factor > limit for time in times)
        if beyond:
            note = f"{beyond} of {len(times)} points lie above the axis. "
        note += f"The highest step shown took {tables.seconds(highest)}."
    return Timeline(
        [(float(point.step), point.step_s / factor) for point in series],
        [Mark(item.step, item.step_s / factor, _mark_text(item)) for item in marked],
        unit,
        limit,
        note,
    )


def _mark_text(item: Outlier) -> str:
    return f"step {item.step}: {tables.seconds(item.step_s)} ({item.causes})"


def timeline_chart(timeline: Timeline) -> Markup:
    """Draw the timeline."""
    return line_chart(
        [Line(timeline.points, "curve-a")],
        "Time of each step",
        "step",
        f"step time in {timeline.unit}",
        from_zero=True,
        y_limit=timeline.limit,
        marks=timeline.marks,
    )


def loss_chart(record: RunRecord, series: Sequence[SeriesPoint]) -> Markup:
    """Training loss over the steps, with the validation loss at the end of each epoch."""
    training: list[Point] = [(float(point.step), point.loss) for point in series]
    validation = validation_points(record, series)
    lines = [Line(training, "curve-a"), Line(validation, "curve-b", dots=True)]
    return line_chart(lines, "Loss over the steps", "step", "loss")


def validation_points(record: RunRecord, series: Sequence[SeriesPoint]) -> list[Point]:
    """Validation losses at the last step of their epochs, to within one point of the series.

    Without a series, epochs are assumed to be equally long.
    """
    epochs = [point.epoch for point in series]
    points: list[Point] = []
    for position, epoch in enumerate(record.epochs, start=1):
        if epoch.val_loss is None:
            continue
        before = bisect_right(epochs, epoch.epoch)
        if before:
            points.append((float(series[before - 1].step), epoch.val_loss))
        elif not series:
            points.append((record.steps * position / len(record.epochs), epoch.val_loss))
    return points


def phase_bar(record: RunRecord) -> Markup:
    """The mean step as a bar of its phases."""
    parts = [Part(row.label, row.share, phase_class(row.name)) for row in tables.phase_rows(record)]
    return stacked_bar(parts, "Shares of the mean step")


def phase_class(name: str) -> str:
    """The CSS class that colours a phase."""
    return f"phase-{name}" if name in PHASES else "phase-unknown"


def phase_label(name: str) -> str:
    """A phase's readable name."""
    return tables.PHASE_LABELS.get(name, tables.plain(name))
