"""A scaling analysis on the terminal: speed, what it is lost to, and why."""

from __future__ import annotations

from collections.abc import Sequence

from frameworm.records.estimate import OpenInterval
from frameworm.report.kit.layout import field, heading, table
from frameworm.report.kit.tables import number, seconds
from frameworm.scaling.analysis import Analysis, Curve, Row
from frameworm.scaling.points import MODES

WIDTH = 110
HEADER = ("world size", "runs", "batch", "epoch", "samples/s", "speedup", "efficiency", "status")
LOSS_HEADER = ("lost to", "communication", "stragglers", "input", "smaller batch", "other", "together")


def render_analysis(analysis: Analysis, width: int = WIDTH) -> str:
    """All curves, each with its table, its losses and the causes of slow rows."""
    lines: list[str] = []
    for curve in analysis.curves:
        lines += [*([""] if lines else []), *_curve(curve, width)]
    return "\n".join(lines) + "\n" if lines else ""


def _curve(curve: Curve, width: int) -> list[str]:
    lines = heading(f"{curve.label}, {MODES[curve.mode]}", width)
    lines += table([HEADER, *(_cells(row) for row in curve.rows)], width)
    losses = [_loss_cells(row) for row in curve.rows if row.losses is not None]
    if losses:
        lines += ["", *table([LOSS_HEADER, *losses], width)]
    lines.append("")
    if curve.serial_fraction is not None:
        lines += field("serial part", f"{_share(curve.serial_fraction)} by Amdahl's law", width)
    for row in curve.rows:
        if row.finding is not None:
            lines += field("slower", row.cause or "", width)
            lines += [line for remedy in row.finding.remedies for line in field("  try", remedy.text, width)]
        elif row.limit is not None:
            lines += field(f"limit at {row.world_size}", f"{row.limit}: {row.cause}" if row.cause else row.limit, width)
    for note in curve.notes:
        lines += field("note", note, width)
    return lines


def _cells(row: Row) -> tuple[str, ...]:
    point = row.point
    return (
        str(row.world_size),
        str(len(point.measurements)),
        "" if point.global_batch is None else str(point.global_batch),
        seconds(point.mean("epoch_s")),
        number(point.mean("samples_per_s")),
        _times(row.speedup),
        _share(row.efficiency),
        "base" if row.grade is None else "negative_scaling" if row.finding is not None else row.grade,
    )


def _loss_cells(row: Row) -> Sequence[str]:
    assert row.losses is not None
    parts = ["?" if part is None else f"{part:.1%}" for part in row.losses.parts.values()]
    return (f"at {row.world_size}", *parts, f"{row.losses.total:.1%}")


def _times(interval: OpenInterval) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.value:.2f}"
    return f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def _share(interval: OpenInterval) -> str:
    if interval.low is None or interval.high is None:
        return f"{interval.value:.1%}"
    return f"{interval.value:.1%} ({interval.low:.1%} to {interval.high:.1%})"
