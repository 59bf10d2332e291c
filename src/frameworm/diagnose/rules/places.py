"""What a script's own code outside the phases costs and where it is, from samples of the script's position.

The time outside all phases is measured by the clock, or on a GPU by the device, where time that the device hides counts
as zero. The samples only divide that time. Writing output always counts. Other work counts only if it is concentrated
in few places, takes longer than the glue code of a loop, and cannot be an unobserved phase: a loop without a
`DataLoader` makes its batches in its own code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from frameworm.records.estimate import Estimate, clamp, known
from frameworm.records.observations import Place
from frameworm.records.schema import RunRecord

WRITING, COMPUTING = "writing", "computing"
FEWEST_SAMPLES = 10
# Consecutive samples at one place are correlated.
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
    """Fraction of the step spent on writing and on work of the script other than training; None if unknown."""
    other, total = phases.get("other"), samples_of(record)
    if other is None or total is None:
        return None
    counted = min(sum(_of_work(record, work) for work in _judged(record, total)), total)
    # Assume one more sample of each kind, because seeing none does not prove that there is none.
    likely = (counted + 1) / (total + 2)
    error = math.sqrt(likely * (1 - likely) * CORRELATION / total)
    return other.scaled(counted / total).plus(Estimate(0.0, other.value * error)) if counted else None


def places_of_work(record: RunRecord) -> list[Place]:
    """Return the places that `work_share` counts, those with most samples first."""
    total = samples_of(record)
    if total is None or record.other_time is None:
        return []
    judged = _judged(record, total)
    return [place for place in record.other_time.places or [] if place.work in judged]


def samples_of(record: RunRecord) -> int | None:
    """Return the number of samples, or None if there are too few to tell anything."""
    total = _count(record.other_time.samples) if record.other_time is not None else 0
    return total if total >= FEWEST_SAMPLES else None


def top_place(record: RunRecord) -> str | None:
    """Describe where a script was sampled most often outside the phases."""
    total = samples_of(record)
    if total is None or record.other_time is None or not record.other_time.places:
        return None
    place = record.other_time.places[0]
    part = clamp(_count(place.samples) / total)
    return f"{part:.0%} of that at {place_text(place)}, which {_DOES.get(place.work, place.work)}"


def place_text(place: Place) -> str:
    """Format file, line and function."""
    inside = "" if place.function == "<module>" else f" in {place.function}"
    return f"{place.file}:{place.line}{inside}"


def _judged(record: RunRecord, total: int) -> list[str]:
    return [WRITING, COMPUTING] if _is_work(record, total) else [WRITING]


def _is_work(record: RunRecord, total: int) -> bool:
    """True if what the script computes outside the phases is separate work, not just glue code."""
    computing = _of_work(record, COMPUTING)
    if not computing or record.other_time is None or any(name in (record.unseen or []) for name in NEEDED):
        return False
    places = [_count(place.samples) for place in record.other_time.places or [] if place.work == COMPUTING]
    phase = (record.phases or {}).get("other")
    other_s = known(phase.mean_s) if phase is not None else None
    long = other_s is not None and other_s * computing / total >= SHORTEST_WORK_S
    return long and sum(places[:FEW_PLACES]) >= CONCENTRATED * computing


def _of_work(record: RunRecord, work: str) -> int:
    return 0 if record.other_time is None else _count((record.other_time.work or {}).get(work))


def _count(value: object) -> int:
    return max(int(known(value) or 0), 0)
