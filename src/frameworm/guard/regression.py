"""Compares a run with its baseline: time, memory and quality, each with its own limit."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from frameworm.errors import BaselineError
from frameworm.guard.comparison import (
    Difference,
    Explanation,
    PhaseChange,
    crowded,
    differences,
    explain,
    hardware_differences,
    phase_changes,
    widened,
    work_differences,
)
from frameworm.guard.limits import Limits
from frameworm.guard.run_metrics import FEWEST_STEPS, RunMetrics
from frameworm.guard.statistics import PRIOR_SPREAD, Level, independent_ratio, run_spread
from frameworm.records.account import RARE
from frameworm.records.estimate import Interval, quantile
from frameworm.records.observations import Target

OK = "ok"
REGRESSION = "regression"
INCONCLUSIVE = "inconclusive"
MISSED = "missed"  # no regression, but a target was missed
NOT_JUDGED = "not judged"
EXIT_CODES = {OK: 0, REGRESSION: 1, MISSED: 1, INCONCLUSIVE: 3}

# An ok for the step time means that a change of twice the limit is ruled out.
SEEN = 2.0
# Relative changes of smaller values mean nothing.
SMALLEST_BYTES = 16 * 2**20
SMALLEST_LOSS = 0.1


@dataclass(frozen=True, slots=True)
class MetricCheck:
    """One guarded metric.

    `change` is relative, except for accuracy, where it is in points (0.01: from 90% to 91%), and for pauses, where it
    is a fraction of the mean step; `low` and `high` are its 95% interval if there is one.
    """

    # typical_step | mean_step | pauses | mfu | device_memory | host_memory | val_accuracy | val_loss | train_loss
    name: str
    verdict: str
    before: float | None
    after: float | None
    change: float | None
    limit: float
    low: float | None = None
    high: float | None = None
    reason: str | None = None


@dataclass(slots=True)
class GuardVerdict:
    """The guard's result; `exit_code` is 0, 1 or 3."""

    verdict: str = OK
    reasons: list[str] = field(default_factory=list)  # why nothing could be judged at all
    checks: list[MetricCheck] = field(default_factory=list)
    phases: list[PhaseChange] = field(default_factory=list)
    explanation: Explanation | None = None
    settings: list[Difference] = field(default_factory=list)
    environment: list[Difference] = field(default_factory=list)
    run_spread: float | None = None
    spread_learned: bool = False
    targets: dict[str, list[Target]] = field(default_factory=dict)  # per run, if targets are guarded
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """Exit code of the command line."""
        return EXIT_CODES[self.verdict]


def judge(
    before: Sequence[RunMetrics],
    after: Sequence[RunMetrics],
    limits: Limits | None = None,
    *,
    allow_different_hardware: bool = False,
) -> GuardVerdict:
    """Compare runs with a baseline.

    Args:
        before: The runs of the baseline; with two or more, the spread between runs is estimated from them.
        after: The runs to judge.
        limits: The accepted degradations.
        allow_different_hardware: Continue even if the machines differ.

    Raises:
        BaselineError: The baseline measures other work, or contains a run that did not complete.
    """
    assert before, "there is nothing to compare with"
    assert after, "there is nothing to compare"
    limits = limits or Limits()
    _check_baseline(before, after)
    judgement = GuardVerdict()
    judgement.settings = differences(before[-1].settings, after[-1].settings)
    judgement.reasons = _hindrances(before, after, allow_different_hardware)
    if judgement.reasons:
        judgement.verdict = INCONCLUSIVE
        return judgement
    judgement.environment = differences(before[-1].environment, after[-1].environment)
    if limits.regression is not None:
        _judge_time(judgement, before, after, limits.regression)
    if limits.mfu_drop is not None:
        _judge_mfu(judgement, before, after, limits.mfu_drop)
    if limits.memory is not None:
        for name in ("device_bytes", "host_bytes"):
            _judge_memory(judgement, name, before, after, limits.memory)
    for name, limit in (
        ("val_accuracy", limits.accuracy_drop),
        ("val_loss", limits.loss_increase),
        ("train_loss", limits.loss_increase),
    ):
        if limit is not None:
            _judge_quality(judgement, name, before, after, limit)
    verdicts = {check.verdict for check in judgement.checks}
    judgement.verdict = next((name for name in (REGRESSION, INCONCLUSIVE) if name in verdicts), OK)
    if not verdicts - {NOT_JUDGED}:
        judgement.verdict = INCONCLUSIVE
        judgement.reasons.append("nothing could be judged")
    return judgement


