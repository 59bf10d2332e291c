"""Proof that a change makes training faster without changing what is learned: pure functions of both sides' data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import Any, Literal, NamedTuple

from frameworm.guard.agreement import Agreement, Compared, OutputAgreement, judge_agreement
from frameworm.guard.gain import Speedup, Window, speedup_of
from frameworm.guard.quality import Quality, judge_quality

Verdict = Literal["accepted", "rejected", "inconclusive"]
NumericsEffect = Literal["nothing", "rounding", "more"]

# What a change does to the numbers: other orders or kernels of the same arithmetic; another precision; other samples or
# an approximation. Lock-step comparison decides on the first two, the quality check on the last.
ChangeClass = Literal["rounding", "precision", "approximation"]

MINIMUM_GAIN = 0.01


class StepEvidence(NamedTuple):
    """The inputs of one step, and its loss before the update.

    `samples` is any value that is equal for the same set of samples (a hash of their sorted ids); None if unknown.
    """

    loss: float
    samples: str | int | None = None
    real_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Learning:
    """What one side trained on, and with which result.

    Attributes:
        steps: One entry per step.
        moved: Names of the parameters that these steps changed; None if unknown.
    """

    steps: Sequence[StepEvidence]
    moved: frozenset[str] | None = None

    @property
    def losses(self) -> list[float]:
        """The loss curve."""
        return [step.loss for step in self.steps]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What both sides learned.

    Attributes:
        baseline: The side before the change.
        candidate: The side after it.
        agreement: Both sides compared from the same states; None if the change is an approximation.
    """

    baseline: Learning
    candidate: Learning
    agreement: Agreement | None = None


@dataclass(frozen=True, slots=True)
class ProofCheck:
    """One condition that must hold; `passed` is None if unknown."""

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class Proof:
    """The verdict on a change, and its evidence.

    Attributes:
        outputs: Agreement of the sides, output by output, the worst first.
        change: What the change does to the numbers.
        compared: What was compared in lock step; None if nothing was.
    """

    verdict: Verdict
    reason: str
    speedup: Speedup | None
    checks: list[ProofCheck] = field(default_factory=list)
    losses_before: list[float] = field(default_factory=list)
    losses_after: list[float] = field(default_factory=list)
    outputs: list[OutputAgreement] = field(default_factory=list)
    change: ChangeClass | None = None
    quality: Quality | None = None
    compared: Compared | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Proof:
        """Read the proof that `to_json` returned."""
        speedup, quality, compared = (values.get(name) for name in ("speedup", "quality", "compared"))
        fields = {item.name for item in dataclass_fields(cls)}
        known = {
            **{key: value for key, value in values.items() if key in fields},
            "speedup": None if speedup is None else Speedup(**speedup),
            "quality": None if quality is None else Quality.from_json(quality),
            "compared": None if compared is None else Compared(**compared),
            "checks": [ProofCheck(**item) for item in values.get("checks", [])],
            "outputs": [OutputAgreement(*item) for item in values.get("outputs", [])],
        }
        return cls(**known)


def prove(
    windows: Sequence[Window],
    evidence: Evidence | None,
    *,
    numerics_effect: NumericsEffect = "rounding",
    minimum_gain: float = MINIMUM_GAIN,
    consent: bool = False,
    quality: Quality | None = None,
) -> Proof:
    """Decide whether a change is accepted.

    Args:
        windows: Interleaved windows in the order of measurement.
        evidence: What both sides learned; without it nothing is accepted.
        numerics_effect: What the change can do to the numbers. With `more` the sides cannot be compared step by step,
            and `consent` or `quality` is needed.
        minimum_gain: Least speedup minus one that is worth a change.
        consent: The user allows changes of the numerics (`--allow approximate`).
        quality: The result of a quality check.
    """
    speedup = speedup_of(windows)
    checks, outputs = _learning_checks(evidence, numerics_effect, consent, quality)
    checks.insert(0, _gain_check(speedup, minimum_gain))
    verdict, reason = _verdict(checks, quality is not None)
    return Proof(
        verdict,
        reason,
        speedup,
        checks,
        evidence.baseline.losses if evidence else [],
        evidence.candidate.losses if evidence else [],
        outputs,
        _class_of(evidence, numerics_effect),
        quality,
        evidence.agreement.compared if evidence is not None and evidence.agreement is not None else None,
    )


def _class_of(evidence: Evidence | None, numerics_effect: NumericsEffect) -> ChangeClass | None:
    if numerics_effect == "more":
        return "approximation"
    if evidence is None or evidence.agreement is None:
        return None
    return "precision" if evidence.agreement.changes_precision else "rounding"


def with_quality(proof: Proof, passed: bool | None, detail: str, quality: Quality | None = None) -> Proof:
    """Return a proof of a change of numerics with its pending quality check decided.

    Args:
        proof: A proof made by `prove` without consent and without a quality check.
        passed: The result.
        detail: What it is based on.
        quality: The quality check, if one was run.
    """
    checks = [ProofCheck(item.name, passed, detail) if item.name == QUALITY else item for item in proof.checks]
    verdict, reason = _verdict(checks, quality is not None)
    return replace(proof, verdict=verdict, reason=reason, checks=checks, quality=quality)


def lacks_only_quality(proof: Proof) -> bool:
    """True if a quality check would decide, because everything else that must hold is known to."""
    return proof.verdict == "inconclusive" and with_quality(proof, True, "", Quality((), (), 0)).verdict == "accepted"


