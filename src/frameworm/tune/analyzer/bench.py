"""The engine's step on one model, run in blocks: from an endless loader, or on the same batch again."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from frameworm.config.schema import Config
from frameworm.data.batches.sizes import batch_size_of
from frameworm.data.prefetch import CudaDataLoader
from frameworm.data.steps import StepBatch, StepSource
from frameworm.engine.model.activations import apply_checkpointing
from frameworm.engine.model.compilation import Compiler
from frameworm.engine.model.precision import Precision
from frameworm.engine.optim.schedule import NoSchedule
from frameworm.engine.optim.update import Update
from frameworm.engine.step.loss import LossFunction
from frameworm.engine.step.step import TrainStep
from frameworm.launch.process_group import all_reduce_max, all_reduce_sums, setup_ddp
from frameworm.observe.clocks.communication import recorded
from frameworm.observe.clocks.device_clock import make_clock
from frameworm.observe.clocks.phases import DATA_WAIT, OTHER, Timed
from frameworm.parallel.choose import choose_strategy
from frameworm.parallel.compression.public import CompressedDDP
from frameworm.parallel.strategy import Strategy
from frameworm.torch_private import distributed
from frameworm.tune.analyzer.loader_copy import batches_ahead, end_workers

_USUAL_SAMPLE_RATE = 100  # DDP's default: it times one step in this many, and its setting cannot be read


class Feed:
    """Steps of a loader without end: one epoch after another."""

    def __init__(self, loader: Any, device: torch.device, strategy: Strategy, accumulation: int) -> None:
        self.ahead = batches_ahead(loader)
        self._loader = loader
        self._accumulation = accumulation
        self._source = StepSource(
            CudaDataLoader(loader, device),
            accumulation=accumulation,
            world_size=strategy.world_size,
            sum_over_ranks=lambda value: all_reduce_sums([value], device)[0],
            max_over_ranks=lambda value: all_reduce_max(value, device),
        )
        self._epoch = 0
        self._steps: Iterator[StepBatch] | None = None

    def __call__(self) -> StepBatch:
        """The batches of the next step."""
        batch = next(self._steps, None) if self._steps is not None else None
        if batch is None:
            self._steps = self._source.epoch(self._epoch)
            self._epoch += 1
            batch = next(self._steps)
        return batch

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of one epoch on this rank; None if the loader has no length."""
        try:
            return -(-len(self._loader) // self._accumulation)
        except TypeError:
            return None

    def close(self) -> None:
        """Stop the workers."""
        self._steps = None
        end_workers(self._loader)


class Replicas(Strategy):
    """A model that the user has wrapped in DDP."""

    name = "ddp"

    def __init__(self, device: torch.device, wrapped: DistributedDataParallel) -> None:
        super().__init__(device, dist.get_rank(), dist.get_world_size())
        self._wrapped = wrapped
        self._times: dict[int, float] = {}  # by DDP's step number

    def place(self, model: nn.Module) -> nn.Module:
        return self._wrapped

    def no_sync(self) -> AbstractContextManager[None]:
        return self._wrapped.no_sync()

    def sum_over_ranks(self, value: torch.Tensor) -> None:
        dist.all_reduce(value)

    def communicated_bytes(self, model: nn.Module) -> int | None:
        if has_hook(self._wrapped):
            return None
        return sum(item.numel() * item.element_size() for item in model.parameters() if item.requires_grad)

    @contextlib.contextmanager
    def timing(self) -> Iterator[Callable[[], None]]:
        """Let DDP time its communication; call what is yielded before each step, then read `communication_s`."""
        self._times.clear()
        distributed.set_timing_rate(self._wrapped, 1)
        try:
            yield self._note_time
        finally:
            distributed.set_timing_rate(self._wrapped, _USUAL_SAMPLE_RATE)

    def _note_time(self) -> None:
        """DDP reports the times of a backward pass in the next forward pass."""
        data = distributed.times_of(self._wrapped)
        self._times[data.get("iteration", 0)] = data.get("backward_comm_time", 0) * 1e-9

    @property
    def communication_s(self) -> float | None:
        """Seconds per step in which gradients were being sent, as timed by DDP; None if it timed nothing."""
        times = [seconds for seconds in self._times.values() if seconds > 0]
        return statistics.median(times) if times else None


class Bench:
    """The engine's step on one model, in two precisions, with a clock that times its phases."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Any] | None,
        device: torch.device,
        config: Config,
    ) -> None:
        model = without_compression(model)
        self.device = device
        self.strategy = find_strategy(model, device, config)
        self.model: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        wrapped = self.strategy.place(self.model)
        self._memory = config.memory
        apply_checkpointing(self.model, config.memory)
        Compiler(config.gpu, captured=False).apply(self.model)
        self._clock = make_clock(device)
        self.strategy.wrap_hook(lambda hook: recorded(hook, self._clock.record_buckets()))
        loss = LossFunction(self.model, loss_fn)
        self.precision = Precision(config.gpu.mixed_precision, device)
        other = "off" if self.precision.name != "off" else "auto" if device.type == "cuda" else "bf16"
        self.other_precision = Precision(other, device)
        self._steps = [
            TrainStep(
                self.model,
                wrapped,
                loss,
                Update(self.model.parameters(), optimizer, NoSchedule(), precision, config.training.clip_norm, device),
                self.strategy,
                precision,
                self._clock,
            )
            for precision in (self.precision, self.other_precision)
        ]
        wrapped.train()

    def block(
        self,
        next_batch: Callable[[], StepBatch],
        steps: int,
        *,
        drop: int = 0,
        sync: bool = True,
        other_precision: bool = False,
    ) -> list[Timed]:
        """Run some steps and return the measurements of those after the first `drop`."""
        apply_checkpointing(self.model, self._memory)  # another bench of the same model may have changed it
        step = self._steps[int(other_precision)]
        clock, timed = self._clock, []
        clock.start()
        for number in range(drop + steps):
            clock.divide()
            clock.mark(OTHER)
            batch = next_batch()
            clock.mark(DATA_WAIT)
            with contextlib.nullcontext() if sync else self.strategy.no_sync():
                result = step.run(number, batch)
            timed += clock.end_step((number, batch_figures(batch)), (result.loss,))
        timed += clock.drain()
        return [item for item in timed if item.payload[0] >= drop]

    def communication_s(self, step: StepBatch, steps: int) -> float | None:
        """Seconds per step in which gradients are being sent, if only DDP's own clock can tell."""
        strategy = self.strategy
        if not isinstance(strategy, Replicas):
            return None
        with strategy.timing() as note:

            def same() -> StepBatch:
                note()
                return step

            self.block(same, steps + 2)
        return strategy.communication_s

    def agreed(self, seconds: float) -> float:
        """The longest time on any rank, so that decisions based on it are the same on all."""
        return all_reduce_max(seconds, self.device)


def find_strategy(model: nn.Module, device: torch.device, config: Config) -> Strategy:
    """The strategy of this process: the user's own wrapper, or what the engine would choose."""
    if isinstance(model, DistributedDataParallel):
        return Replicas(device, model)
    if not dist.is_initialized():
        return Strategy(device)
    process = setup_ddp()
    return choose_strategy(config.parallel, device, rank=process.rank, world_size=process.world_size)


def without_compression(model: nn.Module) -> nn.Module:
    """The DDP inside a `CompressedDDP`; any other model unchanged."""
    return model.ddp if isinstance(model, CompressedDDP) else model


def has_hook(model: nn.Module) -> bool:
    """Whether a communication hook of the user's sends the gradients of a DDP model."""
    return distributed.has_hook(without_compression(model))


def step_of(batch: Any, world_size: int = 1) -> StepBatch:
    """A step of one batch."""
    samples = batch_size_of(batch) or 1
    return StepBatch([batch], [samples], samples * world_size)


def batch_figures(batch: StepBatch) -> tuple[int, int | None, int | None]:
    """Samples, tokens and tokens with padding of a step on this rank."""
    return batch.local_samples, batch.tokens, batch.padded_tokens


def mean_step_s(timed: Sequence[Timed]) -> float:
    """Mean step time of a block."""
    return statistics.fmean(item.step_s for item in timed)
