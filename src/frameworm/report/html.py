"""A run as one HTML file that opens offline: no scripts, nothing fetched, everything inline."""

from __future__ import annotations

import functools
import importlib.resources
import math
from bisect import bisect_right
from collections.abc import Sequence

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from frameworm.records.schema import PHASES, RunRecord
from frameworm.records.series import SeriesPoint
from frameworm.report import tables
from frameworm.report.svg import Line, Part, Point, line_chart, nice_ticks, outlier_limit, stacked_bar

# Widest first; a chart uses the first unit in which its typical value is one or more.
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def render_html(record: RunRecord, series: Sequence[SeriesPoint] = (), config_text: str = "") -> str:
    """The whole page.

    Args:
        record: The run.
        series: Loss and step time over the run, as `StepAggregate.series` gives them.
        config_text: The resolved config, shown as it is.
    """
    time_chart, time_note = step_time_chart(series)
    phases = tables.phase_rows(record)
    return _template().render(
        title=tables.plain(record.name) or "run",
        subtitle=tables.title_parts(record)[1:],
        record=record,
        figures=[
            *tables.quality_figures(record),
            *tables.speed_figures(record),
            *tables.run_figures(record),
        ],
        facts=_facts(record),
        verdict=tables.verdict_text(record),
        findings=tables.finding_rows(record),
        notes=[tables.plain(note) for note in record.notes],
        loss_chart=loss_chart(record, series),
        has_validation=any(epoch.val_loss is not None for epoch in record.epochs),
        steps_per_point=series[0].steps if series else 1,
        time_chart=time_chart,
        time_note=time_note,
        phase_bar=phase_bar(record),
        phases=[
            (_phase_class(row.name), row.label, tables.seconds(row.mean_s), tables.share(row.share)) for row in phases
        ],
        epoch_header=tables.EPOCH_HEADER,
        epochs=tables.epoch_rows(record.epochs),
        environment=tables.environment_rows(record.environment),
        config_text=config_text,
    )


def loss_chart(record: RunRecord, series: Sequence[SeriesPoint]) -> Markup:
    """Training loss over the steps, with the loss of each validation at the end of its epoch."""
    training: list[Point] = [(float(point.step), point.loss) for point in series]
    validation = validation_points(record, series)
    lines = [Line(training, "curve-a"), Line(validation, "curve-b", dots=True)]
    return line_chart(lines, "Loss over the steps", "step", "loss")


def validation_points(record: RunRecord, series: Sequence[SeriesPoint]) -> list[Point]:
    """Validation losses at the last step of their epochs, to within one point of the series.

    Without a series the epochs are taken as equally long.
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


def step_time_chart(series: Sequence[SeriesPoint]) -> tuple[Markup, str]:
    """Step time over the steps, and a sentence on what lies beyond the axis, if anything does."""
    times = [point.step_s for point in series if math.isfinite(point.step_s)]
    if not times:
        return Markup(""), ""
    typical = sorted(times)[len(times) // 2]
    factor, unit = next((item for item in _TIME_UNITS if typical >= item[0]), _TIME_UNITS[-1])
    limit = outlier_limit([time / factor for time in times])
    if limit is not None:
        limit = nice_ticks(0.0, limit)[-1]
    points: list[Point] = [(float(point.step), point.step_s / factor) for point in series]
    chart = line_chart(
        [Line(points, "curve-a")],
        "Time of each step",
        "step",
        f"step time in {unit}",
        from_zero=True,
        y_limit=limit,
    )
    if limit is None:
        return chart, ""
    beyond = sum(time / factor > limit for time in times)
    return chart, f"{beyond} of {len(times)} points lie above the axis; the highest is {tables.seconds(max(times))}."


def phase_bar(record: RunRecord) -> Markup:
    """The mean step as a bar of its phases."""
    parts = [Part(row.label, row.share, _phase_class(row.name)) for row in tables.phase_rows(record)]
    return stacked_bar(parts, "Shares of the mean step")


def _phase_class(name: str) -> str:
    return f"phase-{name}" if name in PHASES else "phase-unknown"


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    facts = [("batch", tables.batch_text(record.batch)), ("memory", tables.memory_text(record))]
    communication = tables.communication_text(record)
    if communication is not None:
        facts.append(("communication", communication))
    facts.append(("checkpoints", tables.checkpoint_text(record)))
    if record.started is not None:
        facts.append(("started", tables.plain(record.started)))
    if record.run_dir is not None:
        facts.append(("run folder", tables.plain(record.run_dir)))
    return facts


@functools.cache
def _template() -> Template:
    source = importlib.resources.files("frameworm.report").joinpath("templates/report.html.j2")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source.read_text(encoding="utf-8"))