QUALITY = "quality"
AGREEMENT = "agreement"


def _verdict(checks: Sequence[ProofCheck], longer: bool) -> tuple[Verdict, str]:
    """Return the verdict and its reason; the first check is the gain."""
    gain = checks[0]
    broken = [check for check in checks[1:] if check.passed is False]
    unknown = [check for check in checks if check.passed is None and not _vouched(check.name, checks, longer)]
    if broken:
        return "rejected", "; ".join(f"{check.name}: {check.detail}" for check in broken)
    if gain.passed is False:
        return "rejected", gain.detail
    if unknown:
        return "inconclusive", "; ".join(f"{check.name}: {check.detail}" for check in unknown)
    return "accepted", gain.detail


def _vouched(name: str, checks: Sequence[ProofCheck], longer: bool) -> bool:
    """True if an unknown count is implied by another check.

    The same weights give the same gradients only for the same samples, so gradients that agree imply both counts. An
    approximation has no such gradients: there, a quality check on as many samples implies them, and equal samples imply
    equal tokens.
    """
    if not any(check.name == QUALITY for check in checks):
        return name in ("samples", "real tokens")
    if longer:
        return name in ("samples", "real tokens")
    return name == "real tokens" and all(check.passed for check in checks if check.name == "samples")


def _gain_check(speedup: Speedup | None, minimum_gain: float) -> ProofCheck:
    if speedup is None:
        return ProofCheck("gain", None, "too few pairs of windows")
    shown = f"{speedup.value:.3f} x ({speedup.low:.3f}..{speedup.high:.3f})"
    if speedup.low > 1 and speedup.value >= 1 + minimum_gain:
        return ProofCheck("gain", True, f"{shown}, {speedup.pairs} pairs of windows")
    if speedup.high < 1 + minimum_gain:
        word = "slower" if speedup.high < 1 else "no gain"
        return ProofCheck("gain", False, f"{word}: {shown}")
    if speedup.low > 1:
        return ProofCheck("gain", False, f"less than {minimum_gain:.1%}: {shown}")
    return ProofCheck("gain", None, f"not outside the noise: {shown}")


def _learning_checks(
    evidence: Evidence | None, numerics_effect: NumericsEffect, consent: bool, quality: Quality | None
) -> tuple[list[ProofCheck], list[OutputAgreement]]:
    if evidence is None:
        return [ProofCheck("learning", None, "what was learned is unknown")], []
    checks = [_samples(evidence), _real_tokens(evidence)]
    if numerics_effect == "more":
        return [*checks, _parameters(evidence), _finite(evidence), _approximate(consent, quality)], []
    if evidence.agreement is None:
        return [*checks, ProofCheck(AGREEMENT, None, "the two sides were not compared from the same states")], []
    judged = judge_agreement(evidence.agreement)
    return [*checks, ProofCheck(AGREEMENT, judged.passed, judged.detail)], list(judged.outputs)


def _samples(evidence: Evidence) -> ProofCheck:
    return _same_per_step(evidence, "samples", [step.samples for step in evidence.baseline.steps], 0)


def _real_tokens(evidence: Evidence) -> ProofCheck:
    return _same_per_step(evidence, "real tokens", [step.real_tokens for step in evidence.baseline.steps], 1)


def _same_per_step(evidence: Evidence, name: str, before: Sequence[Any], which: int) -> ProofCheck:
    after = [(step.samples, step.real_tokens)[which] for step in evidence.candidate.steps]
    if len(before) != len(after):
        return ProofCheck(name, False, f"{len(after)} steps were made where the baseline made {len(before)}")
    for step, (one, other) in enumerate(zip(before, after)):
        if one is None or other is None:
            return ProofCheck(name, None, "not known")
        if one != other:
            told = f" ({other} instead of {one})" if which == 1 else ""
            return ProofCheck(name, False, f"step {step} did not take the same {name}{told}")
    return ProofCheck(name, True, f"the same in {len(before)} steps")


def _parameters(evidence: Evidence) -> ProofCheck:
    before, after = evidence.baseline.moved, evidence.candidate.moved
    if before is None or after is None:
        return ProofCheck("parameters", None, "not known")
    if before != after:
        still = sorted(before - after)
        name, other = (still or sorted(after - before))[0], len(before ^ after) - 1
        return ProofCheck("parameters", False, f"{name} is {'no longer' if still else 'now'} updated{_and_more(other)}")
    return ProofCheck("parameters", True, f"the same {len(before)} were updated")


def _and_more(count: int) -> str:
    return f", and {count} more" if count > 0 else ""


def _finite(evidence: Evidence) -> ProofCheck:
    before, after = evidence.baseline.losses, evidence.candidate.losses
    for step, (one, other) in enumerate(zip(before, after)):
        if math.isfinite(one) and not math.isfinite(other):
            return ProofCheck("loss", False, f"the loss of step {step} is not finite")
    return ProofCheck("loss", True, "finite; an approximation, so the curves are not compared step by step")


def _approximate(consent: bool, quality: Quality | None) -> ProofCheck:
    if quality is not None:
        judged = judge_quality(quality)
        return ProofCheck(QUALITY, judged.passed, judged.detail)
    if consent:
        return ProofCheck(QUALITY, True, "allowed by the user; what it costs in quality was not measured")
    return ProofCheck(QUALITY, None, "changes more than rounding: needs a quality check, or --allow approximate")
