"""The measurements of a monitor or a profiler, as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from frameworm.records.schema import RunRecord, StepRecord
from frameworm.report.kit import tables
from frameworm.report.run.text import bar

_BAR_WIDTH = 12
_SHOWN_OUTLIERS = 5
_SHOWN_FINDINGS = 3


def render_metrics(
    statistics: Mapping[str, Mapping[str, float]],
    counts: Mapping[str, int],
    outliers: Sequence[StepRecord],
    record: RunRecord,
    notes: Sequence[str] = (),
    total: str = "total_time",
) -> str:
    """Each metric with its fraction of the step, the outlier steps, and recommendations.

    Args:
        statistics: Spread of each metric.
        counts: Number of values of each metric.
        outliers: Steps that took far longer than others.
        record: The record with verdict and findings.
        notes: Further remarks.
        total: The metric that the others are part of; if it is missing, their sum is used.
    """
    if not statistics:
        return "nothing was measured yet\n"
    sums = {name: figures["mean"] * counts.get(name, 1) for name, figures in statistics.items()}
    whole = sums.get(total) or sum(sums.values())
    order = sorted((name for name in statistics if name != total), key=lambda name: -sums[name])
    rows: list[tuple[str, ...]] = [("metric", "count", "mean", "std", "p50", "p95", "p99", "max", "share", "")]
    for name in [*order, total] if total in statistics else order:
        figures = statistics[name]
        share = sums[name] / whole if whole > 0 else 0.0
        times = (tables.seconds(figures[key]) for key in ("mean", "std", "p50", "p95", "p99", "max"))
        drawn = "" if name == total else bar(share, _BAR_WIDTH)
        rows.append((tables.plain(name), str(counts.get(name, 1)), *times, tables.share(share), drawn))
    lines = _aligned(rows)
    if outliers:
        lines += ["", "steps that stand out"]
        lines += [_outlier_line(step) for step in outliers[:_SHOWN_OUTLIERS]]
    lines += ["", *_verdict_lines(record)]
    lines += [f"note: {tables.plain(note)}" for note in dict.fromkeys([*record.notes, *notes])]
    return "\n".join(lines).rstrip() + "\n"


def render_scopes(summary: Mapping[str, Any]) -> str:
    """The tree of a profiler's scopes, longest first, and the memory samples."""
    rows: list[tuple[str, ...]] = [("scope", "count", "total", "self", "mean", "max", "share", "device")]
    whole = sum(scope["total_s"] for scope in summary["scopes"])
    for depth, scope in _walk(summary["scopes"]):
        rows.append(
            (
                "  " * depth + tables.plain(scope["name"]),
                str(scope["count"]) + (f" ({scope['failed']} failed)" if scope["failed"] else ""),
                *(tables.seconds(scope[key]) for key in ("total_s", "self_s", "mean_s", "max_s")),
                tables.share(scope["total_s"] / whole if whole > 0 else 0.0),
                "" if scope["device_s"] is None else tables.seconds(scope["device_s"]),
            )
        )
    lines = _aligned(rows) if len(rows) > 1 else ["no scope was closed yet"]
    memory = summary["memory"]
    if memory["peak_bytes"] is not None:
        lines.append(f"GPU memory: peak {tables.data_size(memory['peak_bytes'])}, {memory['looks']} samples")
    lines += [f"trace: {path}" for path in summary["traces"]]
    lines += [f"note: {tables.plain(note)}" for note in summary["notes"]]
    return "\n".join(lines) + "\n"


def _walk(scopes: Sequence[Mapping[str, Any]], depth: int = 0) -> list[tuple[int, Mapping[str, Any]]]:
    found = []
    for scope in sorted(scopes, key=lambda item: -item["total_s"]):
        found += [(depth, scope), *_walk(scope["children"], depth + 1)]
    return found


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns: names and bars to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        if not rows[0][-1]:
            cells[-1] = row[-1].ljust(widths[-1])
        lines.append("  ".join(cells).rstrip())
    return lines


def _outlier_line(step: StepRecord) -> str:
    parts = sorted({**step.phases, **step.metrics}.items(), key=lambda item: -item[1])[:2]
    inside = ", ".join(f"{tables.plain(name)} {tables.seconds(seconds)}" for name, seconds in parts)
    return f"  step {step.step}: {tables.seconds(step.step_s)}" + (f" ({inside})" if inside else "")


def _verdict_lines(record: RunRecord) -> list[str]:
    lines = [f"verdict: {tables.plain(record.verdict).replace('_', ' ')}"]
    for row in tables.finding_rows(record)[:_SHOWN_FINDINGS]:
        cost = "" if row.share == tables.UNKNOWN else f", costs {row.share}"
        lines.append(f"  {row.code} ({row.severity}{cost}): {row.evidence}")
        lines += [f"    try: {remedy}" for remedy in row.remedies]
        if row.expected:
            lines.append(f"    expected speedup {row.expected}")
    return lines
