"""A prediction as an SVG image: speedup over ranks, both on log scales, with the interval as a band."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import escape

from frameworm.report.kit.tables import plain
from frameworm.scaling.predict import Prediction

_WIDTH, _HEIGHT = 560, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 44, 56
# Okabe and Ito's blue and orange, which differ for any kind of colour vision; dashes differ in print.
_STYLE = (
    "text{font:14px sans-serif;fill:#222}.small{font-size:12px;fill:#555}.own{font-size:12px;fill:#0072b2}"
    ".grid{stroke:#ddd}.ideal{stroke:#555;"
    "stroke-dasharray:6 4;fill:none;stroke-width:1.5}.line{stroke:#0072b2;fill:none;stroke-width:2.5}"
    ".band{fill:#0072b2;opacity:.18}.dot{fill:#0072b2}.one{stroke:#d55e00;stroke-dasharray:2 3;stroke-width:1.5}"
)
_LEAST_SPEEDUP = 1 / 64
_MOST_TICKS = 9


def render_prediction_svg(prediction: Prediction) -> str:
    """The image as a file's content."""
    rows = prediction.rows
    xs = [math.log2(row.world_size) for row in rows]
    left, right = min(xs), max(*xs, min(xs) + 1)
    lows = [max(_LEAST_SPEEDUP, row.speedup.low) for row in rows]
    bottom = math.floor(math.log2(min(*lows, 1.0)) + 1e-9)
    top = max(math.ceil(right), bottom + 1)

    def x(value: float) -> float:
        return _LEFT + (value - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)

    def y(speedup: float) -> float:
        share = (math.log2(max(_LEAST_SPEEDUP, speedup)) - bottom) / (top - bottom)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_text(_LEFT, 22, f"predicted speedup, {prediction.scaling} scaling: {_short(prediction.source)}", "start")]
    step = math.ceil((top - bottom) / _MOST_TICKS)
    for power in range(bottom, top + 1, step):
        height = y(2.0**power)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{height:.1f}" x2="{_WIDTH - _RIGHT}" y2="{height:.1f}"/>')
        parts.append(_text(_LEFT - 8, height + 5, f"{2.0**power:g}", "end"))
    last = -math.inf
    for row, place in zip(rows, xs):
        if x(place) - last >= 34:
            parts.append(_text(x(place), _HEIGHT - _BOTTOM + 20, str(row.world_size), "middle"))
            last = x(place)
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, "ranks", "middle"))
    middle = (_HEIGHT - _BOTTOM + _TOP) / 2
    parts.append(
        f'<text transform="translate(18 {middle:.0f}) rotate(-90)" text-anchor="middle">times one device</text>'
    )
    if bottom < 0:
        parts.append(f'<line class="one" x1="{_LEFT}" y1="{y(1):.1f}" x2="{_WIDTH - _RIGHT}" y2="{y(1):.1f}"/>')
    band = [(x(place), y(row.speedup.high)) for row, place in zip(rows, xs)]
    band += [(x(place), y(row.speedup.low)) for row, place in reversed(list(zip(rows, xs)))]
    parts.append(f'<polygon class="band" points="{_points(band)}"/>')
    ideal = [(x(left), y(2.0**left)), (x(right), y(2.0**right))]
    parts.append(f'<polyline class="ideal" points="{_points(ideal)}"/>')
    curve = [(x(place), y(row.speedup.value)) for row, place in zip(rows, xs)]
    parts.append(f'<polyline class="line" points="{_points(curve)}"/>')
    parts += [f'<circle class="dot" cx="{across:.1f}" cy="{up:.1f}" r="4"/>' for across, up in curve]
    parts.append(_text(_LEFT + 10, _TOP + 14, "- - ideal", "start", "small"))
    parts.append(_text(_LEFT + 10, _TOP + 32, "predicted, with its interval", "start", "own"))
    name = escape(f"Predicted speedup of {prediction.source}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{name}"><title>{name}</title><style>{_STYLE}</style>'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{across:.1f},{up:.1f}" for across, up in points)


def _text(x: float, y: float, text: str, anchor: str, css_class: str = "") -> str:
    named = f' class="{css_class}"' if css_class else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _short(name: str) -> str:
    text = plain(name)
    return text if len(text) <= 28 else f"…{text[-27:]}"
