"""Charts of a search: the waterfall from before to after, overlaid loss curves, phases of both configs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from frameworm.report.kit.svg import WIDTH, Line, Part, Point, drawing, line_chart, stacked_bar
from frameworm.report.run import charts
from frameworm.report.tune import tables as tune_tables
from frameworm.report.tune.tables import PhaseBeforeAfter, Stage

_ROW, _BAR, _TEXT = 50, 18, 19
# At the largest text size in use, on a phone, this many characters fit next to a gain and its interval.
_LONGEST_LABEL = 24
# The band of what rounding explains is not drawn if it would flatten the curves.
_WIDEST_BAND = 1.0


def waterfall_chart(stages: Sequence[Stage]) -> Markup:
    """One bar per stage: the remaining time per sample, and next to it what the change saved."""
    if len(stages) < 2:
        return Markup("")
    longest = max(max(stage.before, stage.after) for stage in stages)
    shapes = [_stage(stage, index * _ROW, WIDTH / longest) for index, stage in enumerate(stages)]
    return drawing(len(stages) * _ROW, "Time per sample from before to after", "".join(shapes))


def _stage(stage: Stage, top: float, scale: float) -> str:
    label = stage.label if len(stage.label) <= _LONGEST_LABEL else stage.label[: _LONGEST_LABEL - 1] + "…"
    gain = "" if stage.gain is None else tune_tables.times_and_ends(stage.gain)
    y, middle = top + _TEXT + 6, top + _TEXT + 6 + _BAR / 2
    left = stage.after * scale
    shapes = [
        f"<title>{escape(stage.label)} {escape(gain)}</title>",
        f'<text x="0" y="{top + _TEXT}">{escape(label)}</text>',
        f'<text x="{WIDTH}" y="{top + _TEXT}" text-anchor="end">{escape(gain)}</text>',
        f'<rect class="left-{stage.kind}" x="0" y="{y}" width="{left:.2f}" height="{_BAR}"/>',
    ]
    gone = (stage.before - stage.after) * scale
    if stage.kind == "change" and gone > 0:
        shapes.append(f'<rect class="gone" x="{left:.2f}" y="{y}" width="{gone:.2f}" height="{_BAR}"/>')
    if stage.gain is not None and stage.gain.low is not None and stage.gain.high is not None:
        ends = [min(stage.before / bound * scale, WIDTH) for bound in (stage.gain.high, stage.gain.low)]
        shapes.append(
            f'<path class="whisker" d="M{ends[0]:.2f},{middle - 4}v8M{ends[0]:.2f},{middle}H{ends[1]:.2f}'
            f'M{ends[1]:.2f},{middle - 4}v8"/>'
        )
    return f"<g>{''.join(shapes)}</g>"


def losses_chart(proof: Mapping[str, Any], title: str) -> Markup:
    """Loss before and after overlaid, with the band that rounding explains; empty without curves."""
    before = _points(proof.get("losses_before"))
    after = _points(proof.get("losses_after"))
    known = [y for _, y in (*before, *after) if y is not None]
    if not known:
        return Markup("")
    reach = _WIDEST_BAND * (max(known) - min(known))
    upper, lower = [], []
    for (step, loss), (_, allowed) in zip(before, _points(proof.get("allowed_drift"))):
        drawn = loss is not None and allowed is not None and 0 <= allowed <= reach
        upper.append((step, loss + allowed if drawn and loss is not None and allowed is not None else None))
        lower.append((step, loss - allowed if drawn and loss is not None and allowed is not None else None))
    lines = [Line(upper, "curve-c"), Line(lower, "curve-c"), Line(before, "curve-a"), Line(after, "curve-b")]
    return line_chart(lines, title, "step", "loss")


def _points(values: Any) -> list[Point]:
    return [(float(step), tune_tables.figure(value)) for step, value in enumerate(tune_tables.sequence(values))]


def phase_bars(rows: Sequence[PhaseBeforeAfter]) -> tuple[Markup, Markup]:
    """The mean step under both configs as bars on one scale."""
    totals = [math.fsum(value or 0.0 for value in side) for side in zip(*((row.before_s, row.after_s) for row in rows))]
    whole = max(totals, default=0.0)
    if whole <= 0:
        return Markup(""), Markup("")
    before = [Part(row.label, (row.before_s or 0.0) / whole, charts.phase_class(row.name)) for row in rows]
    after = [Part(row.label, (row.after_s or 0.0) / whole, charts.phase_class(row.name)) for row in rows]
    return stacked_bar(before, "Phases of the mean step before"), stacked_bar(after, "Phases of the mean step after")
