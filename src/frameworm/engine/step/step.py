"""The step: the only place where a model learns.

1. For each micro-batch: forward under the run's precision, loss, backward. Ranks synchronise in the last backward only.
2. Gradients are weighted by count, so that k micro-batches on w ranks give the same as one large batch.
3. Unscale, clip, update, schedule, clear.
Nothing here reads a value from the device: the loss stays there and is read some steps later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from frameworm.data.batches.real_tokens import PLAN
from frameworm.data.prefetch import map_tensors
from frameworm.data.steps import StepBatch
from frameworm.engine.model.compilation import mark_varying, sizes_of
from frameworm.engine.model.fused_head import Logits
from frameworm.engine.model.padding_free import is_planned
from frameworm.engine.model.precision import Precision
from frameworm.engine.optim.update import Update
from frameworm.engine.step.loss import Computed, LossFunction
from frameworm.engine.step.one_message import OneMessage
from frameworm.engine.step.probe import GradientProbe
from frameworm.errors import ModelError
from frameworm.numerics.state import Named, StepTensors
from frameworm.observe.clocks.phases import BACKWARD, COMMUNICATION_EXPOSED, FORWARD, OPTIMIZER, StepClock
from frameworm.parallel.strategy import Strategy
from frameworm.torch_private.optimizers import growth_tracker, loss_scale

# A shape that occurs in fewer than one of this many steps is not worth compiling for.
_RARE = 10


class StepResult:
    """Result of a step; its tensors are on the device."""

    __slots__ = ("count", "counts_samples", "loss")

    def __init__(self, loss: torch.Tensor, count: torch.Tensor | float, counts_samples: bool = False) -> None:
        self.loss = loss  # mean over this rank's samples (or what the loss counts)
        self.count = count
        self.counts_samples = counts_samples


class SeenBatch(NamedTuple):
    """A micro-batch of a step as callbacks see it; the tensors are on the device."""

    batch: Any
    outputs: Any  # of the model; None if loss_fn(model, batch) calls it, or it returns only its loss
    loss: torch.Tensor


class GradientMethod(Protocol):
    """An alternative way to compute a step's gradients, such as in pieces that fit into memory."""

    def gradients(self, step: TrainStep, batch: StepBatch) -> tuple[StepResult, torch.Tensor | None]:
        """Compute gradients like `TrainStep.gradients`."""


class StepWatch(Protocol):
    """Observes a step while computing it."""

    def watch(self, step: TrainStep, batch: StepBatch) -> StepResult:
        """Compute like `TrainStep.compute`."""


