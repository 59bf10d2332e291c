"""Charts of a scaling report's page: curves over world sizes and epochs, and bars of efficiency losses.

Every dot has a tooltip with its values. Each curve has the CSS classes of its configuration and world size, by which
the page hides and shows it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

from frameworm.records.estimate import OpenInterval
from frameworm.report.kit.svg import Line, Part, line_chart, stacked_bar
from frameworm.report.kit.tables import number, seconds
from frameworm.report.scaling.table import LOSSES, DatasetTable, EpochCurve, Row
from frameworm.report.scaling.text import interval, size_text

CURVES = "abcdefg"
_MOST_NAMES = 10

LOSS_LABELS = {
    "communication": "exposed communication",
    "stragglers": "waiting for the slowest rank",
    "input": "waiting for input",
    "smaller_batch": "smaller batch per device",
    "other": "other",
}
LOSS_CLASSES = {
    "used": "phase-forward",
    "communication": "phase-communication_exposed",
    "stragglers": "phase-validation",
    "input": "phase-data_wait",
    "smaller_batch": "phase-optimizer",
    "other": "phase-other",
}


def curve_class(index: int) -> str:
    """The CSS class for the colour of a curve; colours repeat after the last one."""
    return f"curve-{CURVES[index % len(CURVES)]}"


def speedup_chart(table: DatasetTable) -> Markup:
    """Speedup over world sizes, with the ideal one."""
    compared = [item for item in table.configurations if len(item.rows) > 1]
    if not compared:
        return Markup("")
    base = min(item.base.world_size for item in compared)
    sizes = [size for size in table.world_sizes if size >= base]
    ideal = Line([(_place(size), size / base) for size in sizes], "ideal")
    lines = _over_sizes(table, lambda row: row.speedup, "{:.2f}")
    return line_chart(
        [ideal, *lines],
        f"Speedup on {table.name}",
        f"world size ({table.units})",
        "speedup",
        from_zero=True,
        x_names=_names(table),
    )


def efficiency_chart(table: DatasetTable) -> Markup:
    """Efficiency over world sizes."""
    if all(len(item.rows) == 1 for item in table.configurations):
        return Markup("")
    levels = [
        Line([(_place(size), level) for size in (table.world_sizes[0], table.world_sizes[-1])], "ideal")
        for level in (0.85, 0.7, 0.5)
    ]
    return line_chart(
        [*levels, *_over_sizes(table, lambda row: row.efficiency, "{:.3f}")],
        f"Efficiency on {table.name}",
        f"world size ({table.units})",
        "efficiency",
        from_zero=True,
        y_top=1.0,
        x_names=_names(table),
    )


def throughput_chart(table: DatasetTable) -> Markup:
    """Samples per second over world sizes."""
    fastest = max((row.samples_per_s.value for row in table.rows if row.samples_per_s is not None), default=0.0)
    factor, unit = (1e3, "thousand samples/s") if fastest >= 1e4 else (1.0, "samples/s")
    return line_chart(
        [_divided(line, factor) for line in _over_sizes(table, lambda row: row.samples_per_s, "{:,.1f}")],
        f"Throughput on {table.name}",
        f"world size ({table.units})",
        unit,
        from_zero=True,
        x_names=_names(table),
    )


def _divided(line: Line, factor: float) -> Line:
    """Scale the curve to a larger unit, so that the labels fit next to its axis."""
    return dataclasses.replace(
        line,
        points=[(x, None if y is None else y / factor) for x, y in line.points],
        spans=[None if span is None else (span[0] / factor, span[1] / factor) for span in line.spans],
    )


def epoch_chart(table: DatasetTable) -> Markup:
    """Time of each epoch, including warm-up."""
    return line_chart(
        _over_epochs(table, lambda curve: curve.epoch_time_s, seconds),
        f"Time of each epoch on {table.name}",
        "epoch",
        "time in s",
        from_zero=True,
    )


def quality_chart(table: DatasetTable) -> tuple[str, Markup]:
    """Accuracy after each epoch, or else the loss; with the metric's name."""
    choices: tuple[tuple[str, Callable[[EpochCurve], Sequence[float | None]]], ...] = (
        ("validation accuracy", lambda curve: curve.val_accuracy),
        ("validation loss", lambda curve: curve.val_loss),
        ("training loss", lambda curve: curve.train_loss),
    )
    for name, pick in choices:
        chart = line_chart(_over_epochs(table, pick, number), f"{name.capitalize()} on {table.name}", "epoch", name)
        if chart:
            return name, chart
    return "", Markup("")


def loss_bars(table: DatasetTable) -> list[tuple[int, str, Markup]]:
    """For each row beyond a base: its configuration, a label, and a bar of the efficiency used and lost."""
    bars = []
    for index, item in enumerate(table.configurations):
        for row in item.rows[1:]:
            if row.efficiency is None or not row.losses:
                continue
            parts = [Part("used", max(row.efficiency.value, 0.0), LOSS_CLASSES["used"])]
            for name in LOSSES:
                share = row.losses.get(name)
                if share is not None and share > 0:
                    parts.append(Part(LOSS_LABELS[name], share, LOSS_CLASSES[name]))
            label = f"{size_text(table, row)}, {item.label}" if len(table.configurations) > 1 else size_text(table, row)
            bars.append((index, label, stacked_bar(parts, f"Efficiency of {label}", height=28)))
    return bars


def _place(world_size: int) -> float:
    """World sizes mostly double, so a logarithmic axis spaces them evenly."""
    return math.log2(world_size)


def _names(table: DatasetTable) -> list[tuple[float, str]]:
    sizes = table.world_sizes
    spacing = math.ceil(len(sizes) / _MOST_NAMES)
    kept = {*sizes[::spacing], sizes[-1]}
    return [(_place(size), str(size) if size in kept else "") for size in sizes]


def _over_sizes(table: DatasetTable, pick: Callable[[Row], OpenInterval | None], form: str) -> list[Line]:
    lines = []
    for index, item in enumerate(table.configurations):
        found = [(row, measure) for row in item.rows if (measure := pick(row)) is not None]
        lines.append(
            Line(
                [(_place(row.world_size), measure.value) for row, measure in found],
                f"{curve_class(index)} series-{index}",
                dots=True,
                texts=[
                    f"{size_text(table, row)}, {item.label}: {form.format(measure.value)}{interval(measure, form)}, "
                    f"{row.status}"
                    for row, measure in found
                ],
                spans=[_span(measure) for _, measure in found],
            )
        )
    return lines


def _span(measure: OpenInterval) -> tuple[float, float] | None:
    if measure.low is None or measure.high is None:
        return None
    # The interval of two runs can be very wide; the axis should show the means.
    most = 2 * measure.value
    return max(measure.low, 0.0), min(measure.high, most)


def _over_epochs(
    table: DatasetTable, pick: Callable[[EpochCurve], Sequence[float | None]], form: Callable[[float | None], str]
) -> list[Line]:
    lines = []
    for index, curve in enumerate(table.curves):
        values = pick(curve)
        lines.append(
            Line(
                [(float(epoch), value) for epoch, value in zip(curve.epochs, values)],
                f"{curve_class(index)} series-{curve.configuration} size-{curve.world_size}",
                dots=True,
                texts=[
                    f"epoch {epoch}, {table.curve_label(curve)}: {form(value)}"
                    + (" (warm-up)" if epoch <= table.warmup else "")
                    for epoch, value in zip(curve.epochs, values)
                ],
            )
        )
    return lines
