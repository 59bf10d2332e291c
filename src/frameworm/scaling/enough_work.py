"""How much work a step needs before more devices pay: a model of one step in three terms.

    step(n) = compute(samples per device) + rest + synchronisation

Compute is a straight line through its times at the base's and at the larger world's batch per device, so that costs
that do not shrink with the batch (launches, optimizer) are kept. Synchronisation is the exposed time, which stays the
same as long as the gradients have the same size; the rest grows with the batch. The lower estimate assumes that
backward hides nothing more, the upper one that two thirds of compute hide communication. All of it is modelled, not
measured: `frameworm predict` simulates buckets and networks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from frameworm.scaling.losses import ideal_share, share_of_threads
from frameworm.scaling.points import Point

SCALES = 0.7  # "good": the least efficiency worth proposing a change for
WORTH_TELLING = 0.5
LEAST_SPEEDUP = 1.1  # over the base; less does not justify more devices
LARGEST_FACTOR = 64
HIDDEN_BEHIND = 2 / 3  # of compute: the part that is backward


@dataclass(frozen=True, slots=True)
class StepModel:
    """A step of the base and of the larger world, in seconds, or in base steps if seconds are unknown."""

    base_step: float
    base_compute: float
    step: float
    compute: float
    synchronisation: float
    ideal: float
    growth: float  # ratio of the world sizes
    in_seconds: bool
    measured: bool  # synchronisation was measured, not inferred from the step times
    fewer_threads: bool = False  # a process has fewer threads than at the base, because processes divide the cores

    def efficiency(self, batch: float = 1.0, work: float = 1.0, volume: float = 1.0, hidden: float = 0.0) -> float:
        """Predict the efficiency of another configuration, relative to that configuration at the base.

        Args:
            batch: Factor on the batch of each device.
            work: Factor on the compute per sample.
            volume: Factor on the gradient bytes.
            hidden: Fraction of compute that hides communication.
        """
        before = work * self._base_compute(batch) + batch * (self.base_step - self.base_compute)
        return self.ideal * before / self.step_after(batch, work, volume, hidden)

    def step_after(self, batch: float = 1.0, work: float = 1.0, volume: float = 1.0, hidden: float = 0.0) -> float:
        """Predict the step time of the larger world; the arguments are those of `efficiency`."""
        compute = work * self._compute(batch)
        exposed = max(self.synchronisation * volume - hidden * compute, 0.0)
        return compute + batch * (self.step - self.compute - self.synchronisation) + exposed

    @property
    def shares_something(self) -> bool:
        """True if processes share cores or a device: fewer threads each, or part of the batch takes as long as all."""
        return self.fewer_threads or (self.ideal < 1.0 and self.compute >= self.base_compute)

    def _compute(self, batch: float) -> float:
        """Compute of one device of the larger world at a multiple of its batch."""
        return self.compute + self._slope() * (batch - 1)

    def _base_compute(self, batch: float) -> float:
        """The same for the base, at a multiple of its own batch."""
        if self.ideal >= 1.0 or self.shares_something:
            return self.base_compute * batch
        return self._compute(batch / self.ideal)

    def _slope(self) -> float:
        """Compute per additional batch of each device; if it cannot be determined, all of compute."""
        if self.ideal >= 1.0 or self.shares_something:
            return self.compute
        return min((self.base_compute - self.compute) / (1 / self.ideal - 1), self.compute)


@dataclass(frozen=True, slots=True)
class Change:
    """Settings that are predicted to scale, by the model of this module."""

    settings: Mapping[str, Any]  # knob: value; empty if the config is unknown
    world_size: int
    work_factor: float  # how much more compute each device has per step
    efficiency: float
    speedup: float  # over the base with the same changed settings
    gain: float  # ratio of samples per second to the current ones, at the same world size
    gain_high: float  # if backward hides as much as it can
    text: str
    basis: str = "modelled"


def model_step(base: Point, point: Point, speedup: float) -> StepModel:
    """Model a pair of world sizes.

    Args:
        base: The smaller world.
        point: The larger one.
        speedup: Measured speedup of `point` over `base`.
    """
    ideal, growth = ideal_share(base, point), point.world_size / base.world_size
    base_step = _step_s(base)
    unit = base_step or 1.0
    step = ideal * unit * growth / speedup
    base_compute = base.mean("compute_s") if base_step else None
    base_compute = min(base_compute or unit, unit)
    compute = point.mean("compute_s") if base_step else None
    exposed = point.mean("exposed_s") if base_step else None
    if compute is None:
        compute = ideal * base_compute if exposed is None else step - exposed
    compute = min(compute, step)
    rest = max(step - compute, 0.0)
    # If synchronisation was not measured, it is what the step takes beyond compute and its part of the base's other
    # time.
    inferred = max(rest - ideal * (unit - base_compute), 0.0)
    synchronisation = inferred if exposed is None else min(exposed, rest)
    return StepModel(
        unit, base_compute, step, compute, synchronisation, ideal, growth, base_step is not None, exposed is not None,
        share_of_threads(base, point) < 1.0,
    )  # fmt: skip


def _step_s(point: Point) -> float | None:
    if point.global_batch:
        costs = [run.epoch_s / run.epoch_samples for run in point.measurements if run.epoch_s and run.epoch_samples]
        if costs:
            return math.fsum(costs) / len(costs) * point.global_batch
    return point.mean("step_s")


def suggest_change(base: Point, point: Point, speedup: float) -> Change | None:
    """Return the smallest batch that is predicted to scale; None if no batch is.

    Args:
        base: The smaller world.
        point: The larger one.
        speedup: Measured speedup of `point` over `base`.
    """
    model = model_step(base, point, speedup)
    best: tuple[float, int] | None = None
    factor = 2
    while factor <= LARGEST_FACTOR:
        efficiency = model.efficiency(factor)
        if best is None or efficiency > best[0]:
            best = (efficiency, factor)
        if efficiency >= SCALES:
            break
        factor *= 2
    if best is None or best[0] < WORTH_TELLING:
        return None
    change = _batch_change(model, point, best[1])
    return change if change.speedup >= LEAST_SPEEDUP else None


def _batch_change(model: StepModel, point: Point, factor: int) -> Change:
    settings: dict[str, Any] = {}
    what = f"{factor} times the work per device and step"
    if point.global_batch is not None:
        settings["training.global_batch"] = factor * point.global_batch
        what = f"training.global_batch {factor * point.global_batch} instead of {point.global_batch}"
    elif point.micro_batch is not None:
        settings["training.micro_batch"] = factor * point.micro_batch
        what = f"training.micro_batch {factor * point.micro_batch} instead of {point.micro_batch}"
    return describe_change(model, point, settings, what + ", with lr to match", batch=factor)


def larger_model(point: Point) -> tuple[dict[str, Any], float, float] | None:
    """Double width, heads and layers: return the settings, and the factors on compute and on gradients.

    Embeddings are sent but involve hardly any compute, so gradients grow less than compute. None if the config's model
    section is unknown.
    """
    model = point.model
    width, layers = model.get("d_model"), model.get("num_layers")
    if not isinstance(width, int) or not isinstance(layers, int) or not point.parameters:
        return None
    inner = model.get("dim_feedforward")
    inner = inner if isinstance(inner, int) else 4 * width
    settings: dict[str, Any] = {"model.d_model": 2 * width, "model.num_layers": 2 * layers}
    if isinstance(model.get("n_heads"), int):
        settings["model.n_heads"] = 2 * model["n_heads"]
    if "dim_feedforward" in model:
        settings["model.dim_feedforward"] = 8 * width if inner < 4 * width else 2 * inner
    wider = settings.get("model.dim_feedforward", 2 * inner)
    now = layers * (4 * width * width + 2 * width * inner)
    then = 2 * layers * (16 * width * width + 4 * width * wider)
    embeddings = max(point.parameters - now, 0)
    return settings, then / now, (2 * embeddings + then) / point.parameters


def describe_change(
    model: StepModel,
    point: Point,
    settings: Mapping[str, Any],
    what: str,
    *,
    batch: float = 1.0,
    work: float = 1.0,
    volume: float = 1.0,
) -> Change:
    """Return a change with the model's prediction for it."""
    efficiency = model.efficiency(batch, work, volume)
    speedup = efficiency * model.growth
    gain = model.step * batch / model.step_after(batch, work, volume)
    gain_high = model.step * batch / model.step_after(batch, work, volume, HIDDEN_BEHIND)
    text = (
        f"{what}: predicted to run {speedup:.2g} times as fast on {point.world_size} as on "
        f"{round(point.world_size / model.growth)} (efficiency {efficiency:.0%}, modelled)"
    )
    return Change(dict(settings), point.world_size, batch * work, efficiency, speedup, gain, max(gain, gain_high), text)
