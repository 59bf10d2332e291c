"""A prediction as plain text: a table, bars, and recommendations."""

from __future__ import annotations

from collections.abc import Sequence

from frameworm.records.estimate import Interval
from frameworm.report.kit.layout import field, heading, table
from frameworm.report.kit.tables import plain
from frameworm.scaling.points import MODES
from frameworm.scaling.predict import BreakEven, Change, Prediction, Row

_BAR = 40
_KINDS = {
    "same": "does not change numerics",
    "rounds": "gradients are rounded",
    "batch": "another global batch",
    "approximate": "needs more steps to learn the same",
    "money": "costs money",
}


def render_prediction(prediction: Prediction, width: int = 100) -> str:
    """The whole prediction, for a terminal."""
    sent = "" if prediction.compression == "off" else f" · {prediction.compression}"
    title = f"prediction · {plain(prediction.source)} · {MODES[prediction.scaling]} · {prediction.strategy}{sent}"
    lines = [*heading(title, width), *field("network", plain(prediction.network), width), ""]
    lines += table(_rows(prediction.rows), width)
    lines += ["", *_bars(prediction.rows), ""]
    reached = [f"{name} up to {count} ranks" for name, count in prediction.reach.items() if count is not None]
    lines += field("reach", ", ".join(reached) or "efficiency is under 50% with two ranks already", width)
    for index, text in enumerate(_break_even(prediction.break_even)):
        lines += field("break-even" if index == 0 else "", text, width)
    lines += _advice(prediction, width)
    for index, text in enumerate(prediction.unknown):
        lines += field("not known" if index == 0 else "", text, width)
    return "\n".join(lines) + "\n"


def _rows(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    with_hours = any(row.gpu_hours is not None for row in rows)
    with_cost = any(row.cost is not None for row in rows)
    with_batch = any(row.global_batch is not None for row in rows)
    titles = ["ranks", *(["batch"] if with_batch else []), "step", "speedup", "efficiency", "exposed", "waiting"]
    titles += ["GPU-hours"] if with_hours else []
    titles += ["cost"] if with_cost else []
    found = [(*titles, "")]
    for row in rows:
        cells = [
            str(row.world_size),
            *([str(row.global_batch or "")] if with_batch else []),
            f"{_ms(row.step_s.value)} ({_number(row.step_s.low * 1e3)}..{_number(row.step_s.high * 1e3)})",
            _times(row.speedup),
            f"{row.efficiency.value:.0%} ({row.efficiency.low:.0%}..{row.efficiency.high:.0%})",
            _ms(row.exposed_s),
            _ms(row.straggler_s),
        ]
        cells += [_number(row.gpu_hours or 0.0)] if with_hours else []
        cells += [f"{row.cost or 0.0:,.2f}"] if with_cost else []
        found.append((*cells, row.status.replace("_", " ")))
    return found


def _break_even(items: Sequence[BreakEven]) -> list[str]:
    """One line for all numbers of ranks with the same text."""
    by_text: dict[str, list[str]] = {}
    for item in items:
        by_text.setdefault(item.text, []).append(str(item.world_size))
    return [f"{', '.join(sizes)} ranks: {text}" for text, sizes in by_text.items()]


def _bars(rows: Sequence[Row]) -> list[str]:
    """Speedup as a fraction of the ideal one."""
    lines = ["  speedup against the ideal (full bar)"]
    size = max(len(str(row.world_size)) for row in rows)
    for row in rows:
        filled = round(_BAR * min(1.0, max(0.0, row.efficiency.value)))
        bar = "█" * filled + "░" * (_BAR - filled)
        lines.append(f"  {row.world_size:>{size}} {bar} {row.speedup.value:.3g} of {row.world_size}")
    return lines


def _advice(prediction: Prediction, width: int) -> list[str]:
    most = prediction.rows[-1].world_size
    best = prediction.cheapest
    if best is None:
        if most == 1:
            return []
        return field("change", f"nothing tried here is predicted to gain 5% at {most} ranks", width)
    lines = field("cheapest", f"at {most} ranks: {_change(best)}", width)
    others = [change for change in prediction.changes if change is not best and change.gain >= 1.05]
    for index, change in enumerate(others):
        lines += field("others" if index == 0 else "", _change(change), width)
    return lines


def _change(change: Change) -> str:
    knob = "" if change.knob == "network" else f" ({change.knob}: {_value(change.value)})"
    return f"{change.text}{knob}: {change.gain:.2f} times as fast; {_KINDS[change.kind]}"


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _ms(seconds: float) -> str:
    return f"{_number(seconds * 1e3)} ms"


def _times(value: Interval[float]) -> str:
    return f"{value.value:.2f}x ({value.low:.2f}..{value.high:.2f})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"