class TrainStep:
    """One optimizer step on one rank."""

    def __init__(
        self,
        model: nn.Module,
        wrapped: nn.Module,
        loss_function: LossFunction,
        update: Update,
        strategy: Strategy,
        precision: Precision,
        clock: StepClock,
    ) -> None:
        self.model = model
        self.wrapped = wrapped
        self.update = update
        self.loss_function = loss_function
        self.strategy = strategy
        self._world_size = strategy.gradient_ranks
        self._shares_gradients = strategy.gradient_ranks == strategy.world_size
        self._autocast = precision.autocast
        self.scaler = precision.scaler
        self._mark: Callable[[str], None] = clock.mark
        self._first = True
        self._after_step = strategy.after_step if strategy.acts_after_steps else None
        self._beside = {id(item) for item in strategy.beside.parameters.values()}
        self._acts_beside = bool(self._beside or strategy.beside.modules) and self._shares_gradients
        self.splitter: GradientMethod | None = None
        self.probe: GradientProbe | None = None
        self.uncompiled: Callable[[], AbstractContextManager[object]] | None = None  # the compiler's, if there is one
        self._passed, self._short, self._most_samples = 0, 0, 0
        self._first_sizes: list[tuple[torch.Size, ...]] = []
        self.seen: list[SeenBatch] | None = None  # if a list, it collects the step's micro-batches for callbacks
        self.one_message: OneMessage | None = None  # sends gradients instead of the strategy
        self.flops: StepWatch | None = None  # counts the FLOPs of early steps, then removes itself

    def run(self, step: int, batch: StepBatch) -> StepResult:
        """Train on one step's micro-batches; `step` is the number of attempted steps before this one."""
        self.follow()
        self.count_step(batch)
        self.update.schedule.before_step(step)
        if self.update.half_weights is not None:
            self.update.half_weights.follow()
        result = self.compute(batch) if self.flops is None else self.flops.watch(self, batch)
        if self._after_step is not None and self._after_step(self.model, step + 1):
            self._mark(COMMUNICATION_EXPOSED)
        self.update.end_step()
        return result

    def follow(self) -> bool:
        """Pick up parameters frozen, unfrozen or added to the optimizer since the last step; return whether any."""
        changed = self.update.follow()
        if changed:
            self.one_message = self.update.half_weights = None  # made for the parameters trained before
            self.wrapped = self.strategy.follow(self.model, self.update.optimizer) or self.wrapped
        return changed

    def compute(self, batch: StepBatch) -> StepResult:
        """Run the device part of a step: gradients and update, with the current learning rates."""
        result, factor = self.gradients(batch) if self.splitter is None else self.splitter.gradients(self, batch)
        if self._first:
            self.strategy.check_gradients(self.model)
            self._first = False
        if self._world_size > 1 and self.update.follow():
            raise ModelError(
                "parameters were frozen, unfrozen or given to the optimizer inside a step, where the other ranks' "
                "gradients have gone another way; do it between two steps, in a callback"
            )
        self.meet_beside()
        if self.probe is not None:
            self.probe(factor, None if self.scaler is None else loss_scale(self.scaler), self.update)
        self.update.apply(factor)
        self._mark(OPTIMIZER)
        return result

    def tensors(self) -> StepTensors:
        """Return everything that a step changes on the device: parameters, buffers, optimizer state and loss scale."""
        strategy, update = self.strategy, self.update
        parameters = {**dict(strategy.named_parameters(self.model)), **strategy.beside.parameters}
        buffers = dict(self.model.named_buffers())
        buffers.update((f"loss {place}", item) for place, item in enumerate(strategy.beside.buffers()))

        def others() -> Named:
            scaler = self.scaler
            found = {} if scaler is None else {"scale": loss_scale(scaler), "growth": growth_tracker(scaler)}
            averages = {} if update.averages is None else update.averages.tensors
            found.update({f"average {name}": average for name, average in averages.items()})
            return {name: tensor for name, tensor in found.items() if tensor is not None}

        def restored() -> None:
            if update.half_weights is not None:
                update.half_weights.refresh()

        # With several ranks, this rank's part of the state.
        optimizer = strategy.given(update.optimizer)
        return StepTensors(parameters.items(), buffers.items(), optimizer, others, restored=restored)

    def meet_beside(self) -> None:
        """Average the gradients of the loss's own parameters, which the strategy does not handle."""
        if self._acts_beside and self._world_size > 1:
            held = [item for item in self.update.parameters if item.requires_grad and id(item) in self._beside]
            self.strategy.average_beside(held)
            self._mark(COMMUNICATION_EXPOSED)

    @contextlib.contextmanager
    def in_precision(self, precision: Precision) -> Iterator[None]:
        """Compute gradients in another precision, without cast weights."""
        usual = self._autocast, self.scaler, self.update.half_weights
        self._autocast, self.scaler, self.update.half_weights = precision.autocast, precision.scaler, None
        try:
            yield
        finally:
            self._autocast, self.scaler, self.update.half_weights = usual

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Compute gradients on this rank alone: nothing is sent, and no rank waits for another.

        This needs `strategy.shards_parameters` to be off.
        """
        usual = self.wrapped, self.one_message, self._world_size
        self.wrapped, self.one_message, self._world_size = self.model, None, 1
        try:
            yield
        finally:
            self.wrapped, self.one_message, self._world_size = usual

    def gradients(
        self, batch: StepBatch, meet: Callable[[], None] | None = None
    ) -> tuple[StepResult, torch.Tensor | None]:
        """Run forward and backward for all micro-batches.

        Args:
            batch: The step's micro-batches.
            meet: Averages over the ranks instead of the strategy; until it is called, no rank waits for another.

        Returns:
            The result, and the factor by which gradients must still be multiplied (None for 1).
        """
        halves = self.update.half_weights
        if self.seen is not None:
            self.seen.clear()
        nothing = contextlib.nullcontext()
        here = nothing if self.one_message is None or meet is not None else self.strategy.unsent()
        with self._as_written(batch) or nothing, nothing if halves is None else halves.in_place(), here:
            if len(batch.batches) == 1 and meet is None:
                return self._only(batch.batches[0], batch)
            return self._several(batch, meet)

    def _as_written(self, batch: StepBatch) -> AbstractContextManager[object] | None:
        """Return a context that disables the compiler for a step not worth compiling for; None for other steps.

        In its first step a model may still initialize itself, which would make it compile twice. The short last step of
        an epoch has a different shape, which is not worth it unless short steps are common.
        """
        if self.uncompiled is None:
            return None
        is_rare = batch.global_samples < self._most_samples and _RARE * self._short <= self._passed
        if self._passed <= 1:
            self._first_sizes = sizes_of(batch.batches)
        elif self._first_sizes:
            mark_varying(self._first_sizes, batch.batches)
            self._first_sizes = []
        return self.uncompiled() if self._passed <= 1 or is_rare else None

    def count_step(self, batch: StepBatch) -> None:
        """Count a step, eager or replayed."""
        self._passed += 1
        self._most_samples = max(self._most_samples, batch.global_samples)
        self._short += batch.global_samples < self._most_samples

    @contextlib.contextmanager
    def marking(self, mark: Callable[[str], None] | None) -> Iterator[None]:
        """Report phase boundaries to `mark` instead of the clock; None to report to nothing."""
        usual, self._mark = self._mark, mark or (lambda name: None)
        try:
            yield
        finally:
            self._mark = usual

    def _forward(self, micro: Any, samples: int) -> tuple[torch.Tensor, torch.Tensor | float | None]:
        try:
            with self._autocast:
                computed = self.loss_function(self.wrapped, micro)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise ModelError(
                "a batch norm layer was given a single sample: the last step of an epoch is short, and this rank's "
                "share of it is one sample; leave that step out (drop_last) or choose another batch size"
            ) from None
        except RuntimeError as error:
            explained = self.strategy.explain(error)
            if explained is error:
                raise
            raise explained from None
        self._mark(FORWARD)
        if self.seen is not None and samples:  # fillers are not the user's batches
            self.seen.append(_seen(micro, computed))
        return computed.loss, computed.count

    def _backward(self, loss: torch.Tensor, *, sends: bool = True) -> None:
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()
        if sends and self.one_message is not None:
            self.one_message.send(self.update.half_weights)
        self._mark(BACKWARD)

    def _add_backward(self, loss: torch.Tensor, sends: bool) -> None:
        """Run backward for one of several micro-batches; half-precision gradients are summed in fp32."""
        self._backward(loss, sends=sends)
        if self.update.half_weights is not None:
            self.update.half_weights.collect()

    def _only(self, micro: Any, batch: StepBatch) -> tuple[StepResult, torch.Tensor | None]:
        """Train on a single micro-batch: its mean loss, weighted by the ranks' counts, is the objective."""
        samples = batch.samples[0]
        loss, count = self._forward(micro, samples)
        if self._world_size == 1:
            self._backward(loss)
            return StepResult(loss.detach(), samples if count is None else count, count is None), None
        if count is None:
            weight = samples * self._world_size / batch.global_samples
            self._backward(loss if weight == 1 else loss * weight)
            return StepResult(loss.detach(), samples, True), None
        counted = _as_count(count, loss, samples)
        total = self._over_ranks(counted)
        self._backward(loss * _share(counted * self._world_size, total))
        return StepResult(loss.detach(), counted), None

    def _several(
        self, batch: StepBatch, meet: Callable[[], None] | None = None
    ) -> tuple[StepResult, torch.Tensor | None]:
        """Accumulate the gradients of several micro-batches; the last one synchronises, or `meet` does."""
        last = len(batch.batches) - (1 if meet is None else 0)
        loss_sum: torch.Tensor | None = None
        counted: torch.Tensor | None = None
        for index, (micro, samples) in enumerate(zip(batch.batches, batch.samples)):
            if index < last:
                with self.strategy.no_sync():
                    loss, count = self._micro(micro, samples, batch, sends=False)
            else:
                loss, count = self._micro(micro, samples, batch)
            part = loss.detach() * (samples if count is None else count)
            loss_sum = part if loss_sum is None else loss_sum + part
            if count is not None:
                counted = count if counted is None else counted + count
        assert loss_sum is not None
        if meet is not None:
            meet()
            self._mark(COMMUNICATION_EXPOSED)
        if counted is None:
            local = batch.local_samples
            return StepResult(loss_sum / max(local, 1), local, True), None
        total = self._over_ranks(counted)
        reference = self._reference(batch)
        return StepResult(_share(loss_sum, counted), counted), _share(reference * self._world_size, total)

    def _micro(
        self, micro: Any, samples: int, batch: StepBatch, *, sends: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        loss, count = self._forward(micro, samples)
        if count is None:
            self._add_backward(loss * (samples * self._world_size / self._samples(batch)), sends)
            return loss, None
        # The total count of all micro-batches is known only after the last: weight by a constant now, and let the
        # update multiply by the remaining factor.
        counted = _as_count(count, loss, samples)
        self._add_backward(loss * (counted / self._reference(batch)), sends)
        return loss, counted

    def _over_ranks(self, counted: torch.Tensor) -> torch.Tensor:
        """Sum the count over all ranks; this rank is idle until all have arrived."""
        total = counted.clone()
        if self._world_size > 1:
            self.strategy.sum_over_ranks(total)
            self._mark(COMMUNICATION_EXPOSED)
        return total

    def _reference(self, batch: StepBatch) -> float:
        """Return a count of the right magnitude, the same on all ranks, that keeps scaled gradients in range."""
        return float(self._samples(batch))

    def _samples(self, batch: StepBatch) -> int:
        """Number of samples whose gradients are averaged: over all ranks, or this rank's if ranks train separately."""
        return batch.global_samples if self._shares_gradients else max(batch.local_samples, 1)


def _seen(micro: Any, computed: Computed) -> SeenBatch:
    """Detach from the graph, which would keep all activations until the end of the step."""
    if is_planned(micro):
        micro = {name: item for name, item in micro.items() if name != PLAN}
    return SeenBatch(micro, map_tensors(computed.output, _cut_loose), computed.loss.detach())


@torch.no_grad()
def _cut_loose(output: torch.Tensor) -> torch.Tensor:
    """Detach a model's output; deferred logits are computed now, before the update changes the weights."""
    return output.real_values("on_batch_end") if isinstance(output, Logits) else output.detach()


def _as_count(count: torch.Tensor | float, loss: torch.Tensor, samples: int) -> torch.Tensor:
    """Convert the count to a float tensor on the device; a filler (without samples) counts 0."""
    if samples == 0:
        return torch.zeros((), device=loss.device)
    if isinstance(count, torch.Tensor):
        return count.detach().to(loss.device, torch.float32).reshape(())
    return torch.full((), float(count), device=loss.device)


def _share(part: torch.Tensor | float, total: torch.Tensor) -> torch.Tensor:
    """Return part / total, or 0 if nothing was counted."""
    return torch.where(total > 0, part / total.clamp(min=torch.finfo(torch.float32).tiny), torch.zeros_like(total))
