"""Which knob is turned next: what the verdict names, then what promises most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from frameworm.records.estimate import known
from frameworm.tune.context import Context
from frameworm.tune.knobs import Candidate, Knob
from frameworm.tune.outcomes import TrialResult


class Promise(NamedTuple):
    """Why a knob is next; larger is sooner."""

    by_verdict: int  # 2: a remedy of the verdict names it, 1: the verdict suggests it
    gain: float
    why: str


def promise_of(knob: Knob, candidates: Sequence[Candidate], context: Context, result: TrialResult) -> Promise:
    """What a knob promises after a run.

    Args:
        knob: The knob.
        candidates: Its values here.
        context: The config that was run.
        result: The run.
    """
    best = Promise(0, knob.gain(context), "usual gain")
    for finding in result.findings:
        code = str(finding.get("code"))
        named = any(_names(remedy, candidates) for remedy in finding.get("remedies") or ())
        if not named and code not in knob.suggested_by:
            continue
        first = (2 if named else 1) if code == result.verdict else 0
        gain = max(best.gain, _gain_of(finding) * (1.0 if named else 0.5))
        if (first, gain) > (best.by_verdict, best.gain) or best.why == "usual gain":
            best = Promise(max(first, best.by_verdict), gain, code)
    if best.by_verdict == 0 and result.verdict in knob.suggested_by:
        best = Promise(1, max(best.gain, 1e-6), str(result.verdict))
    return best


def in_order(knob: Knob, candidates: Sequence[Candidate], context: Context, result: TrialResult) -> list[Candidate]:
    """Values of a knob as they should be tried: what remedies name first, then from the present value outwards."""
    remedies = [remedy for finding in result.findings for remedy in finding.get("remedies") or ()]
    present = knob.position_of(context) or 0.0

    def place(candidate: Candidate) -> tuple[bool, float, float]:
        named = any(candidate.changes.get(str(item.get("knob"))) == item.get("value") for item in remedies)
        distance = _distance(candidate.position, present) if knob.ordered else 0.0
        return (not named, distance, -candidate.position if knob.ordered else 0.0)

    return sorted(candidates, key=place)


def _distance(one: float, other: float) -> float:
    """Factors for large numbers, steps for small ones."""
    large, small = max(one, other), min(one, other)
    return large / small if small > 0 else 1.0 + large - small


def _names(remedy: Mapping[str, Any], candidates: Sequence[Candidate]) -> bool:
    return any(str(remedy.get("knob")) in candidate.changes for candidate in candidates)


def _gain_of(finding: Mapping[str, Any]) -> float:
    expected = finding.get("expected_speedup")
    value = known(expected.get("value")) if isinstance(expected, Mapping) else None
    if value is not None:
        return max(0.0, value - 1)
    share = known(finding.get("share"))
    return 0.0 if share is None else share / max(0.05, 1 - share)
