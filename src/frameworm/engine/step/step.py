"""The step: the only place where a model learns.

1. For each micro-batch: forward under the run's precision, loss, backward. Ranks synchronise in the last backward only.
2. The gradients are weighed by count, so that k micro-batches on w ranks give what one large batch would.
3. Unscale, clip, update, schedule, clear.
Nothing here asks the device for a value: the loss stays where it is and is read some steps later.
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
from frameworm.engine.step.probe import GradientProbe
from frameworm.errors import ModelError
from frameworm.numerics.state import Named, StepTensors
from frameworm.observe.clocks.phases import BACKWARD, COMMUNICATION_EXPOSED, FORWARD, OPTIMIZER, StepClock
from frameworm.parallel.strategy import Strategy

# One step of so many is not worth a compilation of its own.
_RARE = 10


class StepResult:
    """What a step leaves behind; the tensors are on the device."""

    __slots__ = ("count", "counts_samples", "loss")

    def __init__(self, loss: torch.Tensor, count: torch.Tensor | float, counts_samples: bool = False) -> None:
        self.loss = loss  # mean over this rank's samples (or whatever the loss counts)
        self.count = count
        self.counts_samples = counts_samples


class SeenBatch(NamedTuple):
    """A micro-batch of a step as callbacks see it; the tensors are on the device."""

    batch: Any
    outputs: Any  # what the model returned; None where loss_fn(model, batch) calls it, or it returns its loss alone
    loss: torch.Tensor


class GradientMethod(Protocol):
    """Another way to compute the gradients of a step, such as in pieces that fit into memory."""

    def gradients(self, step: TrainStep, batch: StepBatch) -> tuple[StepResult, torch.Tensor | None]:
        """As `TrainStep.gradients`."""


class StepWatch(Protocol):
    """Looks at steps while they run."""

    def watch(self, step: TrainStep, batch: StepBatch) -> StepResult:
        """As `TrainStep.compute`."""


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
        self.halving: GradientMethod | None = None
        self.probe: GradientProbe | None = None
        self.uncompiled: Callable[[], AbstractContextManager[object]] | None = None  # the compiler's, if there is one
        self._passed, self._short, self._most_samples = 0, 0, 0
        self._first_sizes: list[tuple[torch.Size, ...]] = []
        self.seen: list[SeenBatch] | None = None  # a list: micro-batches of the last step are kept for callbacks
        self.flops: StepWatch | None = None  # counts the arithmetic of an early step, then takes itself away

    def run(self, step: int, batch: StepBatch) -> StepResult:
        """Train on one step's micro-batches; `step` is the number of attempted steps before this one."""
        if self.update.follow():
            self.wrapped = self.strategy.follow(self.model, self.update.optimizer) or self.wrapped
        self.count_step(batch)
        self.update.schedule.before_step(step)
        if self.update.halves is not None:
            self.update.halves.follow()
        result = self.compute(batch) if self.flops is None else self.flops.watch(self, batch)
        if self._after_step is not None and self._after_step(self.model, step + 1):
            self._mark(COMMUNICATION_EXPOSED)
        self.update.end_step()
        return result

    def compute(self, batch: StepBatch) -> StepResult:
        """What the device does in a step: gradients and update, at the rates that are set."""
        result, factor = self.gradients(batch) if self.halving is None else self.halving.gradients(self, batch)
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
            self.probe(factor, None if self.scaler is None else self.scaler._scale, self.update)
        self.update.apply(factor)
        self._mark(OPTIMIZER)
        return result

    def tensors(self) -> StepTensors:
        """Everything that a step changes on the device: parameters, buffers, optimizer state and loss scale."""
        strategy, update = self.strategy, self.update
        parameters = {**dict(strategy.named_parameters(self.model)), **strategy.beside.parameters}
        buffers = dict(self.model.named_buffers())
        buffers.update((f"loss {place}", item) for place, item in enumerate(strategy.beside.buffers()))

        def others() -> Named:
            scaler, halves = self.scaler, update.halves
            found = {} if scaler is None else {"scale": scaler._scale, "growth": scaler._growth_tracker}
            found.update({} if halves is None else {f"half {place}": half for place, half in enumerate(halves.tensors)})
            averages = {} if update.averages is None else update.averages.tensors
            found.update({f"average {name}": average for name, average in averages.items()})
            return {name: tensor for name, tensor in found.items() if tensor is not None}

        # With several ranks that is this rank's part of the state.
        optimizer = strategy.given(update.optimizer)
        return StepTensors(parameters.items(), buffers.items(), optimizer, others)

    def meet_beside(self) -> None:
        """Average the gradients of what the loss learns, which the strategy does not see."""
        if self._acts_beside and self._world_size > 1:
            held = [item for item in self.update.parameters if item.requires_grad and id(item) in self._beside]
            self.strategy.average_beside(held)
            self._mark(COMMUNICATION_EXPOSED)

    @contextlib.contextmanager
    def in_precision(self, precision: Precision) -> Iterator[None]:
        """Compute gradients in another precision, from the parameters themselves."""
        usual = self._autocast, self.scaler, self.update.halves
        self._autocast, self.scaler, self.update.halves = precision.autocast, precision.scaler, None
        try:
            yield
        finally:
            self._autocast, self.scaler, self.update.halves = usual

    def gradients(
        self, batch: StepBatch, meet: Callable[[], None] | None = None
    ) -> tuple[StepResult, torch.Tensor | None]:
        """Forward and backward of all micro-batches.

        Args:
            meet: Averages over the ranks in place of the strategy: before it is called no rank waits for another.

        Returns:
            The result, and what the gradients must still be multiplied with (None: nothing).
        """
        halves = self.update.halves
        if self.seen is not None:
            self.seen.clear()
        nothing = contextlib.nullcontext()
        with self._as_written(batch) or nothing, nothing if halves is None else halves.in_place():
            if len(batch.batches) == 1 and meet is None:
                return self._only(batch.batches[0], batch)
            return self._several(batch, meet)

    def _as_written(self, batch: StepBatch) -> AbstractContextManager[object] | None:
        """Leaves the compiler out where it would compile for one step; None: it should not be left out.

        At its first step a model may still set itself up, and whatever it sets then would have it compiled twice. The
        short last step of an epoch has a shape of its own, unless short ones are common.
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
        """Count a step, which a graph may make."""
        self._passed += 1
        self._most_samples = max(self._most_samples, batch.global_samples)
        self._short += batch.global_samples < self._most_samples

    @contextlib.contextmanager
    def marking(self, mark: Callable[[str], None] | None) -> Iterator[None]:
        """Tell the borders between phases to `mark` instead of the clock; None: to nobody."""
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
        if self.seen is not None and samples:  # a filler is no batch of the user's
            self.seen.append(_seen(micro, computed))
        return computed.loss, computed.count

    def _backward(self, loss: torch.Tensor) -> None:
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()
        self._mark(BACKWARD)

    def _add_backward(self, loss: torch.Tensor) -> None:
        """One of several: what is in half precision is added up in fp32."""
        self._backward(loss)
        if self.update.halves is not None:
            self.update.halves.collect()

    def _only(self, micro: Any, batch: StepBatch) -> tuple[StepResult, torch.Tensor | None]:
        """A single micro-batch: the mean loss is the objective, up to the other ranks' counts."""
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
        """Accumulation: the gradients of all micro-batches add up, the last one synchronises, or `meet` does."""
        last = len(batch.batches) - (1 if meet is None else 0)
        loss_sum: torch.Tensor | None = None
        counted: torch.Tensor | None = None
        for index, (micro, samples) in enumerate(zip(batch.batches, batch.samples)):
            if index < last:
                with self.strategy.no_sync():
                    loss, count = self._micro(micro, samples, batch)
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

    def _micro(self, micro: Any, samples: int, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        loss, count = self._forward(micro, samples)
        if count is None:
            self._add_backward(loss * (samples * self._world_size / self._samples(batch)))
            return loss, None
        # How much all micro-batches count together is known only after the last: weigh against a constant now, and
        # let the update multiply by what is missing.
        counted = _as_count(count, loss, samples)
        self._add_backward(loss * (counted / self._reference(batch)))
        return loss, counted

    def _over_ranks(self, counted: torch.Tensor) -> torch.Tensor:
        """The count of all ranks; this rank has nothing to do until all have come."""
        total = counted.clone()
        if self._world_size > 1:
            self.strategy.sum_over_ranks(total)
            self._mark(COMMUNICATION_EXPOSED)
        return total

    def _reference(self, batch: StepBatch) -> float:
        """A count of the right size, the same on all ranks, that keeps scaled gradients in range."""
        return float(self._samples(batch))

    def _samples(self, batch: StepBatch) -> int:
        """The samples whose gradients are averaged: those of all ranks, or this one's own if ranks go alone."""
        return batch.global_samples if self._shares_gradients else max(batch.local_samples, 1)


def _seen(micro: Any, computed: Computed) -> SeenBatch:
    """Without their graph, which would keep all activations until the step's end."""
    if is_planned(micro):
        micro = {name: item for name, item in micro.items() if name != PLAN}
    return SeenBatch(micro, map_tensors(computed.output, _cut_loose), computed.loss.detach())


@torch.no_grad()
def _cut_loose(output: torch.Tensor) -> torch.Tensor:
    """A model's output as it is now: logits that were put off would be computed with the weights after the update."""
    return output.real_values("on_batch_end") if isinstance(output, Logits) else output.detach()


def _as_count(count: torch.Tensor | float, loss: torch.Tensor, samples: int) -> torch.Tensor:
    """The count as a float tensor on the device; a filler (no samples of its own) counts nothing."""
    if samples == 0:
        return torch.zeros((), device=loss.device)
    if isinstance(count, torch.Tensor):
        return count.detach().to(loss.device, torch.float32).reshape(())
    return torch.full((), float(count), device=loss.device)


def _share(part: torch.Tensor | float, total: torch.Tensor) -> torch.Tensor:
    """part / total, and 0 where nothing was counted."""
    return torch.where(total > 0, part / total.clamp(min=torch.finfo(torch.float32).tiny), torch.zeros_like(total))
