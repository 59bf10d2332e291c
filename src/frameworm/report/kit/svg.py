"""Small drawings as inline SVG: a line chart with axes, and a bar made of parts.

Colours come from CSS classes, so that one drawing serves light and dark pages. Every text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 480
HEIGHT = 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 12, 12, 46
_MOST_MARKS = 60

Point = tuple[float, float | None]


@dataclass(frozen=True, slots=True)
class Line:
    """One curve; a y that is None or not finite leaves a gap."""

    points: Sequence[Point]
    css_class: str
    dots: bool = False
    texts: Sequence[str] = ()  # tooltip of each dot
    spans: Sequence[tuple[float, float] | None] = ()  # interval of each point


@dataclass(frozen=True, slots=True)
class Mark:
    """A highlighted place on a chart, with `text` as tooltip."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a stacked bar; `share` is its fraction of the whole, from 0 to 1."""

    label: str
    share: float
    css_class: str


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps values to coordinates."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def nice_ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Round values for an axis; the first and last enclose `low` and `high`.

    Args:
        low: Smallest value to show.
        high: Largest value to show.
        count: Number of steps to aim for.
        whole: Whether ticks must be whole numbers.
    """
    # Values that differ only in their last digits count as one: ticks between them would round to the same number.
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(low) * 0.05 or 0.5
        low, high = low - margin, high + margin
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    if whole:
        step = max(1.0, math.ceil(step - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def tick_label(value: float, step: float) -> str:
    """A tick's value with just enough digits to differ from its neighbours."""
    if abs(value) < step * 1e-6:
        return "0"
    if abs(value) >= 1e7 or abs(value) < 1e-5:
        return f"{value:.3g}"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if round(step, decimals) != round(step, decimals + 1):
        decimals += 1
    return f"{value:,.{decimals}f}"


def outlier_limit(values: Sequence[float]) -> float | None:
    """Where to cut an axis that a few extreme values would flatten; None if none would."""
    ordered = sorted(values)
    if len(ordered) < 10:
        return None
    usual = ordered[math.ceil(0.95 * len(ordered)) - 1]
    return 1.5 * usual if usual > 0 and ordered[-1] > 3 * usual else None


def line_chart(
    lines: Sequence[Line],
    title: str,
    x_label: str,
    y_label: str,
    from_zero: bool = False,
    y_limit: float | None = None,
    y_top: float | None = None,
    whole_x: bool = True,
    marks: Sequence[Mark] = (),
    x_names: Sequence[tuple[float, str]] = (),
) -> Markup:
    """Curves over an x axis; empty if no curve has a point.

    Args:
        lines: The curves; later ones are drawn over earlier ones.
        title: Accessible name of the chart.
        x_label: Name of the x axis.
        y_label: Name and unit of the y axis.
        from_zero: Whether the y axis begins at zero.
        y_limit: Top of the y axis, preferably a round number; points above are drawn as triangles at the edge.
        y_top: A value that the y axis reaches at least.
        whole_x: Whether ticks of the x axis must be whole numbers.
        marks: Highlighted places, drawn over the curves.
        x_names: Ticks of the x axis with their names, instead of round numbers; leaves space at both ends.
    """
    known: list[Point] = [(x, y) for line in lines for x, y in line.points if _drawable(y)]
    if not known:
        return Markup("")
    known += [(mark.x, mark.y) for mark in marks]
    known += [(known[0][0], end) for line in lines for span in line.spans if span is not None for end in span]
    heights = [y if y_limit is None else min(y, y_limit) for _, y in known if y is not None]
    first, last = min(x for x, _ in known), max(x for x, _ in known)
    if 0 < first <= 0.05 * last or first == last:
        first = 0.0
    names: dict[float, str] = dict(x_names)
    if names:
        margin = 0.06 * (max(names) - min(names)) or 0.5
        first, last = min(names) - margin, max(names) + margin
    x_ticks = sorted(names) if names else nice_ticks(first, last, whole=whole_x)
    y_ticks = nice_ticks(0.0 if from_zero else min(heights), max([*heights, *([] if y_top is None else [y_top])]))
    x_axis = _Axis(first, last if first < last else x_ticks[-1], _LEFT, WIDTH - _RIGHT)
    y_axis = _Axis(y_ticks[0], y_ticks[-1], HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(x_axis, y_axis, x_ticks, y_ticks, x_label, y_label, names)]
    parts += [_curve(line, x_axis, y_axis) for line in lines]
    parts += [_mark(mark, x_axis, y_axis) for mark in marks]
    return drawing(HEIGHT, title, "".join(parts))


