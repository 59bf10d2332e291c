"""Apply experiments to a judgement: modelled gains become measured ones, and refuted guesses become notes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from frameworm.diagnose.rules.cost import GAINS
from frameworm.diagnose.rules.judge import EXPERIMENT, HEALTHY, INCONCLUSIVE, Diagnosis, with_findings
from frameworm.records.estimate import Interval
from frameworm.records.schema import ExpectedSpeedup, Finding, Remedy

# Rules can detect these only on some devices or under some wrappers; an experiment can show them anywhere.
SEEN_BY_EXPERIMENT = ("small_batch", "precision_unused", "communication_bound", "straggler")
RULE_SHARE = ("share_low", "share_high")


@dataclass(frozen=True)
class ExperimentResult:
    """The measured effect of removing a cause.

    Attributes:
        speedup: The speedup.
        experiment: What was done, as text.
        remedy: The setting that was changed; None if no setting removes the cause in that way.
        figures: Additional evidence.
        refuted: A setting that was changed without gain and is no longer recommended.
        instead: What to recommend if that was the only advice.
        cost: The speedup without the cause altogether, if the remedy removes only part of it.
    """

    speedup: Interval[float]
    experiment: str
    remedy: Remedy | None = None
    figures: dict[str, Any] | None = None
    refuted: str | None = None
    instead: Remedy | None = None
    cost: Interval[float] | None = None


def settle(judgement: Diagnosis, gains: dict[str, ExperimentResult]) -> Diagnosis:
    """Update a judgement with the measurements of the experiments.

    A finding whose cause turns out to cost nothing (the upper end of its gain is below that of an `info`) becomes an
    `info`; causes that only an experiment can show are added if the lower end justifies a warning. A run is not called
    healthy if communication may cost that much.
    """
    findings = [_settled(item, gains[item.code]) if item.code in gains else item for item in judgement.findings]
    there = {item.code for item in findings}
    findings += [
        _shown(code, gains[code])
        for code in SEEN_BY_EXPERIMENT
        if code in gains and code not in there and gains[code].speedup.low >= GAINS["warning"]
    ]
    settled = with_findings(judgement, findings)
    unclear = gains.get("communication_bound")
    if settled.verdict == HEALTHY and unclear is not None and unclear.speedup.value >= GAINS["warning"]:
        note = (
            f"inconclusive: without communication steps are {unclear.speedup.low:.2f} to {unclear.speedup.high:.2f} "
            "times as fast, which may be nothing; give the experiments more time (budget_s) on a quieter machine"
        )
        return Diagnosis(INCONCLUSIVE, settled.findings, [*settled.notes, note])
    return settled


def severity_of_gain(gain: Interval[float]) -> str:
    """The severity of a measured gain, by its lower end."""
    return next((name for name, least in GAINS.items() if gain.low >= least), "info")


def _settled(finding: Finding, gain: ExperimentResult) -> Finding:
    cost = gain.cost or gain.speedup
    severity, share, evidence = finding.severity, finding.share, finding.evidence
    measured_share = max(0.0, 1 - 1 / cost.value)
    if finding.code == "communication_bound" and share is not None and measured_share < share:
        # The phase includes waiting for a slower rank, which no network setting removes.
        share, evidence = measured_share, {name: evidence[name] for name in evidence if name not in RULE_SHARE}
    if cost.high < GAINS["info"]:
        severity = "info"
    elif finding.code in SEEN_BY_EXPERIMENT:
        severity = severity_of_gain(cost)
    remedies = [item for item in finding.remedies if gain.refuted is None or item.knob != gain.refuted]
    if gain.remedy is not None:
        knob = gain.remedy.knob
        others = [item for item in remedies if item.knob != knob]
        remedies = [gain.remedy, *others] if gain.speedup.low > 1 else others
    if not remedies and gain.instead is not None:
        remedies = [gain.instead]
    worth = severity != "info"
    return Finding(
        finding.code,
        severity,
        share,
        {**evidence, **_evidence(gain)},
        remedies if worth else [],
        _expected(gain.speedup) if worth else None,
    )


def _shown(code: str, gain: ExperimentResult) -> Finding:
    remedy = gain.remedy or gain.instead
    return Finding(
        code,
        severity_of_gain(gain.speedup),
        max(0.0, 1 - 1 / gain.speedup.value),
        _evidence(gain),
        [] if remedy is None else [remedy],
        _expected(gain.speedup),
    )


def _evidence(gain: ExperimentResult) -> dict[str, Any]:
    found = {EXPERIMENT: gain.experiment, "measured_speedup": gain.speedup.value, **(gain.figures or {})}
    if gain.cost is not None:
        found["speedup_without_it"] = gain.cost.value
    return found


def _expected(gain: Interval[float]) -> ExpectedSpeedup:
    return ExpectedSpeedup(gain.value, gain.low, gain.high, "measured")
