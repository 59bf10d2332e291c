"""What a search never tried, with its reason."""

from __future__ import annotations

from collections.abc import Container, Iterable

from frameworm.tune.challenge import Challenge
from frameworm.tune.knobs import Knob
from frameworm.tune.result import Attempt


def list_skipped(knobs: Iterable[Knob], challenge: Challenge, tried: Container[str], why: str) -> None:
    """Write down everything that was never tried.

    Args:
        knobs: All there are.
        challenge: What was tried is written down there.
        tried: Names of the knobs that were turned.
        why: Why the search ended.
    """
    context = challenge.context
    for knob in knobs:
        refused = knob.why_not(context)
        for candidate in knob.candidates(context) if refused is None else ():
            reason = challenge.why_not(candidate, knob.setup_s)
            # Other values of a knob that was turned are slower, unless they were not even tried.
            if not challenge.has_tried(candidate) and (reason or not challenge.is_accepted(knob)):
                challenge.add(candidate, "skipped", reason or _unless_tried(why), "")
        if refused is not None and knob.name not in tried:
            challenge.result.attempts.append(Attempt(knob.name, knob.keys[0], {}, "skipped", refused))


def _unless_tried(why: str) -> str:
    return why if "budget" in why else "no finding asks for it"
