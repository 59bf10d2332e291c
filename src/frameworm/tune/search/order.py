"""Which knob to try next: what the verdict names, then what promises the most gain for its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from frameworm.records.estimate import known
from frameworm.tune.knobs.base import ATTENTION, Candidate, Knob
from frameworm.tune.knobs.context import Context
from frameworm.tune.trials.outcomes import TrialResult

# Cost of an ordinary knob's trial on a machine about which nothing is known yet.
_LEAST_COST_S = 1.0
# On a scale, values beyond one that is slower than its neighbour by this factor are not tried,
_PAST_THE_PEAK = 0.97
# nor values on the other side of the current one, if speed increases towards it by this factor.
_UPHILL = 1.03


class Promise(NamedTuple):
    """Why a knob is next: its possible gain and the cost of finding out."""

    by_verdict: int  # 2: a remedy of the verdict names it, 1: the verdict suggests it
    gain: float
    why: str
    cost_s: float = _LEAST_COST_S
    usual_gain: float = 0.0

    @property
    def rank(self) -> tuple[int, float, float]:
        """Sort key, larger first: the verdict, then gain per second, then the usual gain of such a change."""
        return self.by_verdict, self.gain / self.cost_s, self.usual_gain


def cost_of(knob: Knob, values: int, trial_s: float, proof_s: float, later: int = 0) -> float:
    """Seconds until the effect of a knob is known.

    Args:
        knob: The knob.
        values: How many of its values would be tried.
        trial_s: Usual duration of a trial.
        proof_s: Usual duration of a proof.
        later: Values of other knobs that would be tried after it.
    """
    # Each trial and the proof pay its start-up cost again, and so do all later ones if it is kept.
    return max(_LEAST_COST_S, values * trial_s + proof_s + (values + 1 + later) * knob.setup_s)


def promise_of(
    knob: Knob,
    candidates: Sequence[Candidate],
    context: Context,
    result: TrialResult,
    cost_s: float = _LEAST_COST_S,
) -> Promise:
    """What a knob promises after a run.

    Args:
        knob: The knob.
        candidates: Its values here.
        context: The config that was run.
        result: The run.
        cost_s: See `cost_of`.
    """
    usual = knob.gain(context)
    best = Promise(0, usual, "usual gain", cost_s, usual)
    present = knob.position_of(context) if knob.ordered else None
    codes = knob.codes(context)
    for finding in result.findings:
        code = str(finding.get("code"))
        named = any(_names(remedy, candidates, present) for remedy in finding.get("remedies") or ())
        if not named and code not in codes:
            continue
        first = (2 if named else 1) if code == result.verdict else 0
        gain = max(best.gain, _gain_of(finding) * (1.0 if named else 0.5))
        if (first, gain) > (best.by_verdict, best.gain) or best.why == "usual gain":
            best = best._replace(by_verdict=max(first, best.by_verdict), gain=gain, why=code)
    if best.by_verdict == 0 and result.verdict in codes:
        best = best._replace(by_verdict=1, gain=max(best.gain, 1e-6), why=str(result.verdict))
    return best


def too_little_to_gain(knob: Knob, context: Context, result: TrialResult, least: float) -> str | None:
    """Why a knob cannot gain enough after a run, because what it shortens takes hardly any time; None if it can.

    Args:
        knob: The knob.
        context: The config that was run.
        result: The run.
        least: The least gain, as a fraction, that is worth a trial.
    """
    if knob.shortens == (ATTENTION,):
        return "the model has no attention that torch computes" if result.details.get("attention_share") == 0 else None
    phases = result.details.get("phases") or {}
    shares = [known((phases.get(name) or {}).get("share")) for name in knob.shortens]
    if (
        not knob.shortens
        or not phases
        or any(finding.get("code") in knob.codes(context) for finding in result.findings)
    ):
        return None
    share = sum(item for item in shares if item is not None)
    if share >= least:
        return None
    return f"{' and '.join(name.replace('_', ' ') for name in knob.shortens)} take {share:.1%} of a step"


def in_order(knob: Knob, candidates: Sequence[Candidate], context: Context, result: TrialResult) -> list[Candidate]:
    """Values of a knob in the order to try: those that remedies name first, then outwards from the current value."""
    remedies = [remedy for finding in result.findings for remedy in finding.get("remedies") or ()]
    present = knob.position_of(context) or 0.0

    def place(candidate: Candidate) -> tuple[bool, float, float]:
        named = any(candidate.changes.get(str(item.get("knob"))) == item.get("value") for item in remedies)
        distance = _distance(candidate.position, present) if knob.ordered else 0.0
        return (not named, distance, -candidate.position if knob.ordered else 0.0)

    return sorted(candidates, key=place)


def past_the_peak(position: float, present: float | None, screened: dict[float, float]) -> str | None:
    """Why a value is not worth trying, assuming a scale with one peak.

    Either a value between the current one and this one is already slower than its neighbour, or a value on the other
    side of the current one is faster.
    """
    if present is None:
        return None
    for item, figure in screened.items():
        if (item - present) * (position - present) < 0 and figure > _UPHILL:
            return f"{item:g} is faster, and lies in the other direction"
    side = [item for item in screened if (item - present) * (position - present) > 0]
    side = sorted(
        (item for item in side if abs(item - present) < abs(position - present)), key=lambda item: abs(item - present)
    )
    before = 1.0
    for item in side:
        if screened[item] < _PAST_THE_PEAK * before:
            return f"{item:g} is already slower"
        before = screened[item]
    return None


def _distance(one: float, other: float) -> float:
    """The ratio for large numbers, the difference for small ones."""
    large, small = max(one, other), min(one, other)
    return large / small if small > 0 else 1.0 + large - small


def _names(remedy: Mapping[str, Any], candidates: Sequence[Candidate], present: float | None) -> bool:
    """Whether a remedy names one of these values; on a scale, a value in the direction that it suggests."""
    named = [candidate for candidate in candidates if str(remedy.get("knob")) in candidate.changes]
    wanted = known(remedy.get("value"))
    if present is None or wanted is None:
        return bool(named)
    return any((candidate.position - present) * (wanted - present) > 0 for candidate in named)


def _gain_of(finding: Mapping[str, Any]) -> float:
    expected = finding.get("expected_speedup")
    value = known(expected.get("value")) if isinstance(expected, Mapping) else None
    if value is not None:
        return max(0.0, value - 1)
    share = known(finding.get("share"))
    return 0.0 if share is None else share / max(0.05, 1 - share)
