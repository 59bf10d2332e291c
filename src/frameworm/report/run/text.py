"""A run on one screen of plain text: what `train` prints at its end, and `summary.txt`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from frameworm.records.schema import RunRecord
from frameworm.report.kit import tables
from frameworm.report.kit.layout import LABEL_WIDTH
from frameworm.report.kit.layout import field as _field
from frameworm.report.kit.tables import Figure, FindingRow, PhaseRow
from frameworm.report.run.network_text import communication_text

_NARROWEST = 40
_MOST_FINDINGS = 3
_MOST_REMEDIES = 3
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def render_text(record: RunRecord, width: int = 80) -> str:
    """The run as lines of at most `width` characters (never under 40), without terminal codes.

    Unknown values are labelled as such or omitted, never shown as zero.
    """
    width = max(width, _NARROWEST)
    title = " · ".join(tables.title_parts(record))
    lines = textwrap.wrap(title, width) or ["run"]
    lines.append("─" * min(width, max(len(line) for line in lines)))
    lines += _field("run", _figures(tables.run_figures(record)), width)
    quality = tables.quality_figures(record)
    if record.source == "engine" or any(figure.value != tables.UNKNOWN for figure in quality):
        lines += _field("quality", _figures(quality), width)
    lines += _field("speed", _figures(tables.speed_figures(record)), width)
    lines += _field("batch", tables.batch_text(record.batch), width)
    phases = tables.phase_rows(record)
    if phases:
        lines += ["", "mean step, by phase", *_phase_lines(phases, width), ""]
    lines += _roofline_lines(record, width)
    communication = communication_text(record)
    if communication is not None:
        lines += _field("network", communication, width)
    lines += _field("memory", tables.memory_text(record), width)
    lines += _field("checkpoints", tables.checkpoint_text(record), width)
    lines += judgement_lines(record, width)
    lines += _targets(record, width)
    for note in record.notes:
        lines += _field("note", tables.plain(note), width)
    if record.run_dir is not None:
        # Not wrapped, so that the path can be copied.
        lines.append(f"{'folder':<{LABEL_WIDTH}}{tables.plain(record.run_dir)}")
    if record.storage is not None and record.storage.uploaded:
        lines.append(f"{'uploaded':<{LABEL_WIDTH}}{tables.plain(record.storage.url)}")
    return "\n".join(lines) + "\n"


def _figures(figures: Iterable[Figure]) -> str:
    return "  ".join(f"{figure.label} {figure.value}".replace(" ", "\N{NO-BREAK SPACE}") for figure in figures)


def _phase_lines(rows: list[PhaseRow], width: int) -> list[str]:
    label_width = max(len(row.label) for row in rows)
    time_width = max(len(_milliseconds(row)) for row in rows)
    bar_width = max(4, width - label_width - time_width - 2 - 2 - 2 - 6 - 1)
    return [
        f"  {row.label:<{label_width}}  {_milliseconds(row):>{time_width}}  {tables.share(row.share):>6} "
        f"{bar(row.share, bar_width)}".rstrip()
        for row in rows
    ]


def _roofline_lines(record: RunRecord, width: int) -> list[str]:
    rows = [(label, part) for label, part in tables.roofline_rows(record) if part > 0]
    if not rows:
        return []
    label_width = max(len(label) for label, _ in rows)
    bar_width = max(4, width - label_width - 2 - 2 - 6 - 1)
    lines = ["", "time of the GPU, from the trace"]
    lines += [
        f"  {label:<{label_width}}  {tables.share(part):>6} {bar(part, bar_width)}".rstrip() for label, part in rows
    ]
    for index, text in enumerate(tables.ceiling_rows(record)):
        lines += _field("" if index else "gains", text, width)
    return [*lines, ""]


def _milliseconds(row: PhaseRow) -> str:
    return f"{row.mean_s * 1e3:.2f} ms"


def bar(share: float, width: int) -> str:
    """A bar of up to `width` characters, drawn to an eighth of one."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def judgement_lines(record: RunRecord, width: int) -> list[str]:
    """The verdict, the findings behind it and what to try; empty if the run has not been diagnosed."""
    verdict = tables.verdict_text(record)
    if verdict is None:
        return []
    lines = _field("verdict", verdict, width)
    rows = tables.finding_rows(record)
    told = [row for row in rows if row.severity != "info"][:_MOST_FINDINGS]
    tried: set[str] = set()
    for finding, row in zip(record.findings, rows):
        if row not in told:
            continue
        lines += _field("", f"{row.code} ({row.severity}{_cost(row)}) {row.evidence}".rstrip(), width)
        for remedy, text in zip(finding.remedies, row.remedies):
            what = f"{remedy.knob}: {remedy.value}" if remedy.knob else text
            if what not in tried and len(tried) < _MOST_REMEDIES:
                tried.add(what)
                lines += _field("", f"try: {text}", width)
        if row.expected:
            lines += _field("", f"expected speedup {row.expected}", width)
    rest = "; ".join(f"{row.code} ({row.severity}{_cost(row)})" for row in rows if row not in told)
    return lines + (_field("also", rest, width) if rest else [])


def _cost(row: FindingRow) -> str:
    verb = "takes" if row.code == "compute_bound" else "costs"
    return "" if row.share == tables.UNKNOWN else f", {verb} {row.share}"


def _targets(record: RunRecord, width: int) -> list[str]:
    rows = tables.target_rows(record)
    if not rows:
        return []
    parts = [
        f"{row.name} {row.goal} {row.grade}" + ("" if row.value == tables.UNKNOWN else f" ({row.value})")
        for row in rows
    ]
    return _field("targets", ", ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts), width)
