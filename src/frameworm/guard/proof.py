"""Whether a change makes training faster and leaves learning as it was: pure functions of what two sides measured."""

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
Mathematics = Literal["nothing", "rounding", "more"]

# What a change does to the numbers: orders and kernels of the same arithmetic, other precision, other samples or an
# approximation. Lock-step comparison decides on the first two, the quality check on the last.
ChangeClass = Literal["rounding", "precision", "approximation"]

MINIMUM_GAIN = 0.01


class StepEvidence(NamedTuple):
    """What went into one step, and its loss before the update.

    `samples` is anything that is equal for the same set of samples (a hash of their sorted ids); None: not known.
    """

    loss: float
    samples: str | int | None = None
    real_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Learning:
    """What one side trained on, and how.

    Attributes:
        steps: One entry per step.
        moved: Names of the parameters that these steps changed; None: not known.
    """

    steps: Sequence[StepEvidence]
    moved: frozenset[str] | None = None

    @property
    def losses(self) -> list[float]:
        """The loss curve."""
        return [step.loss for step in self.steps]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Learning of both sides.

    Attributes:
        baseline: The side before the change.
        candidate: The side after it.
        agreement: Both sides compared from the same states; None where the change is an approximation.
    """

    baseline: Learning
    candidate: Learning
    agreement: Agreement | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold; `passed` None: not known."""

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class Proof:
    """The verdict on a change, and what it rests on.

    Attributes:
        outputs: How well the sides agree, output by output, the least alike first.
        change: What the change does to the numbers.
        compared: What was compared in lock step; None: nothing was.
    """

    verdict: Verdict
    reason: str
    speedup: Speedup | None
    checks: list[Check] = field(default_factory=list)
    losses_before: list[float] = field(default_factory=list)
    losses_after: list[float] = field(default_factory=list)
    outputs: list[OutputAgreement] = field(default_factory=list)
    change: ChangeClass | None = None
    quality: Quality | None = None
    compared: Compared | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Proof:
        """The proof that `to_json` wrote."""
        speedup, quality, compared = (values.get(name) for name in ("speedup", "quality", "compared"))
        fields = {item.name for item in dataclass_fields(cls)}
        known = {
            **{key: value for key, value in values.items() if key in fields},
            "speedup": None if speedup is None else Speedup(**speedup),
            "quality": None if quality is None else Quality.from_json(quality),
            "compared": None if compared is None else Compared(**compared),
            "checks": [Check(**item) for item in values.get("checks", [])],
            "outputs": [OutputAgreement(*item) for item in values.get("outputs", [])],
        }
        return cls(**known)


def prove(
    windows: Sequence[Window],
    evidence: Evidence | None,
    *,
    mathematics: Mathematics = "rounding",
    minimum_gain: float = MINIMUM_GAIN,
    consent: bool = False,
    quality: Quality | None = None,
) -> Proof:
    """Decide whether a change is accepted.

    Args:
        windows: Interleaved windows in the order in which they were measured.
        evidence: How both sides learned; without it nothing is accepted.
        mathematics: What the change can do to the numbers. With `more` the sides cannot be compared step by step, and
            `consent` or `quality` is needed.
        minimum_gain: The least speedup, less one, that is worth a change.
        consent: The user allows changes of the mathematics (`--allow approximate`).
        quality: The result of a longer check.
    """
    speedup = speedup_of(windows)
    checks, outputs = _learning_checks(evidence, mathematics, consent, quality)
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
        _class_of(evidence, mathematics),
        quality,
        evidence.agreement.compared if evidence is not None and evidence.agreement is not None else None,
    )


def _class_of(evidence: Evidence | None, mathematics: Mathematics) -> ChangeClass | None:
    if mathematics == "more":
        return "approximation"
    if evidence is None or evidence.agreement is None:
        return None
    return "precision" if evidence.agreement.changes_precision else "rounding"


def with_quality(proof: Proof, passed: bool | None, detail: str, quality: Quality | None = None) -> Proof:
    """A proof of other mathematics with its open check of quality answered.

    Args:
        proof: What `prove` made without consent and without a longer check.
        passed: The answer.
        detail: What it rests on.
        quality: The longer check, where it is one that answers.
    """
    checks = [Check(item.name, passed, detail) if item.name == QUALITY else item for item in proof.checks]
    verdict, reason = _verdict(checks, quality is not None)
    return replace(proof, verdict=verdict, reason=reason, checks=checks, quality=quality)


def lacks_only_quality(proof: Proof) -> bool:
    """Whether a longer check would decide: all else that must hold is known to."""
    return proof.verdict == "inconclusive" and with_quality(proof, True, "", Quality((), (), 0)).verdict == "accepted"


