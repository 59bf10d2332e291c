"""Whether a change makes training faster and leaves learning as it was: pure functions of what two sides measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from frameworm.guard.drift import check_losses
from frameworm.guard.gain import Speedup, Window, speedup_of
from frameworm.records.estimate import quantile

Verdict = Literal["accepted", "rejected", "inconclusive"]
Mathematics = Literal["nothing", "rounding", "more"]

MINIMUM_GAIN = 0.01
# Norms of updates that rounding may change; optimizers divide by noisy gradients, which is why this is no small number.
_UPDATE_RATIO = 1.25
_WORSE_QUALITY = 0.01


class StepEvidence(NamedTuple):
    """What went into one step, and its loss before the update.

    `samples` is anything that is equal for the same set of samples (a hash of their sorted ids); None: not known.
    """

    loss: float
    samples: str | int | None = None
    real_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Learning:
    """How one side learned from the common weights and seed.

    Attributes:
        steps: One entry per step.
        updates: Name of each trainable parameter and the norm of its change over these steps; None: not known.
    """

    steps: Sequence[StepEvidence]
    updates: Mapping[str, float] | None = None

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
        references: The baseline again, from weights moved by `unit`; see `guard.drift`. Two are better than one.
        unit: Unit of rounding of the coarser precision of both sides, from `guard.drift.ROUNDING_UNITS`.
    """

    baseline: Learning
    candidate: Learning
    references: Sequence[Learning] = ()
    unit: float = 2.0**-24


@dataclass(frozen=True, slots=True)
class Quality:
    """A longer check: one figure per seed (lower is better), both sides with the same seeds in the same order."""

    baseline: Sequence[float]
    candidate: Sequence[float]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold; `passed` None: not known."""

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class Proof:
    """The verdict on a change, and what it rests on."""

    verdict: Verdict
    reason: str
    speedup: Speedup | None
    checks: list[Check] = field(default_factory=list)
    losses_before: list[float] = field(default_factory=list)
    losses_after: list[float] = field(default_factory=list)
    allowed_drift: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Proof:
        """The proof that `to_json` wrote."""
        speedup = values.get("speedup")
        known = {
            **values,
            "speedup": None if speedup is None else Speedup(**speedup),
            "checks": [Check(**item) for item in values.get("checks", [])],
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
        mathematics: What the change can do to the numbers. With `more` the loss curves are not compared, and `consent`
            or `quality` is needed.
        minimum_gain: The least speedup, less one, that is worth a change.
        consent: The user allows changes of the mathematics (`--allow approximate`).
        quality: The result of a longer check.
    """
    speedup = speedup_of(windows)
    checks, allowed = _learning_checks(evidence, mathematics, consent, quality)
    gain = _gain_check(speedup, minimum_gain)
    checks.insert(0, gain)
    broken = [check for check in checks[1:] if check.passed is False]
    vouched = _MAY_BE_UNKNOWN if mathematics != "more" else ()
    unknown = [check for check in checks if check.passed is None and check.name not in vouched]
    verdict: Verdict
    if broken:
        verdict, reason = "rejected", "; ".join(f"{check.name}: {check.detail}" for check in broken)
    elif gain.passed is False:
        verdict, reason = "rejected", gain.detail
    elif unknown:
        verdict, reason = "inconclusive", "; ".join(f"{check.name}: {check.detail}" for check in unknown)
    else:
        verdict, reason = "accepted", gain.detail
    return Proof(
        verdict,
        reason,
        speedup,
        checks,
        evidence.baseline.losses if evidence else [],
        evidence.candidate.losses if evidence else [],
        allowed,
    )


# The same weights give the same loss to rounding only for the same samples: the curves vouch for what nobody counted.
_MAY_BE_UNKNOWN = ("samples", "real tokens", "parameters")


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
) -> tuple[list[Check], list[float]]:
    if evidence is None:
        return [Check("learning", None, "nothing is known about what was learned")], []
    checks = [_samples(evidence), _real_tokens(evidence), _parameters(evidence)]
    if mathematics == "more":
        return [*checks, _finite(evidence), _approximate(consent, quality)], []
    losses = check_losses(
        evidence.baseline.losses,
        evidence.candidate.losses,
        [item.losses for item in evidence.references],
        evidence.unit,
    )
    return [*checks, Check("loss", losses.passed, losses.detail)], losses.allowed


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
    before, after = evidence.baseline.updates, evidence.candidate.updates
    if before is None or after is None:
        return Check("parameters", None, "not known")
    if set(before) != set(after):
        named = sorted(set(before) ^ set(after))
        return Check("parameters", False, f"only one side has {named[0]}{_and_more(len(named) - 1)}")
    far = [name for name in before if not _alike(name, before[name], after[name], evidence.references)]
    if not far:
        return Check("parameters", True, f"the same {len(before)} were updated")
    name = far[0]
    what = "is no longer updated" if after[name] == 0 else f"moved by {after[name]:.3g} instead of {before[name]:.3g}"
    return Check("parameters", False, f"{name} {what}{_and_more(len(far) - 1)}")


def _alike(name: str, before: float, after: float, references: Sequence[Learning]) -> bool:
    """Whether two updates are of one size, or as unlike as the baseline's own are after a push by rounding.

    A parameter without a gradient of its own, such as the bias of attention's keys, is moved by rounding alone.
    """
    usual = [_times(before, item.updates[name]) for item in references if item.updates and name in item.updates]
    return _times(before, after) <= max(_UPDATE_RATIO, *(1 + 2 * (item - 1) for item in usual), 0.0)


def _times(one: float, other: float) -> float:
    """How many times as large the larger is."""
    if one == other:
        return 1.0
    small, large = sorted((abs(one), abs(other)))
    return large / small if small > 0 and math.isfinite(large) else math.inf


def _and_more(count: int) -> str:
    return f", and {count} more" if count > 0 else ""


def _finite(evidence: Evidence) -> Check:
    before, after = evidence.baseline.losses, evidence.candidate.losses
    for step, (one, other) in enumerate(zip(before, after)):
        if math.isfinite(one) and not math.isfinite(other):
            return Check("loss", False, f"the loss of step {step} is not finite")
    return Check("loss", True, "finite; other mathematics, so the curves are not compared step by step")


def _approximate(consent: bool, quality: Quality | None) -> Check:
    name = "quality"
    if quality is not None:
        return _not_worse(name, quality)
    if consent:
        return Check(name, True, "allowed by the user; what it costs in quality was not measured")
    return Check(name, False, "changes more than rounding: needs --allow approximate")


def _not_worse(name: str, quality: Quality) -> Check:
    """Not worse than the baseline by more than a margin, as sure as the seeds allow."""
    pairs = [(one, other) for one, other in zip(quality.baseline, quality.candidate) if math.isfinite(one)]
    if any(not math.isfinite(other) for _, other in pairs):
        return Check(name, False, "a longer run ended with a loss that is not finite")
    if len(pairs) < 3:
        return Check(name, None, "a longer check needs three seeds")
    worse = [other - one for one, other in pairs]
    mean = math.fsum(worse) / len(worse)
    spread = math.sqrt(math.fsum((item - mean) ** 2 for item in worse) / (len(worse) - 1) / len(worse))
    margin = _WORSE_QUALITY * math.fsum(abs(one) for one, _ in pairs) / len(pairs)
    most = quantile(len(worse) - 1) * spread
    shown = f"{mean:+.4g} (at most {mean + most:+.4g}; {margin:.4g} is allowed), {len(pairs)} seeds"
    if mean + most <= margin:
        return Check(name, True, shown)
    return Check(name, False if mean - most > margin else None, shown)
