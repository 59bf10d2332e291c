"""Turns facts into a verdict: applies every rule once and puts the costliest cause first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from frameworm.diagnose.roofline import roofline
from frameworm.diagnose.rules.accounting import Facts, StepsOfRanks, gather
from frameworm.diagnose.rules.cost import SEVERITIES, SHARES, undecided
from frameworm.diagnose.rules.device import (
    compute_bound,
    host_bound,
    padding_waste,
    precision_unused,
    small_batch,
)
from frameworm.diagnose.rules.machine import (
    cpu_oversubscribed,
    memory_growth,
    memory_pressure,
    memory_underused,
    throttled,
)
from frameworm.diagnose.rules.places import NEEDED, top_place
from frameworm.diagnose.rules.ranks import communication_bound, negative_scaling, straggler
from frameworm.diagnose.rules.time import (
    checkpoint_stall,
    input_bound,
    logging_stall,
    recompilation,
    sync_stall,
    transfer_bound,
)
from frameworm.records.estimate import Estimate
from frameworm.records.observations import Roofline, SystemSummary
from frameworm.records.schema import ExpectedSpeedup, Finding, RunRecord
from frameworm.records.trace import TraceSummary

Rule = Callable[[Facts], Finding | None]

# If two causes cost the same, the more specific one comes first.
RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        negative_scaling,
        straggler,
        communication_bound,
        sync_stall,
        small_batch,
        host_bound,
        transfer_bound,
        cpu_oversubscribed,
        input_bound,
        checkpoint_stall,
        logging_stall,
        recompilation,
        throttled,
        precision_unused,
        padding_waste,
        memory_growth,
        memory_pressure,
        memory_underused,
        compute_bound,
    )
}
CODES = tuple(RULES)

EXPERIMENT = "experiment"  # key in the evidence of findings from experiments
HEALTHY, INCONCLUSIVE = "healthy", "inconclusive"
FEWEST_STEPS = 10
TOO_NOISY = 0.2  # relative standard error of the mean step
UNSEEN_SHARE = 0.2  # fraction of the step in no phase

_PHASE_CAUSES = {
    "data_wait": "waiting for data",
    "transfer": "copies to the device",
    "communication_exposed": "communication",
    "checkpoint": "checkpoints",
}


@dataclass(frozen=True)
class Diagnosis:
    """The result of diagnosing a run.

    Attributes:
        verdict: The code that costs most, `healthy` or `inconclusive`.
        findings: At most one per code, the costliest first, `info` last.
        notes: Why the verdict is inconclusive and what to do about it, and what else stood out.
        roofline: Where the step time goes on a GPU, from the trace; None without one.
    """

    verdict: str
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    roofline: Roofline | None = None


def register_rule(rule: Rule) -> None:
    """Judge runs in this process by one more rule, after frameworm's own; one of the same name is replaced.

    Args:
        rule: Returns a finding, or None if its cause costs nothing worth saying. The function's name is the finding's
            code.

    Raises:
        ValueError: The name is a code of frameworm's own.
    """
    if rule.__name__ in CODES:
        raise ValueError(f"{rule.__name__} is a code of frameworm's own; give the rule another name")
    RULES[rule.__name__] = rule


def judge(
    record: RunRecord,
    *,
    steps: StepsOfRanks | None = None,
    system: SystemSummary | None = None,
    config: Any = None,
    trace: TraceSummary | None = None,
    baseline: RunRecord | None = None,
    measured: Mapping[str, ExpectedSpeedup] | None = None,
) -> Diagnosis:
    """Find what costs a run most, with evidence and remedies.

    Args:
        record: The run.
        steps: Its steps: an account of them, the steps of one rank, or either of these by rank. Without them, the
            errors of all metrics are estimated conservatively from the spread of the steps.
        system: The machine during the run, if it is not in the record.
        config: The resolved config, as a `Config` or as data; remedies that are already set are omitted.
        trace: Summary of a profiler trace of the run.
        baseline: A run of the same work on fewer ranks.
        measured: Speedups by code, measured by experiments; they replace modelled ones.
    """
    facts = gather(record, steps=steps, system=system, config=config, trace=trace, baseline=baseline)
    return replace(judge_facts(facts, measured), roofline=roofline(trace, record.flops))


def judge_facts(facts: Facts, measured: Mapping[str, ExpectedSpeedup] | None = None) -> Diagnosis:
    """Judge facts that were already gathered; see `judge`."""
    if facts.record.steps == facts.measured_steps == 0:
        return Diagnosis(INCONCLUSIVE, notes=["inconclusive: no training step was seen"])
    if facts.measured_steps < FEWEST_STEPS:
        return Diagnosis(
            INCONCLUSIVE,
            notes=[
                f"inconclusive: {facts.measured_steps} steps were measured after the warm-up, {FEWEST_STEPS} are the "
                "least to judge by; train longer"
            ],
        )
    found = [finding for rule in RULES.values() if (finding := rule(facts)) is not None]
    for finding in found:
        if measured is not None and finding.code in measured:
            finding.expected_speedup = measured[finding.code]
    found.sort(key=_cost, reverse=True)  # stable: between equals, the order of the rules decides
    notes = _drift_notes(facts)
    worst = next((finding for finding in found if finding.severity != "info"), None)
    if worst is not None:
        return Diagnosis(worst.code, found, notes)
    doubts = _doubts(facts)
    if doubts:
        return Diagnosis(INCONCLUSIVE, found, [*(f"inconclusive: {doubt}" for doubt in doubts), *notes])
    return Diagnosis(HEALTHY, found, notes)


def apply_judgement(record: RunRecord, judgement: Diagnosis) -> RunRecord:
    """Write a judgement into the record, replacing an earlier one."""
    record.verdict = judgement.verdict
    record.findings = list(judgement.findings)
    record.roofline = judgement.roofline or record.roofline
    kept = [note for note in record.notes or [] if not is_judgement_note(note)]
    record.notes = [*kept, *judgement.notes]
    return record


def keep_shown(judgement: Diagnosis, before: Sequence[Finding]) -> Diagnosis:
    """Combine a new judgement of a stored run with earlier findings from experiments, which its files do not contain.

    Args:
        judgement: The judgement from the files alone.
        before: The findings in its summary.
    """
    shown = {item.code: item for item in before if EXPERIMENT in item.evidence}
    if not shown:
        return judgement
    found = [shown.pop(item.code, item) for item in judgement.findings]
    return with_findings(judgement, [*found, *shown.values()])


def with_findings(judgement: Diagnosis, findings: Sequence[Finding]) -> Diagnosis:
    """Return the judgement with other findings, some of them from experiments, sorted by cost."""
    found = sorted(findings, key=_cost_when_tried, reverse=True)
    worst = next((item for item in found if item.severity != "info"), None)
    verdict = judgement.verdict
    if worst is not None:
        verdict = worst.code
    elif verdict in {item.code for item in found}:
        verdict = HEALTHY
    return Diagnosis(verdict, found, list(judgement.notes), judgement.roofline)


def is_judgement_note(note: str) -> bool:
    """True if a note of a record was written by a judgement."""
    return note.startswith(("inconclusive: ", "drift: ", "sample: "))


def sample_note(share: float, rest: str) -> str:
    """Return the note that a judgement is based on a sample of the steps.

    Args:
        share: Fraction of the steps that was read.
        rest: What else the reader should know.
    """
    return (
        f"sample: findings are by {share:.2%} of the steps, in blocks spread evenly over the run, and their intervals "
        f"allow for that; {rest}"
    )


def _cost(finding: Finding) -> tuple[int, float]:
    """Sort key: severity, which follows from the cost, or from the risk if a finding has no share; then the share."""
    return SEVERITIES.index(finding.severity), finding.share or 0.0


def _cost_when_tried(finding: Finding) -> tuple[bool, float, int]:
    return finding.severity != "info", finding.share or 0.0, SEVERITIES.index(finding.severity)


def _doubts(facts: Facts) -> list[str]:
    """Return the reasons why a run without warnings cannot be called healthy."""
    found = []
    if not facts.phases:
        return ["no step was divided into phases, so where the time went is unknown"]
    unseen = [name for name in NEEDED if name in (facts.record.unseen or [])]
    if facts.world_size > 1 and "communication_exposed" in (facts.record.unseen or []):
        unseen.append("communication_exposed")
    if unseen:
        names = ", ".join(name.replace("_", " ") for name in unseen)
        found.append(f"{names} could not be seen in this run; a trace (--trace) or the engine shows more")
    other = facts.phases.get("other")
    if other is not None and other.low > UNSEEN_SHARE:
        found.append(
            f"{other.value:.0%} of the step is in no phase that can be seen{_where(facts)}; name its parts with "
            "PerformanceProfiler, or record a trace"
        )
    for name, words in _PHASE_CAUSES.items():
        share = facts.phases.get(name)
        if share is not None and undecided(share):
            found.append(f"{words} costs {_range(share)} of the step, which may be nothing; measure more steps")
    noise = facts.noise
    if noise is None or noise > TOO_NOISY:
        size = "by an unknown amount" if noise is None else f"by {noise:.0%}"
        found.append(f"step times vary too much, the mean is uncertain {size}; measure more steps on a quiet machine")
    return found


def _where(facts: Facts) -> str:
    place = top_place(facts.record)
    return "" if place is None else f", {place}"


def _drift_notes(facts: Facts) -> list[str]:
    drift = facts.drift
    if drift is None or min(abs(drift.low), abs(drift.high)) < SHARES["warning"] or drift.low * drift.high < 0:
        return []
    word = "slower" if drift.value > 0 else "faster"
    return [f"drift: steps became {abs(drift.value):.0%} {word} from the beginning to the end of the run"]


def _range(share: Estimate) -> str:
    return f"{max(share.low, 0.0):.0%} to {min(share.high, 1.0):.0%}"