def judge_targets(
    judgement: GuardVerdict, targets: Mapping[str, Sequence[Target]], required: Collection[str] = ()
) -> None:
    """Let a judgement also fail on missed targets; a target that was not measured is neither met nor missed.

    Args:
        judgement: Of the same runs against their baseline, or a new one without a baseline.
        targets: The graded targets of each run.
        required: Names of targets that must be measured for an ok.
    """
    judgement.targets = {name: list(items) for name, items in targets.items()}
    grades = {item.grade for items in targets.values() for item in items}
    for run, items in targets.items():
        judged = {item.name for item in items if item.grade != "unknown"}
        judgement.reasons += [f"{name} was not measured in {run}" for name in required if name not in judged]
    if "missed" in grades and judgement.verdict != REGRESSION:
        judgement.verdict = MISSED
    elif judgement.verdict == OK and ("met" not in grades or judgement.reasons):
        judgement.verdict = INCONCLUSIVE
        judgement.reasons = judgement.reasons or ["no target was measured in these runs"]


def check_fit(runs: Sequence[RunMetrics]) -> None:
    """Refuse runs that cannot form one baseline.

    Raises:
        BaselineError: They are not completed, too short, or differ in work or hardware.
    """
    _check_baseline(runs, ())
    for reason in _hindrances(runs, (), allow_different_hardware=False):
        raise BaselineError(f"no baseline is made: {reason}")


def _check_baseline(before: Sequence[RunMetrics], after: Sequence[RunMetrics]) -> None:
    for run in before:
        if run.status != "completed":
            raise BaselineError(f"the baseline run {run.name} is {run.status}; a baseline is made of completed runs")
    for run in (*before, *after):
        for item in work_differences(before[0], run):
            raise BaselineError(
                f"{run.name} does other work than the baseline: {item.name} is {item.after}, not {item.before}; "
                "compare like with like, or look at the two with `frameworm compare`"
            )


def _hindrances(before: Sequence[RunMetrics], after: Sequence[RunMetrics], allow_different_hardware: bool) -> list[str]:
    reasons = [
        f"{run.name} is {run.status}; only completed runs are judged" for run in after if run.status != "completed"
    ]
    for run in (*before, *after):
        if run.measured_steps < FEWEST_STEPS and run.status == "completed":
            reasons.append(
                f"{run.name} is too short: {run.measured_steps} steps after {run.left_out} of warm-up, and "
                f"{FEWEST_STEPS} are needed"
            )
    if not allow_different_hardware:
        found = {item for run in (*before, *after) for item in _hashable(hardware_differences(before[0], run))}
        for name, mine, theirs in sorted(found):
            reasons.append(f"different hardware: {name} is {theirs}, and {mine} in the baseline")
    return reasons


def _hashable(items: list[Difference]) -> list[tuple[str, str, str]]:
    return [(item.name, str(item.before), str(item.after)) for item in items]


def _judge_time(
    judgement: GuardVerdict, before: Sequence[RunMetrics], after: Sequence[RunMetrics], limit: float
) -> None:
    old, new = _levels(before, "typical"), _levels(after, "typical")
    judgement.run_spread, freedom = run_spread(old, new)
    judgement.spread_learned = freedom > 0
    if not judgement.spread_learned:
        judgement.notes.append(
            f"one run on each side: runs are taken to differ by {PRIOR_SPREAD * 100:.1f}% by themselves; a baseline "
            "of several runs shows how much they do"
        )
    for name, kind, needs_sight in (("typical_step", "typical", True), ("mean_step", "mean", False)):
        old, new = _levels(before, kind), _levels(after, kind)
        found = widened(independent_ratio(old, new), before, after)
        judgement.checks.append(_time_check(name, found, old, new, limit, needs_sight=needs_sight))
    for run in (*before, *after):
        if crowded(run):
            judgement.notes.append(
                f"{run.name} did not have the machine to itself: other programs took {crowded(run) * 100:.0f}% of its "
                "cores; the interval allows for that"
            )
    judgement.phases = phase_changes(before, after)
    if len({run.steps for run in (*before, *after)}) == 1:
        _judge_pauses(judgement, before, limit)
    judgement.explanation = explain(judgement.phases)


def _judge_pauses(judgement: GuardVerdict, before: Sequence[RunMetrics], limit: float) -> None:
    """Judge checkpoints and validation per step; only for runs of equal length, which should have equally many."""
    pauses = [change for change in judgement.phases if change.name in RARE]
    whole_s = math.fsum(run.mean_step_s or 0.0 for run in before) / len(before)
    if not pauses or whole_s <= 0:
        return
    before_s, after_s = (math.fsum(getattr(item, name) for item in pauses) for name in ("before_s", "after_s"))
    change = (after_s - before_s) / whole_s
    margin = math.hypot(*(item.margin_s for item in pauses)) / whole_s
    verdict, reason = OK, None
    if change > limit:
        verdict = REGRESSION if change > margin else INCONCLUSIVE
        reason = None if verdict == REGRESSION else "beyond the limit, but it may be noise"
    low, high = change - margin, change + margin
    judgement.checks.append(MetricCheck("pauses", verdict, before_s, after_s, change, limit, low, high, reason))


def _levels(runs: Sequence[RunMetrics], kind: str) -> list[Level]:
    return [level for run in runs if (level := getattr(run, kind)()) is not None]


