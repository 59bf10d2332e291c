"""The output of `tune`: the waterfall from before to after, and the table of attempts."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from frameworm.report.kit import tables
from frameworm.report.kit.layout import LABEL_WIDTH, field, heading, table
from frameworm.report.run.text import bar
from frameworm.report.tune import tables as tune_tables
from frameworm.report.tune.agreement import change_text, compared_text, layer_rows
from frameworm.report.tune.tables import Stage

WIDTH = 80
_NARROWEST = 50
_LONGEST_LABEL = 32
_LONGEST_REASON = 150
_SHORTEST_BAR = 8
_MOST_LAYERS = 4
_MOST_LEFT = 4
# Width of the columns of an agreement without the layer's name.
_AGREEMENT_WIDTH = 40


def waterfall(result: Mapping[str, Any], best: str = "best.yaml", width: int = WIDTH) -> str:
    """Before, every accepted change with its gain and interval, after, and the effect on the whole run.

    Args:
        result: The content of `tune.json`.
        best: Path of the best config, for the command.
        width: Columns; never under 50.
    """
    width = max(width, _NARROWEST)
    lines = heading(f"tune · {tune_tables.name_of(result)}", width)
    lines += field("result", tune_tables.headline(result), width)
    stages = tune_tables.stages(result)
    if len(stages) > 1:
        lines += ["", *_bars(stages, width), "  (bars: time per sample)", ""]
    speeds = tune_tables.samples_per_s(result)
    if speeds[0] != tables.UNKNOWN:
        lines += field("samples/s", speeds[0] if len(stages) == 1 else " → ".join(speeds), width)
    expected = tune_tables.whole_run(result)
    if expected is not None and len(stages) > 1:
        lines += field("whole run", expected, width)
    for label, told in (("pays", tune_tables.break_even(result)), ("memory", tune_tables.peak_memory(result))):
        if told is not None and len(stages) > 1:
            lines += field(label, told, width)
    learning = _learning(result)
    if learning:
        lines += field("learning", learning, width)
    lines += _agreement(tune_tables.final_proof(result), width)
    for row in tune_tables.trade_off_rows(result):
        lines += field("trade-off", row.text(), width)
    lines += field("search", tune_tables.spent(result), width)
    left = tune_tables.left_for_longer(result)
    if left:
        more = f" and {len(left) - _MOST_LEFT} more" if len(left) > _MOST_LEFT else ""
        lines += field("not tried", f"a longer budget would try {', '.join(left[:_MOST_LEFT])}{more}", width)
    if len(stages) > 1:
        # Not wrapped, so that the command can be copied.
        lines.append(f"{'run it':<{LABEL_WIDTH}}{tune_tables.command_of(result, best)}")
    return "\n".join(lines) + "\n"


def attempts_table(result: Mapping[str, Any], width: int = WIDTH, without: Sequence[str] = ()) -> str:
    """Every attempt: the change, its outcome, the gain or a shortened reason; empty without attempts.

    Args:
        result: The content of `tune.json`.
        width: Columns; never under 50.
        without: Outcomes to leave out.
    """
    width = max(width, _NARROWEST)
    attempts = [item for item in tune_tables.attempt_rows(result) if item.status not in without]
    if not attempts:
        return ""
    rows = [("change", "status", "gain or reason")]
    for item in attempts:
        told = textwrap.shorten(item.told, _LONGEST_REASON, placeholder=" ...")
        rows.append((_cut(item.label, min(_LONGEST_LABEL, width // 2 - 8)), item.status, told))
    # All columns are text, so the middle one is padded to be left-aligned.
    widest = max(len(row[1]) for row in rows)
    return "\n".join(table([(one, two.ljust(widest), three) for one, two, three in rows], width)) + "\n"


def by_hand(result: Mapping[str, Any], patch: str, width: int = WIDTH) -> str:
    """How to apply a script's changes in the script itself; empty if there are none.

    Args:
        result: The content of `tune.json`.
        patch: Path of the patch, if there is one.
        width: Columns; never under 50.
    """
    lines = [tables.plain(item) for item in tune_tables.sequence(result.get("by_hand"))]
    if not lines:
        return ""
    width = max(width, _NARROWEST)
    told = f"git apply {patch}" if result.get("patch") else f"not possible: {tables.plain(result.get('no_patch'))}"
    without: list[str] = []
    for item in map(tune_tables.mapping, tune_tables.sequence(result.get("patch_without"))):
        without += field("without", f"{tables.plain(item.get('change'))}: {tables.plain(item.get('reason'))}", width)
    written = [f"{'by hand' if not place else '':<{LABEL_WIDTH}}{line}" for place, line in enumerate(lines)]
    return "\n".join([*field("patch", told, width), *without, *written]) + "\n"


def _bars(stages: Sequence[Stage], width: int) -> list[str]:
    labels = [_cut(stage.label, min(_LONGEST_LABEL, width // 2 - 8)) for stage in stages]
    gains = ["" if stage.gain is None else tune_tables.times(stage.gain) for stage in stages]
    intervals = ["" if stage.gain is None else tune_tables.ends(stage.gain) for stage in stages]
    columns = [max(len(text) for text in column) for column in (labels, gains, intervals)]
    left = width - 2 - sum(size + 2 for size in columns)
    if left < _SHORTEST_BAR:
        intervals, columns[2] = [""] * len(stages), 0
        left = width - 2 - sum(size + 2 for size in columns)
    slowest = max(stage.after for stage in stages)
    return [
        f"  {label:<{columns[0]}}  {gain:>{columns[1]}}  {interval:<{columns[2]}}  "
        f"{bar(stage.after / slowest, max(left, 1))}".rstrip()
        for label, gain, interval, stage in zip(labels, gains, intervals, stages)
    ]


def _learning(result: Mapping[str, Any]) -> str:
    """What the proof of all changes, or of the only change, found about learning."""
    proof = tune_tables.final_proof(result)
    parts = []
    for check in tune_tables.sequence(proof.get("checks")):
        given = tune_tables.mapping(check)
        name, detail = tables.plain(given.get("name") or ""), tables.plain(given.get("detail") or "")
        if name and name != "gain":
            parts.append(f"{name}: {detail}")
    return "; ".join(parts)


def _agreement(proof: Mapping[str, Any], width: int) -> list[str]:
    """The class of the change, what was compared, and the layers that agree least."""
    lines = []
    for label, text in (("change", change_text(proof)), ("compared", compared_text(proof))):
        if text:
            lines += field(label, text, width)
    layers = layer_rows(proof)
    if not layers:
        return lines
    shown = layers[:_MOST_LAYERS]
    others = f"; the {len(layers) - len(shown)} others are in report.html" if len(layers) > len(shown) else ""
    lines += field("agreement", f"error of each layer's worst output, and what rounding explains{others}", width)
    rows = [("layer", "error", "rounding", "bias")]
    for item in shown:
        longest = min(_LONGEST_LABEL, width - _AGREEMENT_WIDTH)
        # The end of a path says more than its beginning.
        layer = item.layer if len(item.layer) <= longest else "…" + item.layer[1 - longest :]
        rows.append((layer, item.worst.error, item.worst.explained, item.worst.bias))
    return [*lines, *table(rows, width)]


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1].rstrip(" ,") + "…"
