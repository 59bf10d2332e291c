"""What a script's own code between the phases costs, and where in it, from samples of where the script was.

How long the script was in no phase is measured by the clock, or on a GPU by the device, for which time that it hides
is none. The samples only divide that time. Writing is output wherever it stands. Other work counts if it is at few
places, takes more than the glue of a loop does, and cannot be a phase that was not seen: a loop without a `DataLoader`
makes its batches in its own code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from frameworm.diagnose.estimate import Estimate, known
from frameworm.records.observations import OtherTime, Place
from frameworm.records.schema import RunRecord

WRITING, COMPUTING = "writing", "computing"
FEWEST_SAMPLES = 10
# Samples in one stay at a place resemble each other.
CORRELATION = 2.0
FEW_PLACES, CONCENTRATED = 3, 0.5
SHORTEST_WORK_S = 2e-3
NEEDED = ("data_wait", "forward", "backward", "optimizer")

_DOES = {
    WRITING: "writes output",
    COMPUTING: "computes",
    "preparing": "prepares batches",
    "waiting": "waits",
    "library": "is in a library",
}


def work_share(record: RunRecord, phases: Mapping[str, Estimate]) -> Estimate | None:
    """Share of the step that goes to writing and to work of the script that is no training; None when unknown."""
    other, seen = phases.get("other"), sampled(record)
    if other is None or seen is None:
        return None
    counted = sum(seen.work.get(work, 0) for work in _judged(record, seen))
    part = counted / seen.samples
    # One sample more of each kind: that none was seen does not mean that there is none.
    likely = (counted + 1) / (seen.samples + 2)
    error = math.sqrt(likely * (1 - likely) * CORRELATION / seen.samples)
    return other.scaled(part).plus(Estimate(0.0, other.value * error)) if counted else None


def places_of_work(record: RunRecord) -> list[Place]:
    """The places that `work_share` counts, those with most samples first."""
    seen = sampled(record)
    return [] if seen is None else [place for place in seen.places if place.work in _judged(record, seen)]


def sampled(record: RunRecord) -> OtherTime | None:
    """The samples, if they are enough to say anything."""
    seen = record.other_time
    return seen if seen is not None and seen.samples >= FEWEST_SAMPLES else None


def top_place(record: RunRecord) -> str | None:
    """Where a script was seen most while in no phase, in words."""
    seen = sampled(record)
    if seen is None or not seen.places:
        return None
    place = seen.places[0]
    return (
        f"{place.samples / seen.samples:.0%} of that at {place_text(place)}, which {_DOES.get(place.work, place.work)}"
    )


def place_text(place: Place) -> str:
    """File, line and function."""
    inside = "" if place.function == "<module>" else f" in {place.function}"
    return f"{place.file}:{place.line}{inside}"


def _judged(record: RunRecord, seen: OtherTime) -> list[str]:
    return [WRITING, COMPUTING] if _is_work(record, seen) else [WRITING]


def _is_work(record: RunRecord, seen: OtherTime) -> bool:
    """Whether what the script computes outside of the phases is a thing of its own."""
    total = seen.work.get(COMPUTING, 0)
    if not total or any(name in (record.unseen or []) for name in NEEDED):
        return False
    few = [place.samples for place in seen.places if place.work == COMPUTING][:FEW_PLACES]
    phase = (record.phases or {}).get("other")
    other_s = known(phase.mean_s) if phase is not None else None
    work_s = None if other_s is None else other_s * total / seen.samples
    return sum(few) >= CONCENTRATED * total and work_s is not None and work_s >= SHORTEST_WORK_S
