"""What one training step needs of a device's memory: arithmetic over shapes and over a dry run of the model.

Strategies are modelled as they are built here: zero1 is DDP with a partitioned optimizer, zero2 and zero3 are FSDP2,
which keeps parameters in shards between steps under both. All components of a plan are those of one moment, the one
that needs most, so they add up to what the allocator will have handed out.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from frameworm.scaling.memory_shapes import ModelShapes, block, largest_partition

StrategyName = Literal["single", "ddp", "zero1", "zero2", "zero3"]
CheckpointingName = Literal["off", "selective", "full"]
STRATEGIES: tuple[StrategyName, ...] = ("single", "ddp", "zero1", "zero2", "zero3")
CHECKPOINTING: tuple[CheckpointingName, ...] = ("off", "selective", "full")

MIB = 2**20
# cuBLAS takes its working space from torch's allocator: one for the thread of forward, one for that of backward.
LIBRARY_BYTES = {"cuda": 2 * 32 * MIB, "cpu": 0}
# Outside of torch's count: the driver's context, kernels, communication libraries.
CONTEXT_BYTES = {"cuda": 600 * MIB, "cpu": 0}
HALF_BYTES = 2  # of a number in bf16 and fp16
EIGHT_BIT_BYTES = 2 * (1 + 4 / 256)  # two numbers per parameter, and a float for each block of 256
# Blocks that are free but too small for what is asked next, as a share of what comes and goes within a step.
FRAGMENTATION = {"cuda": 0.05, "cpu": 0.0}


@dataclass(frozen=True)
class Peak:
    """The moment of a forward and backward pass at which most is held, parameters and batch left out."""

    activations: float = 0
    weight_copies: float = 0  # parameters in half precision, as autocast keeps them
    loss: float = 0  # logits and all else between the last layer and the loss
    workspace: float = 0  # of the operation under way
    gradients: float = 0  # those that are whole by then

    @property
    def total(self) -> float:
        """Sum of all."""
        return self.activations + self.weight_copies + self.loss + self.workspace + self.gradients


@dataclass(frozen=True)
class StepMemory:
    """What a dry run of one micro-batch found; bytes.

    Attributes:
        micro_batch: Samples.
        kept: Held between forward and backward.
        fresh: The peak when there are no gradients yet, so that they grow while activations shrink.
        repeat: The peak when all gradients are there and new ones are added to them (accumulation, DDP's buckets);
            they are not counted in it.
        validation: The peak of a validation batch; 0 without validation.
        batch: The batch itself.
    """

    micro_batch: int
    kept: float
    fresh: Peak
    repeat: Peak
    validation: float = 0
    batch: float = 0


@dataclass(frozen=True)
class ActivationProfile:
    """Dry runs of one model at several micro-batch sizes, in rising order; between and beyond them memory is linear."""

    points: tuple[StepMemory, ...]

    def at(self, micro_batch: int) -> StepMemory:
        """What a micro-batch needs, from the two nearest dry runs."""
        points = self.points
        exact = next((point for point in points if point.micro_batch == micro_batch), None)
        if exact is not None or len(points) == 1:
            return exact or points[0]
        above = next((place for place, point in enumerate(points) if point.micro_batch > micro_batch), len(points) - 1)
        one, other = points[max(above, 1) - 1], points[max(above, 1)]
        share = (micro_batch - one.micro_batch) / (other.micro_batch - one.micro_batch)
        return StepMemory(
            micro_batch,
            _between(one.kept, other.kept, share),
            _peak_between(one.fresh, other.fresh, share),
            _peak_between(one.repeat, other.repeat, share),
            _between(one.validation, other.validation, share),
            _between(one.batch, other.batch, share),
        )

    def with_point(self, point: StepMemory) -> ActivationProfile:
        """One more dry run."""
        others = [item for item in self.points if item.micro_batch != point.micro_batch]
        return ActivationProfile(tuple(sorted([*others, point], key=lambda item: item.micro_batch)))

    @property
    def per_sample_bytes(self) -> float:
        """What one more sample adds to what is kept between forward and backward."""
        first, last = self.points[0], self.points[-1]
        return 0.0 if first is last else (last.kept - first.kept) / (last.micro_batch - first.micro_batch)

    @property
    def fixed_bytes(self) -> float:
        """What is kept whatever the batch."""
        return max(0.0, self.points[0].kept - self.per_sample_bytes * self.points[0].micro_batch)


def _between(one: float, other: float, share: float) -> float:
    return max(0.0, one + (other - one) * share)


def _peak_between(one: Peak, other: Peak, share: float) -> Peak:
    return Peak(*(_between(getattr(one, item.name), getattr(other, item.name), share) for item in fields(Peak)))


@dataclass(frozen=True)
class Setting:
    """What decides how much memory a step takes, beside the model."""

    strategy: StrategyName = "single"
    world_size: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    precision: str = "off"  # off, bf16, fp16
    optimizer: str = "adamw"
    momentum: float = 0.9
    fused: bool = True
    checkpointing: CheckpointingName = "off"
    bucket_views: bool = True
    residuals: bool = False  # compression keeps what it did not send
    offload_optimizer: bool = False
    averages: bool = False  # a moving average of the weights is kept
    device: str = "cuda"

    @property
    def sharded(self) -> bool:
        """Whether parameters are divided, gathered unit by unit (FSDP2); with one device they are still copied."""
        return self.strategy in ("zero2", "zero3")

    @property
    def half_layers(self) -> bool:
        """Whether layers get their parameters and inputs in half precision instead of leaving that to autocast."""
        return self.sharded and self.precision != "off"

    @property
    def state_copies(self) -> int:
        """Tensors of a parameter's size that the optimizer keeps, at most (Muon has one for its matrices)."""
        if self.optimizer == "sgd":
            return 1 if self.momentum else 0
        return 0 if self.optimizer == "adamw8bit" else 2


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device at the moment of a step that needs most; they add up to `allocated`.

    Attributes:
        moment: forward_backward, reduction (of the last gradients, under zero2 and zero3), optimizer, rebuild (DDP
            orders its buckets anew after the first step) or validation.
        communication: Buckets beside the gradients, gathered parameters, buffers of collectives.
        allocator: Free blocks that cannot be used, estimated.
        context: Outside of torch's count: driver, kernels, communication library.
    """

    setting: Setting
    moment: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    weight_copies: int
    loss: int
    communication: int
    workspace: int
    batch: int
    allocator: int
    context: int

    @property
    def allocated(self) -> int:
        """What torch.cuda.max_memory_allocated will show."""
        return sum(getattr(self, name) for name in COMPONENTS)

    @property
    def total(self) -> int:
        """With what the allocator cannot use; the context comes on top."""
        return self.allocated + self.allocator

    def fits(self, memory_bytes: int, memory_fraction: float = 1.0) -> bool:
        """Whether a device of that size has room; torch may take `memory_fraction` of it."""
        return self.total <= capacity(memory_bytes, memory_fraction, self.setting.device)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "allocated": self.allocated, "total": self.total}


COMPONENTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "weight_copies",
    "loss",
    "communication",
    "workspace",
    "batch",
)


def capacity(memory_bytes: int, memory_fraction: float, device: str) -> int:
    """How much of a device torch's allocator can hold."""
    return min(int(memory_bytes * memory_fraction), memory_bytes - CONTEXT_BYTES[device])


@dataclass(frozen=True)
class _Moment:
    name: str
    gradients: float = 0
    communication: float = 0
    peak: Peak = field(default_factory=Peak)
    workspace: float = 0

    @property
    def total(self) -> float:
        return self.gradients + self.communication + self.peak.total + self.workspace


def plan_step(model: ModelShapes, setting: Setting, step: StepMemory) -> MemoryPlan:
    """The memory of one device in its steadiest large moment: from the second step on, optimizer state in place.

    Args:
        model: Sizes of the parameters.
        setting: How it is trained; `micro_batch` is what `step` was made for.
        step: A dry run on one device, with layers in half precision where `setting.half_layers`.
    """
    device, world_size, sharded = setting.device, setting.world_size, setting.sharded
    whole = model.whole_bytes(device)
    shard = model.shard_bytes(world_size, device) if sharded else whole
    # Offloading keeps a rank's part of parameters, gradients and state in host memory, and updates there.
    held = 0 if sharded and setting.offload_optimizer else shard
    state = _optimizer_bytes(model, setting, held) if held else 0
    # Without a fused kernel the update holds one more tensor per parameter, all at a time.
    update_space = 0
    if not setting.fused and setting.state_copies:
        update_space = state // (setting.state_copies + setting.averages)
    moments = _sharded_moments(model, setting, step, shard) if sharded else _whole_moments(setting, step, whole)
    kept_aside = 0 if sharded or setting.strategy == "single" else _beside_gradients(setting, whole)
    moments.append(_Moment("optimizer", held, kept_aside, workspace=update_space))
    if step.validation:
        buckets = 0 if sharded or setting.strategy == "single" else whole
        gathered = _gathered_bytes(model, setting) if sharded else kept_aside
        set_aside = held if setting.averages else 0  # the weights, while their averages are in their place
        moments.append(_Moment("validation", buckets, gathered, Peak(activations=step.validation), set_aside))
    worst = max(moments, key=lambda moment: moment.total)
    peak = worst.peak
    return MemoryPlan(
        setting=replace(setting, micro_batch=step.micro_batch),
        moment=worst.name,
        parameters=held + model.fixed_bytes,
        gradients=round(worst.gradients + peak.gradients),
        optimizer=state,
        activations=round(peak.activations),
        weight_copies=round(peak.weight_copies),
        loss=round(peak.loss),
        communication=round(worst.communication),
        workspace=round(peak.workspace + worst.workspace) + LIBRARY_BYTES[device],
        batch=round(step.batch),
        allocator=round(worst.total * FRAGMENTATION[device]),
        context=CONTEXT_BYTES[device],
    )


def _whole_moments(setting: Setting, step: StepMemory, whole: int) -> list[_Moment]:
    """Every device holds all parameters and all gradients."""
    if setting.strategy == "single":
        if setting.accumulation == 1:
            return [_Moment("forward_backward", 0, 0, step.fresh)]
        return [_Moment("forward_backward", whole, 0, step.repeat)]
    aside = _beside_gradients(setting, whole)
    return [
        # Buckets are there from the beginning, whether gradients live in them or are copied to them.
        _Moment("forward_backward", whole, aside, step.repeat),
        _Moment("rebuild", whole, whole + aside),
    ]


def _sharded_moments(model: ModelShapes, setting: Setting, step: StepMemory, shard: int) -> list[_Moment]:
    """FSDP2: shards between steps, whole units while they are used; reduced in the parameters' own type."""
    *layers, root = model.unit_bytes()
    own, gathered = max(layers, default=0), max(_gathered_units(model, setting)[:-1], default=0)
    alone = setting.world_size == 1  # parameters are copied, gradients are what they are: nothing travels
    # One buffer arrives while gradients leave in another; both belong to layers, since the root's come first and last.
    buffers = 0 if alone else gathered + own
    around = _gathered_bytes(model, setting) + buffers
    if setting.accumulation > 1:
        # Unreduced gradients of all units wait in their own type; shards of them take their place one by one.
        waiting = root + sum(layers) + (gathered if setting.half_layers else 0)
        passes = [_Moment("forward_backward", waiting, around, step.repeat)]
    else:
        on_device = 0.0 if setting.offload_optimizer else 1 / setting.world_size
        reduced = step.fresh.gradients * on_device * (model.element_bytes / HALF_BYTES if setting.half_layers else 1)
        under_way = gathered or root
        passes = [
            _Moment("forward_backward", under_way, around, step.repeat),
            _Moment("forward_backward", under_way + reduced, around, replace(step.fresh, gradients=0)),
        ]
    # The root's gradients are whole only when backward has come to its end, and leave last.
    left = (0 if setting.offload_optimizer else shard) + root
    return [*passes, _Moment("reduction", left, root * (1 if alone else 2))]


def _gathered_units(model: ModelShapes, setting: Setting) -> list[int]:
    """Size of each unit as it is gathered: layers in the type they compute in, all else in its own."""
    return model.unit_bytes(HALF_BYTES if setting.half_layers else None)


def _gathered_bytes(model: ModelShapes, setting: Setting) -> int:
    """Whole parameters that lie beside the shards."""
    *layers, root = _gathered_units(model, setting)
    if setting.strategy == "zero2":
        return root + sum(layers)
    # The unit in use and the one that is fetched meanwhile; the root's stays for the head and its backward.
    return root + min(sum(layers), 2 * max(layers, default=0))


def _beside_gradients(setting: Setting, whole: int) -> int:
    """What DDP holds as large as the gradients: its buckets where they are copies, and what compression still owes."""
    return (0 if setting.bucket_views else whole) + (whole if setting.residuals else 0)


def _optimizer_bytes(model: ModelShapes, setting: Setting, held: int) -> int:
    """State of the fullest rank and its averages of weights; its counters of steps are a block each."""
    copies: float = setting.state_copies + setting.averages
    if setting.optimizer == "adamw8bit":
        copies += EIGHT_BIT_BYTES / model.element_bytes
    counters = 0 if setting.optimizer == "sgd" else len(model.shapes) * block(4, setting.device)
    if setting.strategy == "zero1" and setting.world_size > 1:
        sizes = [math.prod(shape) for shape in model.shapes]
        if len(sizes) == 1:
            elements = -(-sizes[0] // setting.world_size)
        else:
            elements = largest_partition(sizes, setting.world_size)
        return round(copies * elements * model.element_bytes) + counters // setting.world_size
    return round(copies * held) + counters