def stacked_bar(parts: Sequence[Part], title: str, height: int = 40) -> Markup:
    """Parts side by side; if they add up to more than one, they are scaled to fit the bar."""
    parts = [part for part in parts if math.isfinite(part.share) and part.share > 0]
    whole = max(1.0, math.fsum(part.share for part in parts))
    left = 0.0
    shapes = []
    for part in parts:
        width = part.share / whole * WIDTH
        text = f"{part.share * 100:.1f}%"
        shapes.append(
            f'<g class="{escape(part.css_class)}"><title>{escape(part.label)} {text}</title>'
            f'<rect x="{left:.2f}" y="0" width="{width:.2f}" height="{height}"/>'
        )
        if width >= 54:
            middle = f'x="{left + width / 2:.1f}" y="{height / 2 + 5:.1f}" text-anchor="middle"'
            shapes.append(f'<text class="in" {middle}>{text}</text>')
        shapes.append("</g>")
        left += width
    return drawing(height, title, "".join(shapes)) if shapes else Markup("")


def _drawable(y: float | None) -> bool:
    return y is not None and math.isfinite(y)


def drawing(height: float, title: str, content: str) -> Markup:
    """Shapes as one SVG image with an accessible name."""
    name = escape(title)
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{name}"><title>{name}</title>{content}</svg>'
    )


def _frame(
    x_axis: _Axis,
    y_axis: _Axis,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_label: str,
    y_label: str,
    x_names: Mapping[float, str],
) -> str:
    """Grid, ticks, their labels and the names of the axes."""
    pieces = []
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    y_step = y_ticks[1] - y_ticks[0]
    for value in y_ticks:
        y = y_axis.at(value)
        pieces.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>')
        pieces.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick_label(value, y_step)}</text>')
    x_step = x_ticks[1] - x_ticks[0] if len(x_ticks) > 1 else 1.0
    for value in x_ticks:
        if not x_axis.low <= value <= x_axis.high:
            continue
        x = x_axis.at(value)
        pieces.append(f'<line class="axis" x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 4}"/>')
        anchor = "end" if x > right - 16 else "middle"
        name = escape(x_names[value]) if x_names else tick_label(value, x_step)
        pieces.append(f'<text x="{min(x, right):.1f}" y="{bottom + 18}" text-anchor="{anchor}">{name}</text>')
    pieces.append(f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}"/>')
    middle_y = (bottom + _TOP) / 2
    pieces.append(f'<text x="{(_LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    pieces.append(
        f'<text transform="translate(16 {middle_y}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    return "".join(pieces)


def _curve(line: Line, x_axis: _Axis, y_axis: _Axis) -> str:
    runs: list[list[str]] = [[]]
    marks = []
    whiskers = []
    dots = []
    for index, (x, y) in enumerate(line.points):
        if y is None or not math.isfinite(y):
            runs.append([])
            continue
        across, up = x_axis.at(x), y_axis.at(min(y, y_axis.high))
        runs[-1].append(f"{across:.1f},{up:.1f}")
        if y > y_axis.high:
            marks.append(f"M{across - 4:.1f},{up + 1:.1f}h8l-4,-7z")
        if line.dots:
            text = f"<title>{escape(line.texts[index])}</title>" if line.texts else ""
            dots.append(f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3.5">{text}</circle>')
        span = line.spans[index] if line.spans else None
        if span is not None:
            low, high = (y_axis.at(min(max(end, y_axis.low), y_axis.high)) for end in span)
            whiskers.append(f"M{across - 4:.1f},{low:.1f}h8m-4,0V{high:.1f}m-4,0h8")
    shapes = []
    for run in runs:
        if len(run) > 1:
            shapes.append(f'<polyline points="{" ".join(run)}"/>')
        elif run and not line.dots:
            x_text, y_text = run[0].split(",")
            shapes.append(f'<circle cx="{x_text}" cy="{y_text}" r="2"/>')
    if whiskers:
        shapes.append(f'<path class="whisker" d="{"".join(whiskers)}"/>')
    spacing = max(1, math.ceil(len(marks) / _MOST_MARKS))
    if marks:
        shapes.append(f'<path class="beyond" d="{"".join(marks[::spacing])}"/>')
    return f'<g class="{escape(line.css_class)}">{"".join(shapes)}{"".join(dots)}</g>'


def _mark(mark: Mark, x_axis: _Axis, y_axis: _Axis) -> str:
    x, y = x_axis.at(mark.x), y_axis.at(min(mark.y, y_axis.high))
    return f'<path class="mark" d="M{x:.1f},{y - 5:.1f}l5,5l-5,5l-5,-5z"><title>{escape(mark.text)}</title></path>'
