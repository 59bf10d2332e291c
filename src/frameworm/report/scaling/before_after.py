"""Two sweeps side by side on the terminal: epoch time, throughput, speedup and efficiency, before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from frameworm.guard.comparison import Difference
from frameworm.records.estimate import OpenInterval
from frameworm.report.checks.guard import difference_lines
from frameworm.report.kit.layout import field, heading, table
from frameworm.report.kit.tables import number, plain, seconds, share
from frameworm.scaling.before_after import Change, Pair, Side
from frameworm.scaling.points import MODES

WIDTH = 100
HEADER = ("world size", "", "A", "B", "change")


def render_sweeps(
    before: str,
    after: str,
    changes: Sequence[Change],
    settings: Sequence[Sequence[Difference]] = (),
    notes: Sequence[str] = (),
    width: int = WIDTH,
) -> str:
    """Compare all data sets of two sweeps.

    Args:
        before: Name of A.
        after: Name of B.
        changes: The result of `compare_sweeps`.
        settings: For each change the settings that differ.
        notes: Further remarks.
        width: Most characters per line.
    """
    lines = heading(f"compare · A {plain(before)} · B {plain(after)}", width)
    for index, change in enumerate(changes):
        lines += [*([""] if index else []), *_change(change, width)]
        lines += difference_lines("settings", settings[index], width) if settings else []
    for note in notes:
        lines += field("note", plain(note), width)
    return "\n".join(lines) + "\n"


def sentence(change: Change) -> str | None:
    """The change at the largest world size that both have, in one sentence."""
    pair = next((pair for pair in reversed(change.pairs) if pair.before and pair.after and pair.world_size > 1), None)
    if pair is None or pair.before is None or pair.after is None:
        return None
    before, after = pair.before, pair.after
    words = (
        f"on {pair.world_size} devices the speedup goes from {before.speedup.value:.2f} to {after.speedup.value:.2f} "
        f"and the efficiency from {before.efficiency.value:.1%} to {after.efficiency.value:.1%}"
    )
    if pair.epoch_gain is not None:
        words += f"; an epoch takes {seconds(after.epoch_s)} instead of {seconds(before.epoch_s)}"
    return words


def _change(change: Change, width: int) -> list[str]:
    mode = MODES[change.mode_before]
    if change.mode_before != change.mode_after:
        mode = f"A {mode}, B {MODES[change.mode_after]}"
    lines = [f"{plain(change.label)}, {mode}"]
    rows: list[tuple[str, ...]] = [HEADER]
    for pair in change.pairs:
        rows += _rows(pair)
    lines += table(rows, width)
    said = sentence(change)
    return [*lines, "", *(field("verdict", said, width) if said else [])]


def _rows(pair: Pair) -> list[tuple[str, ...]]:
    def row(label: str, show: Callable[[Side], str], change: str) -> tuple[str, ...]:
        cells = ("" if side is None else show(side) for side in (pair.before, pair.after))
        return ("", label, *cells, change)

    efficiency = ""
    if pair.before is not None and pair.after is not None:
        efficiency = f"{(pair.after.efficiency.value - pair.before.efficiency.value) * 100:+.1f} pp"
    found = [
        row("epoch time", lambda side: "" if side.epoch_s is None else seconds(side.epoch_s), _times(pair.epoch_gain)),
        row(
            "samples/s",
            lambda side: "" if side.samples_per_s is None else number(side.samples_per_s),
            _times(pair.throughput_gain),
        ),
    ]
    if any(side is not None and side.status != "base" for side in (pair.before, pair.after)):
        found += [
            row("speedup", lambda side: _interval(side.speedup), _times(pair.speedup_gain)),
            row("efficiency", lambda side: f"{side.efficiency.value:.1%}", efficiency),
            row("status", lambda side: side.status, ""),
        ]
    if any(side is not None and side.val_accuracy is not None for side in (pair.before, pair.after)):
        found.append(row("accuracy", lambda side: share(side.val_accuracy), ""))
    return [(str(pair.world_size), *found[0][1:]), *found[1:]]


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _interval(value: OpenInterval) -> str:
    if value.low is None or value.high is None:
        return f"{value.value:.2f}"
    return f"{value.value:.2f} ({value.low:.2f} to {value.high:.2f})"
