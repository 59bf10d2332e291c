"""The memory that one training step needs: arithmetic over shapes and over a dry run of the model.

Strategies are modelled as they are implemented here: zero1 is DDP with a partitioned optimizer; zero2 and zero3 are
FSDP2, which keeps parameters sharded between steps under both. All components of a plan belong to one moment, the one
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
# cuBLAS takes its workspace from torch's allocator: one for the thread of forward, one for that of backward.
LIBRARY_BYTES = {"cuda": 2 * 32 * MIB, "cpu": 0}
# Not counted by torch: the driver's context, kernels, communication libraries.
CONTEXT_BYTES = {"cuda": 600 * MIB, "cpu": 0}
HALF_BYTES = 2  # of a number in bf16 and fp16
EIGHT_BIT_BYTES = 2 * (1 + 4 / 256)  # two numbers per parameter, and a float for each block of 256
# Free blocks that are too small for the next request, as a fraction of what is allocated and freed within a step.
FRAGMENTATION = {"cuda": 0.05, "cpu": 0.0}


@dataclass(frozen=True)
class Peak:
    """The moment of forward and backward that holds most, without parameters and batch."""

    activations: float = 0
    weight_copies: float = 0  # half-precision parameters, as autocast keeps them
    loss: float = 0  # logits and everything else between the last layer and the loss
    workspace: float = 0  # of the current operation
    gradients: float = 0  # those that are complete by then

    @property
    def total(self) -> float:
        """Sum of all components."""
        return self.activations + self.weight_copies + self.loss + self.workspace + self.gradients


@dataclass(frozen=True)
class StepMemory:
    """Result of a dry run of one micro-batch, in bytes.

    Attributes:
        micro_batch: Number of samples.
        kept: Held between forward and backward.
        fresh: The peak if there are no gradients yet, so that they grow while activations shrink.
        repeat: The peak if all gradients exist and new ones are added to them (accumulation, DDP's buckets); it does
            not include them.
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
    """Dry runs of one model at several micro-batch sizes, ascending; memory is linear between and beyond them."""

    points: tuple[StepMemory, ...]

    def at(self, micro_batch: int) -> StepMemory:
        """Return what a micro-batch needs, from the two nearest dry runs."""
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
        """Return the profile with one more dry run."""
        others = [item for item in self.points if item.micro_batch != point.micro_batch]
        return ActivationProfile(tuple(sorted([*others, point], key=lambda item: item.micro_batch)))

    @property
    def per_sample_bytes(self) -> float:
        """Bytes that each additional sample adds to what is kept between forward and backward."""
        first, last = self.points[0], self.points[-1]
        return 0.0 if first is last else (last.kept - first.kept) / (last.micro_batch - first.micro_batch)

    @property
    def fixed_bytes(self) -> float:
        """Bytes kept regardless of the batch."""
        return max(0.0, self.points[0].kept - self.per_sample_bytes * self.points[0].micro_batch)


def _between(one: float, other: float, share: float) -> float:
    return max(0.0, one + (other - one) * share)


def _peak_between(one: Peak, other: Peak, share: float) -> Peak:
    return Peak(*(_between(getattr(one, item.name), getattr(other, item.name), share) for item in fields(Peak)))


@dataclass(frozen=True)
class Setting:
    """Everything besides the model that determines the memory of a step."""

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
    residuals: bool = False  # compression keeps what it has not sent yet
    offload_optimizer: bool = False
    averages: bool = False  # a moving average of the weights is kept
    device: str = "cuda"

    @property
    def sharded(self) -> bool:
        """True if parameters are sharded and gathered unit by unit (FSDP2); on one device they are still copied."""
        return self.strategy in ("zero2", "zero3")

    @property
    def half_layers(self) -> bool:
        """True if layers get parameters and inputs in half precision, instead of leaving that to autocast."""
        return self.sharded and self.precision != "off"

    @property
    def state_copies(self) -> int:
        """Number of parameter-sized tensors that the optimizer keeps, at most (Muon keeps one for its matrices)."""
        if self.optimizer == "sgd":
            return 1 if self.momentum else 0
        return 0 if self.optimizer == "adamw8bit" else 2


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device at the moment of a step that needs most; they add up to `allocated`.

    Attributes:
        moment: forward_backward, reduction (of the last gradients, under zero2 and zero3), optimizer, rebuild (DDP
            reorders its buckets after the first step) or validation.
        communication: Buckets besides the gradients, gathered parameters, buffers of collectives.
        allocator: Estimate of free blocks that cannot be used.
        context: Not counted by torch: driver, kernels, communication library.
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
        """Expected value of torch.cuda.max_memory_allocated."""
        return sum(getattr(self, name) for name in COMPONENTS)

    @property
    def total(self) -> int:
        """`allocated` plus what the allocator cannot use; the context is extra."""
        return self.allocated + self.allocator

    def fits(self, memory_bytes: int, memory_fraction: float = 1.0) -> bool:
        """True if a device of that size has room; torch may use `memory_fraction` of it."""
        return self.total <= capacity(memory_bytes, memory_fraction, self.setting.device)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
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
    """Return how much of a device torch's allocator can hold."""
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
    """Plan the peak memory of one device from the second step on, when the optimizer state exists.

    Args:
        model: Sizes of the parameters.
        setting: How it is trained; its `micro_batch` is replaced by that of `step`.
        step: A dry run on one device, with half-precision layers if `setting.half_layers`.
    """
    device, world_size, sharded = setting.device, setting.world_size, setting.sharded
    whole = model.whole_bytes(device)
    shard = model.shard_bytes(world_size, device) if sharded else whole
    # Offloading keeps a rank's shard of parameters, gradients and state in host memory, and updates there.
    held = 0 if sharded and setting.offload_optimizer else shard
    state = _optimizer_bytes(model, setting, held) if held else 0
    # Without a fused kernel, the update holds one more tensor per parameter, all at once.
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
    """Moments of strategies in which every device holds all parameters and all gradients."""
    if setting.strategy == "single":
        if setting.accumulation == 1:
            return [_Moment("forward_backward", 0, 0, step.fresh)]
        return [_Moment("forward_backward", whole, 0, step.repeat)]
    aside = _beside_gradients(setting, whole)
    return [
        # Buckets exist from the beginning, whether gradients live in them or are copied to them.
        _Moment("forward_backward", whole, aside, step.repeat),
        _Moment("rebuild", whole, whole + aside),
    ]


def _sharded_moments(model: ModelShapes, setting: Setting, step: StepMemory, shard: int) -> list[_Moment]:
    """Moments of FSDP2: shards between steps, whole units while they are used; reduced in the parameters' own type."""
    *layers, root = model.unit_bytes()
    own, gathered = max(layers, default=0), max(_gathered_units(model, setting)[:-1], default=0)
    alone = setting.world_size == 1  # parameters are copied and gradients stay as they are: nothing is sent
    # One buffer arrives while gradients leave in another; both belong to layers, since the root's come first and last.
    buffers = 0 if alone else gathered + own
    around = _gathered_bytes(model, setting) + buffers
    if setting.accumulation > 1:
        # Unreduced gradients of all units wait in their own type; their shards replace them one by one.
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
    # The root's gradients are complete only at the end of backward, and are sent last.
    left = (0 if setting.offload_optimizer else shard) + root
    return [*passes, _Moment("reduction", left, root * (1 if alone else 2))]


def _gathered_units(model: ModelShapes, setting: Setting) -> list[int]:
    """Size of each gathered unit: layers in the type they compute in, everything else in its own."""
    return model.unit_bytes(HALF_BYTES if setting.half_layers else None)


def _gathered_bytes(model: ModelShapes, setting: Setting) -> int:
    """Whole parameters held in addition to the shards."""
    *layers, root = _gathered_units(model, setting)
    if setting.strategy == "zero2":
        return root + sum(layers)
    # The unit in use and the one being prefetched; the root's stays for the head and its backward.
    return root + min(sum(layers), 2 * max(layers, default=0))


def _beside_gradients(setting: Setting, whole: int) -> int:
    """What DDP holds in the size of the gradients: buckets, if they are copies, and what compression left unsent."""
    return (0 if setting.bucket_views else whole) + (whole if setting.residuals else 0)


def _optimizer_bytes(model: ModelShapes, setting: Setting, held: int) -> int:
    """Optimizer state and averaged weights of the fullest rank; each step counter takes one block."""
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