QUALITY = "quality"
AGREEMENT = "agreement"


def _verdict(checks: Sequence[Check], longer: bool) -> tuple[Verdict, str]:
    """The verdict and its reason; the first check is the gain."""
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


def _vouched(name: str, checks: Sequence[Check], longer: bool) -> bool:
    """Whether something else vouches for what nobody counted.

    The same weights give the same gradients only for the same samples, so gradients that agree vouch for these. An
    approximation has no such gradients: there a longer check on as many samples vouches, and samples for their tokens.
    """
    if not any(check.name == QUALITY for check in checks):
        return name in ("samples", "real tokens")
    if longer:
        return name in ("samples", "real tokens")
    return name == "real tokens" and all(check.passed for check in checks if check.name == "samples")


def _gain_check(speedup: Speedup | None, minimum_gain: float) -> Check:
    if speedup is None:
        return Check("gain", None, "too few pairs of windows")
    shown = f"{speedup.value:.3f} x ({speedup.low:.3f}..{speedup.high:.3f})"
    if speedup.low > 1 and speedup.value >= 1 + minimum_gain:
        return Check("gain", True, f"{shown}, {speedup.pairs} pairs of windows")
    if speedup.high < 1 + minimum_gain:
        word = "slower" if speedup.high < 1 else "no gain"
        return Check("gain", False, f"{word}: {shown}")
    if speedup.low > 1:
        return Check("gain", False, f"less than {minimum_gain:.1%}: {shown}")
    return Check("gain", None, f"not outside the noise: {shown}")


def _learning_checks(
    evidence: Evidence | None, mathematics: Mathematics, consent: bool, quality: Quality | None
) -> tuple[list[Check], list[OutputAgreement]]:
    if evidence is None:
        return [Check("learning", None, "nothing is known about what was learned")], []
    checks = [_samples(evidence), _real_tokens(evidence)]
    if mathematics == "more":
        return [*checks, _parameters(evidence), _finite(evidence), _approximate(consent, quality)], []
    if evidence.agreement is None:
        return [*checks, Check(AGREEMENT, None, "the two sides were not compared from the same states")], []
    judged = judge_agreement(evidence.agreement)
    return [*checks, Check(AGREEMENT, judged.passed, judged.detail)], list(judged.outputs)


def _samples(evidence: Evidence) -> Check:
    return _same_per_step(evidence, "samples", [step.samples for step in evidence.baseline.steps], 0)


def _real_tokens(evidence: Evidence) -> Check:
    return _same_per_step(evidence, "real tokens", [step.real_tokens for step in evidence.baseline.steps], 1)


def _same_per_step(evidence: Evidence, name: str, before: Sequence[Any], which: int) -> Check:
    after = [(step.samples, step.real_tokens)[which] for step in evidence.candidate.steps]
    if len(before) != len(after):
        return Check(name, False, f"{len(after)} steps were made where the baseline made {len(before)}")
    for step, (one, other) in enumerate(zip(before, after)):
        if one is None or other is None:
            return Check(name, None, "not known")
        if one != other:
            told = f" ({other} instead of {one})" if which == 1 else ""
            return Check(name, False, f"step {step} did not take the same {name}{told}")
    return Check(name, True, f"the same in {len(before)} steps")


def _parameters(evidence: Evidence) -> Check:
    before, after = evidence.baseline.moved, evidence.candidate.moved
    if before is None or after is None:
        return Check("parameters", None, "not known")
    if before != after:
        still = sorted(before - after)
        name, other = (still or sorted(after - before))[0], len(before ^ after) - 1
        return Check("parameters", False, f"{name} is {'no longer' if still else 'now'} updated{_and_more(other)}")
    return Check("parameters", True, f"the same {len(before)} were updated")


def _and_more(count: int) -> str:
    return f", and {count} more" if count > 0 else ""


def _finite(evidence: Evidence) -> Check:
    before, after = evidence.baseline.losses, evidence.candidate.losses
    for step, (one, other) in enumerate(zip(before, after)):
        if math.isfinite(one) and not math.isfinite(other):
            return Check("loss", False, f"the loss of step {step} is not finite")
    return Check("loss", True, "finite; an approximation, so the curves are not compared step by step")


def _approximate(consent: bool, quality: Quality | None) -> Check:
    if quality is not None:
        judged = judge_quality(quality)
        return Check(QUALITY, judged.passed, judged.detail)
    if consent:
        return Check(QUALITY, True, "allowed by the user; what it costs in quality was not measured")
    return Check(QUALITY, None, "changes more than rounding: needs a quality check, or --allow approximate")
