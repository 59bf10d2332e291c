"""The output of `guard` and `compare`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from frameworm.guard.comparison import Comparison, Difference, Explanation, PhaseChange, crowded
from frameworm.guard.divergence import Divergence
from frameworm.guard.regression import INCONCLUSIVE, NOT_JUDGED, OK, REGRESSION, GuardVerdict, MetricCheck
from frameworm.records.estimate import Interval, known
from frameworm.report.kit import tables
from frameworm.report.kit.layout import field, heading, table

LABELS = {
    "typical_step": "typical step",
    "mean_step": "mean step",
    "pauses": "pauses",
    "mfu": "MFU",
    "device_memory": "device memory",
    "host_memory": "host memory",
    "val_accuracy": "val. accuracy",
    "val_loss": "val. loss",
    "train_loss": "train loss",
}
_TIMES = ("typical_step", "mean_step", "pauses")
_MOST_DIFFERENCES = 8
_WORTH_A_ROW = 0.001


def render_judgement(judgement: GuardVerdict, before: str | None, after: str, width: int = 80) -> str:
    """The guard's verdict, its checks and their explanation, in lines of at most `width` characters.

    Args:
        judgement: The result of the guard.
        before: Name of the baseline; None if there is none.
        after: Name of the judged run.
        width: Most characters per line.
    """
    against = "its targets" if before is None else tables.plain(before)
    lines = heading(f"guard · {tables.plain(after)} against {against}", width)
    lines += field("verdict", judgement.verdict, width)
    for sentence in judgement_sentences(judgement):
        lines += field("", sentence, width)
    if judgement.checks:
        rows: list[tuple[str, ...]] = [("", "baseline", "now", "change", "95% interval", "limit", "")]
        rows += [_check_row(check) for check in judgement.checks]
        lines += ["", *table(rows, width), ""]
    if judgement.targets:
        lines += ["", *table(_target_rows(judgement), width), ""]
    if judgement.phases and _slower(judgement):
        lines += _phase_table(judgement.phases, "baseline", "now", "per step", width)
    for label, items in (("settings", judgement.settings), ("environment", judgement.environment)):
        if items:
            lines += difference_lines(label, items, width)
    for note in judgement.notes:
        lines += field("note", tables.plain(note), width)
    return _joined(lines)


def _target_rows(judgement: GuardVerdict) -> list[tuple[str, ...]]:
    several = len(judgement.targets) > 1
    rows: list[tuple[str, ...]] = [("target", "goal", "here", *(("run",) if several else ()), "")]
    for run, targets in judgement.targets.items():
        for item in targets:
            name = (tables.plain(run),) if several else ()
            rows.append((item.label, item.goal, tables.target_value(item), *name, item.grade))
    return rows


def _joined(lines: Sequence[str]) -> str:
    kept = [line for index, line in enumerate(lines) if line or (index and lines[index - 1])]
    return "\n".join(kept).rstrip("\n") + "\n"


def judgement_sentences(judgement: GuardVerdict) -> list[str]:
    """The reasons for the verdict."""
    sentences = [tables.plain(reason) for reason in judgement.reasons]
    for check in judgement.checks:
        if check.verdict == judgement.verdict and check.verdict in (REGRESSION, INCONCLUSIVE):
            sentences.append(_check_sentence(check))
    for run, targets in judgement.targets.items():
        of = f" in {tables.plain(run)}" if len(judgement.targets) > 1 else ""
        missed = [item for item in targets if item.grade == "missed"]
        sentences += [f"{item.label} {tables.target_value(item)}{of}, target {item.goal}" for item in missed]
    slower = _slower(judgement)
    if slower and judgement.explanation is not None and judgement.explanation.total_s > 0:
        sentences.append(_explanation_sentence(judgement.explanation, "step"))
    if judgement.verdict == INCONCLUSIVE and slower:
        sentences.append("longer runs, more runs on either side or a quieter machine would tell")
    return sentences


def _slower(judgement: GuardVerdict) -> list[MetricCheck]:
    return [check for check in judgement.checks if check.name in _TIMES and check.verdict != OK]


def render_comparison(comparison: Comparison, width: int = 80) -> str:
    """Two runs side by side, in lines of at most `width` characters."""
    before, after = comparison.before, comparison.after
    unit = "sample" if comparison.per_sample else "step"
    lines = heading(f"compare · A {tables.plain(before.name)} · B {tables.plain(after.name)}", width)
    for index, sentence in enumerate(comparison_sentences(comparison)):
        lines += field("verdict" if index == 0 else "", sentence, width)
    if comparison.phases:
        lines += _phase_table(comparison.phases, "A", "B", f"per {unit}", width)
    rows: list[tuple[str, ...]] = [("", "A", "B", "change", "95% interval")]
    for name, found in (("typical", comparison.typical), ("mean", comparison.mean)):
        rows.append(_time_row(f"{name} {unit}", comparison, name, found))
    for name in ("device_bytes", "host_bytes"):
        mine, theirs = before.memory.get(name), after.memory.get(name)
        if mine is not None or theirs is not None:
            change = _percent(theirs / mine - 1) if mine and theirs else ""
            label = name.removesuffix("_bytes") + " memory"
            rows.append((label, tables.data_size(mine), tables.data_size(theirs), change, ""))
    if before.mfu is not None or after.mfu is not None:
        change = _percent(after.mfu / before.mfu - 1) if before.mfu and after.mfu else ""
        rows.append((LABELS["mfu"], tables.share(before.mfu), tables.share(after.mfu), change, ""))
    for name in ("val_accuracy", "val_loss", "train_loss"):
        mine_q, theirs_q = before.quality.get(name), after.quality.get(name)
        if mine_q is not None or theirs_q is not None:
            show = tables.share if name == "val_accuracy" else tables.number
            rows.append((LABELS[name], show(mine_q), show(theirs_q), _quality_change(name, mine_q, theirs_q), ""))
    steps = "" if before.steps == after.steps else "other length"
    rows.append(("steps", f"{before.steps:,}", f"{after.steps:,}", steps, ""))
    lines += ["", *table(rows, width), ""]
    if comparison.parting is not None:
        lines += field("divergence", divergence_text(comparison.parting), width)
    for label, run in (("A", before), ("B", after)):
        if run.share < 1:
            lines += field("note", f"times of {label} are by a sample of {run.share:.2%} of its steps", width)
    lines += difference_lines("settings", comparison.settings, width)
    lines += difference_lines("environment", [*comparison.hardware, *comparison.environment], width)
    if comparison.work:
        lines += difference_lines("work", comparison.work, width)
    for label, run in (("A", before), ("B", after)):
        if run.status != "completed":
            lines += field("note", f"{label} is {tables.plain(run.status)}", width)
        if crowded(run):
            text = f"{label} did not have the machine to itself: other programs took {tables.share(crowded(run))}"
            lines += field("note", f"{text} of its cores; the interval allows for that", width)
    return _joined(lines)


def divergence_text(parting: Divergence) -> str:
    """The first step in which two runs differ."""
    if parting.step is None and parting.is_searched:
        return (
            f"none found: loss and gradient norm are bitwise equal in {parting.compared_steps:,} steps spread over the "
            "run (--exact compares them all)"
        )
    if parting.step is None:
        return f"none: loss and gradient norm are bitwise equal in all {parting.compared_steps:,} steps"
    mine, theirs = ("unknown" if value is None else f"{value:.9g}" for value in (parting.before, parting.after))
    before = "the first step" if parting.compared_steps == 1 else "all steps before it are bitwise equal"
    if parting.is_searched and parting.compared_steps > 1:
        before = "found by bisection (--exact compares every step before it)"
    return f"in step {parting.step:,}: the {parting.what} of rank {parting.rank} is {mine} and {theirs}; {before}"


def comparison_sentences(comparison: Comparison) -> list[str]:
    """How the speed changed, and which phase explains it."""
    unit = "sample" if comparison.per_sample else "step"
    found, kind = comparison.typical, "typical"
    if comparison.mean is not None and comparison.mean.leaves_out(1) and (found is None or not found.leaves_out(1)):
        found, kind = comparison.mean, "mean"
    if found is None:
        return ["inconclusive: too few steps to compare their times"]
    interval = _span(found.low - 1, found.high - 1)
    faster = found.value < 1
    word = "less" if faster else "more"
    if not found.leaves_out(1):
        change = f"{abs(found.value - 1) * 100:.1f}% {word}"
        return [f"no difference in speed outside of noise: the {kind} {unit} of B takes {change} ({interval})"]
    sentences = [
        f"B is {'faster' if faster else 'slower'}: the {kind} {unit} takes {abs(found.value - 1) * 100:.1f}% {word} "
        f"({interval}), {1 / found.value:.2f}x the speed"
    ]
    explanation = comparison.explanation
    if explanation is not None and (explanation.total_s < 0) == faster:
        sentences.append(_explanation_sentence(explanation, unit))
    elif comparison.phases:
        sentences.append("no single phase explains it: see the table")
    return sentences


def _explanation_sentence(explanation: Explanation, unit: str) -> str:
    label = tables.PHASE_LABELS.get(explanation.phase, tables.plain(explanation.phase))
    whole = f"{_signed_time(explanation.difference_s)} of {_signed_time(explanation.total_s)} per {unit}"
    if explanation.share > 1:
        whole = (
            f"{_signed_time(explanation.difference_s)}, where the whole {unit} has {_signed_time(explanation.total_s)}"
        )
    if explanation.phase == "other":
        return f"no phase explains it: it lies in the time outside of all phases ({whole})"
    return f"{label} explains it: {whole}"


def _check_sentence(check: MetricCheck) -> str:
    label = LABELS.get(check.name, check.name).replace("val.", "validation")
    if check.change is None:
        return f"{label}: {check.reason}"
    change = _change(check)
    interval = "" if check.low is None or check.high is None else f" ({_interval(check)})"
    text = f"{label} {change}{interval}, limit {_limit(check)}"
    return f"{text}: {check.reason}" if check.reason else text


def _check_row(check: MetricCheck) -> tuple[str, ...]:
    verdict = f"{check.verdict}: {check.reason}" if check.verdict == NOT_JUDGED and check.reason else check.verdict
    return (
        LABELS.get(check.name, check.name),
        _value(check.name, check.before),
        _value(check.name, check.after),
        _change(check),
        _interval(check),
        _limit(check),
        verdict,
    )


def _value(name: str, value: float | None) -> str:
    if name in _TIMES:
        return tables.seconds(value)
    if name.endswith("_memory"):
        return tables.data_size(value)
    return tables.share(value) if name in ("val_accuracy", "mfu") else tables.number(value)


def _change(check: MetricCheck) -> str:
    if check.change is None:
        return ""
    return _points(check.change) if check.name == "val_accuracy" else _percent(check.change)


def _interval(check: MetricCheck) -> str:
    if check.low is None or check.high is None:
        return ""
    return _span(check.low, check.high, " pp" if check.name == "val_accuracy" else "%")


def _limit(check: MetricCheck) -> str:
    if check.name == "val_accuracy":
        return f"-{check.limit * 100:g} pp"
    if check.name == "mfu":
        return f"-{check.limit * 100:g}%"
    return f"+{check.limit * 100:g}%"


def _time_row(label: str, comparison: Comparison, kind: str, found: Interval[float] | None) -> tuple[str, ...]:
    cells = [label]
    for run in (comparison.before, comparison.after):
        value = run.typical_s if kind == "typical" else run.mean_step_s
        samples = run.work.samples_per_step if comparison.per_sample else None
        cells.append(tables.seconds(None if value is None else value / (samples or 1.0)))
    if found is None:
        return (*cells, "", "too few steps")
    return (*cells, _percent(found.value - 1), _span(found.low - 1, found.high - 1))


def _quality_change(name: str, before: float | None, after: float | None) -> str:
    if before is None or after is None or not (math.isfinite(before) and math.isfinite(after)):
        return ""
    if name == "val_accuracy":
        return _points(after - before)
    return _percent(after / before - 1) if before else ""


def _phase_table(changes: Sequence[PhaseChange], before: str, after: str, unit: str, width: int) -> list[str]:
    whole_s = math.fsum(max(change.before_s, change.after_s) for change in changes)
    rows = [(unit, before, after, "difference", "")]
    for change in changes:
        if max(change.before_s, change.after_s) < _WORTH_A_ROW * whole_s and not change.outside_noise:
            continue
        rows.append(
            (
                tables.PHASE_LABELS.get(change.name, tables.plain(change.name)),
                tables.seconds(change.before_s),
                tables.seconds(change.after_s),
                _signed_time(change.difference_s),
                "" if change.outside_noise else "within noise",
            )
        )
    return ["", *table(rows, width), ""]


def difference_lines(label: str, items: Sequence[Difference], width: int) -> list[str]:
    """The first few differences."""
    if not items:
        return field(label, "the same", width)
    lines: list[str] = []
    for index, item in enumerate(items[:_MOST_DIFFERENCES]):
        text = f"{tables.plain(item.name)}: {_cell(item, item.before)} → {_cell(item, item.after)}"
        lines += field(label if index == 0 else "", text, width)
    if len(items) > _MOST_DIFFERENCES:
        lines += field("", f"and {len(items) - _MOST_DIFFERENCES} more (--json shows all)", width)
    return lines


def _cell(item: Difference, value: Any) -> str:
    if known(value) is not None and item.name.endswith("_bytes"):
        return tables.data_size(value)
    return tables.cell(value)


def _span(low: float, high: float, unit: str = "%") -> str:
    digits = 0 if max(abs(low), abs(high)) >= 1 else 1
    return f"{low * 100:+.{digits}f} to {high * 100:+.{digits}f}{unit}"


def _percent(value: float) -> str:
    return f"{value * 100:+.1f}%"


def _points(value: float) -> str:
    return f"{value * 100:+.1f} pp"


def _signed_time(value: float) -> str:
    return ("+" if value >= 0 else "") + tables.seconds(value)
