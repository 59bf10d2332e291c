"""Changes whose trials left in doubt whether they gain, and whose proofs were too dear: time may be left at the end."""

from __future__ import annotations

from collections.abc import Mapping

from frameworm.tune.challenge import Challenge
from frameworm.tune.knobs import Candidate, Knob
from frameworm.tune.result import Attempt


def settle_doubts(challenge: Challenge, knobs: Mapping[str, Knob]) -> None:
    """Prove them after all, the most promising first, while there is time for it beside the proof of the whole."""
    left = [item for item in challenge.result.attempts if _is_doubtful(item)]
    for item in sorted(left, key=lambda item: -(item.screened or 0.0)):
        candidate = _candidate(item, challenge, knobs)
        ledger = challenge.ledger
        proof_s = max(ledger.usual_s("proof"), ledger.proof_s(item.trial))
        if candidate is None or not ledger.has_room(ledger.usual_s("trial") + proof_s, 1):
            continue
        challenge.result.attempts.remove(item)
        attempt, trial = challenge.screen(candidate, item.why)  # known, unless others were accepted since
        if attempt.status == "inconclusive":
            challenge.prove(attempt, candidate, trial, at_once=True)


def _is_doubtful(item: Attempt) -> bool:
    return item.status == "inconclusive" and item.gain is not None and item.proof is None


def _candidate(item: Attempt, challenge: Challenge, knobs: Mapping[str, Knob]) -> Candidate | None:
    """What was attempted, if it is still worth it."""
    knob = knobs.get(item.knob)
    if knob is None or challenge.is_accepted(knob) or knob.why_not(challenge.context) is not None:
        return None
    found = [one for one in knob.candidates(challenge.context) if dict(one.changes) == item.changes]
    return next((one for one in found if challenge.why_not(one, knob.setup_s) is None), None)
