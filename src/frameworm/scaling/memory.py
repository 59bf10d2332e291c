"""What fits in memory: savings per ZeRO stage, the largest micro-batch, and the cheapest change that makes it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from frameworm.errors import ConfigError
from frameworm.records.printable import Shown
from frameworm.scaling.memory_model import (
    CHECKPOINTING,
    CheckpointingName,
    MemoryPlan,
    Peak,
    Setting,
    StepMemory,
    StrategyName,
    capacity,
    plan_step,
)
from frameworm.scaling.memory_shapes import ModelShapes

LARGEST_MICRO_BATCH = 2**20
SHARDED: tuple[StrategyName, ...] = ("zero1", "zero2", "zero3")

PlanFor = Callable[[Setting], MemoryPlan]

_CHANGED = ("micro_batch", "checkpointing", "strategy")
_COSTS = {
    "selective": "elementwise work of each layer is done twice, matrix products and attention are not",
    "full": "the forward pass of each layer is done twice: about a third more compute",
    "zero1": "updated parameters are sent to all ranks after each step; gradients travel as in ddp",
    "zero2": "parameters are gathered once per step and gradients scattered: as many bytes as ddp, less hidden",
    "zero3": "parameters are gathered in forward and again in backward: half as many bytes again as ddp",
}


MOST_PARAMETERS = 1e18  # a hundred thousand times as many as the largest models have


def calculate_zero_savings(num_params: float, world_size: int) -> dict[str, dict[str, float]]:
    """Return bytes per device of parameters, gradients and Adam's state, by ZeRO stage, without activations.

    As in the ZeRO paper: sharded tensors are divided evenly, and nothing is gathered. `frameworm memory --config` plans
    a real run, including everything that this library's strategies hold.

    Args:
        num_params: Number of parameters of the model.
        world_size: Number of devices they are sharded over.

    Returns:
        `fp32` (4 + 4 + 8 bytes per parameter) and `mixed` (half-precision parameters and gradients; master weights and
        state in fp32: 2 + 2 + 12), each with `ddp`, `zero1`, `zero2` and `zero3`.

    Raises:
        ConfigError: The number of parameters is not positive or too large for any model, or there are no devices.
    """
    if not 0 < num_params <= MOST_PARAMETERS:
        raise ConfigError(
            f"num_params {num_params:g} is not a number of parameters that a model has; give one such as 7e9"
        )
    if world_size < 1:
        raise ConfigError(f"world_size {world_size} is not a number of devices; give at least 1")
    return {
        "fp32": _stages(num_params, world_size, 4, 4, 8),
        "mixed": _stages(num_params, world_size, 2, 2, 12),
    }


def _stages(num_params: float, world_size: int, weights: int, gradients: int, state: int) -> dict[str, float]:
    return {
        "ddp": num_params * (weights + gradients + state),
        "zero1": num_params * (weights + gradients + state / world_size),
        "zero2": num_params * (weights + (gradients + state) / world_size),
        "zero3": num_params * (weights + gradients + state) / world_size,
    }


@dataclass(frozen=True)
class Change:
    """One way to make a setting fit.

    Attributes:
        words: What to set.
        cost: What it costs.
        overrides: The same as `--set` arguments.
        plan: The resulting memory plan.
    """

    words: str
    cost: str
    overrides: tuple[str, ...]
    plan: MemoryPlan

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {
            "words": self.words,
            "cost": self.cost,
            "overrides": list(self.overrides),
            "plan": self.plan.to_dict(),
        }


@dataclass(frozen=True, repr=False)
class MemoryReport(Shown):
    """The result of `frameworm memory --config`.

    Attributes:
        plan: The plan for the config's own setting.
        strategies: The same setting under each strategy that its world size allows.
        memory_bytes: The device's memory; None if unknown.
        device_name: The device.
        largest: The largest micro-batch that fits; 0 if none does, None if the memory is unknown.
        largest_by: The same for each strategy and checkpointing mode.
        saved_by: Fraction of the memory without checkpointing that each mode saves, at the same micro-batch.
        changes: Ways to make it fit, cheapest first; empty if it fits.
    """

    name: str
    parameters: int
    plan: MemoryPlan
    strategies: tuple[MemoryPlan, ...]
    memory_fraction: float
    per_sample_bytes: float
    fixed_bytes: float
    memory_bytes: int | None = None
    device_name: str | None = None
    largest: int | None = None
    largest_by: dict[str, int] = field(default_factory=dict)
    saved_by: dict[str, float] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()

    def in_words(self) -> list[str]:
        """What the step takes, whether it fits, and what to change if not."""
        micro, strategy = self.plan.setting.micro_batch, self.plan.setting.strategy
        lines = [f"MemoryReport: {self.name}, {self.plan.total / 1e9:.2f} GB at micro-batch {micro} under {strategy}"]
        if self.memory_bytes is not None:
            usable = capacity(self.memory_bytes, self.memory_fraction, self.plan.setting.device)
            lines.append(f"{'fits' if self.fits else 'does not fit'} in the {usable / 1e9:.2f} GB it may use")
        if self.largest is not None:
            lines.append(f"largest micro-batch that fits: {self.largest}")
        return lines + [f"to make it fit: {change.words} ({change.cost})" for change in self.changes[:3]]

    @property
    def fits(self) -> bool | None:
        """True if the setting fits; None if the memory is unknown."""
        return None if self.memory_bytes is None else self.plan.fits(self.memory_bytes, self.memory_fraction)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        device = self.plan.setting.device
        known = self.memory_bytes is not None
        return {
            "name": self.name,
            "parameters": self.parameters,
            "memory_bytes": self.memory_bytes,
            "memory_fraction": self.memory_fraction,
            "usable_bytes": capacity(self.memory_bytes or 0, self.memory_fraction, device) if known else None,
            "device_name": self.device_name,
            "fits": self.fits,
            "plan": self.plan.to_dict(),
            "checkpointing_saves_pct": {mode: 100 * saved for mode, saved in self.saved_by.items()},
            "strategies": {plan.setting.strategy: plan.to_dict() for plan in self.strategies},
            "activations": {"fixed_bytes": self.fixed_bytes, "per_sample_bytes": self.per_sample_bytes},
            "largest_micro_batch": self.largest,
            "largest_micro_batch_by": self.largest_by,
            "changes": [change.to_dict() for change in self.changes],
            "notes": list(self.notes),
        }


def plan_of_count(num_params: int, setting: Setting) -> MemoryPlan:
    """Plan a model of which only the size is known, without activations."""
    nothing = StepMemory(setting.micro_batch, 0, Peak(), Peak())
    return plan_step(ModelShapes.of_count(num_params), setting, nothing)


def largest_micro_batch(setting: Setting, memory_bytes: int, memory_fraction: float, plan_for: PlanFor) -> int:
    """Return the largest micro-batch whose step fits; 0 if not even one sample does.

    Args:
        setting: Its micro-batch is ignored; for accumulation, only whether there is any matters.
        memory_bytes: Memory of the device.
        memory_fraction: Fraction of it that torch may use.
        plan_for: Returns the plan of a setting; memory must not decrease with the micro-batch.
    """

    def fits(size: int) -> bool:
        return plan_for(replace(setting, micro_batch=size)).fits(memory_bytes, memory_fraction)

    if not fits(1):
        return 0
    size = 1
    while size < LARGEST_MICRO_BATCH and fits(size * 2):
        size *= 2
    low, high = size, min(size * 2, LARGEST_MICRO_BATCH)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def ways_to_fit(
    setting: Setting,
    memory_bytes: int,
    memory_fraction: float,
    plan_for: PlanFor,
    most: int = 3,
    checkpointing: tuple[CheckpointingName, ...] = CHECKPOINTING,
) -> list[Change]:
    """Return changes that make a setting fit with the same global batch, cheapest first.

    Single changes come first, in this order: a smaller micro-batch with more accumulation, selective and full
    checkpointing, zero1, zero2, zero3; then checkpointing with a smaller micro-batch, then everything sharded.

    Args:
        setting: The setting that does not fit.
        memory_bytes: Memory of the device.
        memory_fraction: Fraction of it that torch may use.
        plan_for: Returns the plan of a setting.
        most: Stop after this many.
        checkpointing: The modes that the model allows.
    """
    found: dict[tuple[str, ...], Change] = {}
    for candidate in _candidates(setting, checkpointing):
        kind = tuple(name for name in _CHANGED if getattr(candidate, name) != getattr(setting, name))
        if any(set(earlier) <= set(kind) for earlier in found):
            continue  # an earlier one changes less
        plan = plan_for(candidate)
        if plan.fits(memory_bytes, memory_fraction):
            found[kind] = _describe(setting, candidate, plan)
            if len(found) == most:
                break
    return list(found.values())


def _candidates(setting: Setting, checkpointing: tuple[CheckpointingName, ...]) -> Iterator[Setting]:
    smaller = list(_smaller(setting))
    stronger = [
        mode for mode in checkpointing if CHECKPOINTING.index(mode) > CHECKPOINTING.index(setting.checkpointing)
    ]
    ladder: tuple[StrategyName, ...] = SHARDED if setting.world_size > 1 else ()
    if setting.strategy in ladder:
        ladder = ladder[ladder.index(setting.strategy) + 1 :]
    yield from smaller
    for mode in stronger:
        yield replace(setting, checkpointing=mode)
    for strategy in ladder:
        yield replace(setting, strategy=strategy, residuals=False, bucket_views=True)
    for mode in stronger:
        for item in smaller:
            yield replace(item, checkpointing=mode)
    strongest = stronger[-1] if stronger else setting.checkpointing
    for strategy in ladder:
        for item in [setting, *smaller]:
            yield replace(item, strategy=strategy, checkpointing=strongest, residuals=False, bucket_views=True)


def _smaller(setting: Setting) -> Iterator[Setting]:
    """Yield smaller micro-batches that divide a device's samples per step, largest first."""
    share = setting.micro_batch * setting.accumulation
    for size in range(setting.micro_batch - 1, 0, -1):
        if share % size == 0:
            yield replace(setting, micro_batch=size, accumulation=share // size)


def _describe(before: Setting, after: Setting, plan: MemoryPlan) -> Change:
    words, costs, overrides = [], [], []
    if after.micro_batch != before.micro_batch:
        words.append(f"micro-batch {after.micro_batch} with accumulation {after.accumulation}")
        costs.append("smaller matrix products, the same gradients")
        overrides.append(f"training.micro_batch={after.micro_batch}")
    if after.checkpointing != before.checkpointing:
        words.append(f"activation checkpointing {after.checkpointing}")
        costs.append(_COSTS[after.checkpointing])
        overrides.append(f"memory.activation_checkpointing={after.checkpointing}")
    if after.strategy != before.strategy:
        words.append(f"strategy {after.strategy}")
        costs.append(_COSTS[after.strategy])
        overrides.append(f"parallel.strategy={after.strategy}")
    return Change(" and ".join(words), "; ".join(costs), tuple(overrides), plan)
