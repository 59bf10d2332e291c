"""Where efficiency is lost: what a step on many devices takes beyond its ideal time, by cause.

On n devices a step should take the base's time multiplied by `ideal` (base / n if the devices divide one batch, 1 if
each has its own). The excess, as a fraction of the step, is exactly the lost efficiency:

    1 - efficiency = (step - ideal * base step) / step

Each cause is its own seconds at n minus its ideal part of the base's. What no cause explains is `other`, so that the
parts always add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from frameworm.scaling.points import Point


@dataclass(frozen=True, slots=True)
class Losses:
    """Lost fractions of the step, adding up to `total` = 1 - efficiency; None if not measured.

    A negative part is a gain: more devices read data faster, or their part of the work fits a closer cache.
    """

    total: float
    communication: float | None  # exposed, without waiting for later ranks
    stragglers: float | None
    input: float | None  # waiting for batches and their transfer
    smaller_batch: float | None  # compute that shrinks less than the batch per device
    other: float

    @property
    def parts(self) -> dict[str, float | None]:
        """The parts by name, in the order of display."""
        return {
            "communication": self.communication,
            "stragglers": self.stragglers,
            "input": self.input,
            "smaller_batch": self.smaller_batch,
            "other": self.other,
        }

    @property
    def largest(self) -> str | None:
        """The part that costs most; None if nothing is lost."""
        known_parts = {name: part for name, part in self.parts.items() if part is not None and part > 0}
        return max(known_parts, key=lambda name: known_parts[name], default=None)


def split_losses(base: Point, point: Point, efficiency: float, step_s: float | None) -> Losses:
    """Split the loss between the base and a larger world by cause.

    Args:
        base: The smallest world size.
        point: The world size to analyse.
        efficiency: Efficiency of `point` relative to `base`.
        step_s: Seconds of a step at `point`, by the same clock as `efficiency`.
    """
    total = 1.0 - efficiency
    if not step_s:
        return Losses(total, None, None, None, None, total)
    ideal = ideal_share(base, point)

    def lost(now: float | None, before: float | None) -> float | None:
        return None if now is None or before is None else (now - ideal * before) / step_s

    communication = lost(_sent(point), _sent(base))
    stragglers = lost(_waited(point), _waited(base))
    waits = lost(_input(point), _input(base))
    smaller = _smaller_batch(base, point, ideal, step_s)
    seen = [part for part in (communication, stragglers, waits, smaller) if part is not None]
    return Losses(total, communication, stragglers, waits, smaller, math.fsum([total, *(-part for part in seen)]))


def ideal_share(base: Point, point: Point) -> float:
    """Ratio of the step times of `point` and `base` if nothing is lost."""
    if base.device_batch is not None and point.device_batch is not None:
        return point.device_batch / base.device_batch
    return base.world_size / point.world_size if point.mode == "strong" else 1.0


def _sent(point: Point) -> float | None:
    """Exposed communication without waiting for later ranks; an unknown wait is included."""
    exposed = point.mean("exposed_s")
    if exposed is None:
        return 0.0 if point.world_size == 1 else None
    return exposed - (point.mean("rank_wait_s") or 0.0)


def _waited(point: Point) -> float | None:
    return 0.0 if point.world_size == 1 else point.mean("rank_wait_s")


def _input(point: Point) -> float | None:
    wait = point.mean("data_wait_s")
    if wait is None:
        wait = point.phase("data_wait")
    return None if wait is None else wait + (point.phase("transfer") or 0.0)


def _smaller_batch(base: Point, point: Point, ideal: float, step_s: float) -> float | None:
    """Loss because launches, small matrix products and the optimizer do not shrink with the batch.

    A smaller batch never takes longer than the whole one, so what compute takes beyond the base's has another cause,
    such as processes that share cores, and stays in `other`. The same holds for a CPU process with fewer threads than
    the base.
    """
    now, before = point.mean("compute_s"), base.mean("compute_s")
    if now is None or before is None:
        return None
    if ideal >= 1.0:
        return 0.0
    fair = min(ideal / share_of_threads(base, point), 1.0) * before
    return max(min(now, before) - fair, 0.0) / step_s


def share_of_threads(base: Point, point: Point) -> float:
    """Ratio of threads per process to the base's: below 1 if processes on CPUs divide the cores."""
    if not base.threads or not point.threads:
        return 1.0
    return min(point.threads / base.threads, 1.0)