def _time_check(
    name: str, found: Interval[float], old: list[Level], new: list[Level], limit: float, *, needs_sight: bool
) -> MetricCheck:
    """Judge a step time: a change beyond the limit that is not noise is a regression.

    Stalls are rare, so a mean is less certain than the typical step; with `needs_sight`, an ok also requires that a
    change of twice the limit is ruled out.
    """
    reason = None
    if found.value - 1 > limit:
        verdict = REGRESSION if found.low > 1 else INCONCLUSIVE
        reason = "beyond the limit, but it may be noise" if verdict == INCONCLUSIVE else None
    elif needs_sight and found.high - 1 > SEEN * limit:
        verdict = INCONCLUSIVE
        reason = f"too noisy to see {limit * 100:g}%"
    else:
        verdict = OK
    before_s, after_s = (math.exp(math.fsum(level.value for level in group) / len(group)) for group in (old, new))
    return MetricCheck(name, verdict, before_s, after_s, found.value - 1, limit, found.low - 1, found.high - 1, reason)


def _judge_mfu(
    judgement: GuardVerdict, before: Sequence[RunMetrics], after: Sequence[RunMetrics], limit: float
) -> None:
    """Judge MFU, if it is known on both sides; lower is worse."""
    old, new = ([run.mfu for run in group if run.mfu] for group in (before, after))
    if not old or not new:
        reason = f"{'this run' if old else 'the baseline'} has no MFU: it is on a device whose peak is not known"
        judgement.checks.append(MetricCheck("mfu", NOT_JUDGED, None, None, None, limit, reason=reason))
        return
    usual, now = math.fsum(old) / len(old), math.fsum(new) / len(new)
    change, margin = now / usual - 1, _margin(old, len(new)) / usual
    verdict, doubt = OK, None
    if -change > limit:
        verdict = REGRESSION if -change > margin else INCONCLUSIVE
        doubt = None if verdict == REGRESSION else "beyond the limit, but runs of the baseline differ as much"
    judgement.checks.append(MetricCheck("mfu", verdict, usual, now, change, limit, reason=doubt))


def _judge_memory(
    judgement: GuardVerdict, name: str, before: Sequence[RunMetrics], after: Sequence[RunMetrics], limit: float
) -> None:
    old = [run.memory[name] for run in before if name in run.memory]
    new = [run.memory[name] for run in after if name in run.memory]
    if not old or not new:
        return
    # The largest of the judged runs against the mean of the baseline.
    usual, most = math.fsum(old) / len(old), max(new)
    change = most / usual - 1 if usual > 0 else 0.0
    worse = change > limit and most - usual > SMALLEST_BYTES
    label = name.removesuffix("_bytes") + "_memory"
    judgement.checks.append(MetricCheck(label, REGRESSION if worse else OK, usual, float(most), change, limit))


def _judge_quality(
    judgement: GuardVerdict, name: str, before: Sequence[RunMetrics], after: Sequence[RunMetrics], limit: float
) -> None:
    old = [run.quality[name] for run in before if name in run.quality]
    new = [run.quality[name] for run in after if name in run.quality]
    if not old:
        return
    usual = math.fsum(old) / len(old)
    if not new:
        judgement.checks.append(MetricCheck(name, NOT_JUDGED, usual, None, None, limit, reason="this run has none"))
        return
    now = math.fsum(new) / len(new)
    if not math.isfinite(usual):
        judgement.checks.append(
            MetricCheck(name, NOT_JUDGED, usual, now, None, limit, reason="the baseline has no number")
        )
        return
    if not math.isfinite(now):
        judgement.checks.append(
            MetricCheck(name, REGRESSION, usual, now, None, limit, reason="it is not finite any more")
        )
        return
    absolute = name == "val_accuracy"
    scale = 1.0 if absolute else max(abs(usual), SMALLEST_LOSS)
    change = (now - usual) / scale
    steps = {run.steps for run in (*before, *after)}
    if len(steps) > 1:
        reason = f"trained for {after[-1].steps:,} steps, not {before[-1].steps:,}"
        judgement.checks.append(MetricCheck(name, NOT_JUDGED, usual, now, change, limit, reason=reason))
        return
    worse = -change if absolute else change
    margin = _margin(old, len(new)) / scale
    verdict, doubt = OK, None
    if worse > limit:
        verdict = REGRESSION if worse > margin else INCONCLUSIVE
        doubt = None if verdict == REGRESSION else "beyond the limit, but runs of the baseline differ as much"
    low, high = (change - margin, change + margin) if margin > 0 else (None, None)
    judgement.checks.append(MetricCheck(name, verdict, usual, now, change, limit, low, high, doubt))


def _margin(values: Sequence[float], count: int) -> float:
    """How far the mean of `count` new runs may deviate from that of these by chance; 0 if there is only one run."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return quantile(len(values) - 1) * math.sqrt(variance * (1 / len(values) + 1 / count))
