"""What the attempts so far say about a knob."""

from __future__ import annotations

from collections.abc import Sequence

from frameworm.tune.context import Context
from frameworm.tune.knobs import Candidate, Knob
from frameworm.tune.outcomes import TrialResult
from frameworm.tune.result import Attempt


def figure_of(knob: Knob, context: Context, attempts: Sequence[Attempt]) -> float:
    """How many times as fast a knob was alone; what it usually is, where it was not measured."""
    return max(figures_of(knob, attempts).values(), default=1 + knob.gain(context))


def figures_of(knob: Knob, attempts: Sequence[Attempt]) -> dict[str, float]:
    """How many times as fast the values of a knob were at best, by their labels."""
    found: dict[str, float] = {}
    for item in attempts:
        if item.knob == knob.name and item.screened:
            found[item.label] = max(item.screened, found.get(item.label, 0.0))
    return found


def is_asked_for(knob: Knob, context: Context, best: TrialResult, attempts: Sequence[Attempt]) -> bool:
    """Whether a knob gains something, or does not by itself, such as one that saves memory, and is needed here."""
    if knob.gain(context) > 0:
        return True
    codes = {str(finding.get("code")) for finding in best.findings}
    return bool(codes & set(knob.codes(context))) or any(item.failure == "oom" for item in attempts)


def only_gain_failed(attempt: Attempt) -> bool:
    """Whether a proof found nothing wrong but the gain."""
    assert attempt.proof is not None
    gain, *others = attempt.proof.checks
    return not gain.passed and all(check.passed is not False for check in others)


def was_checked(attempt: Attempt, candidate: Candidate) -> bool:
    """Whether a longer check of these changes, or of a part of them, did not end well."""
    if attempt.proof is None or attempt.proof.quality is None or attempt.status == "accepted":
        return False
    return attempt.changes.items() <= candidate.changes.items()
