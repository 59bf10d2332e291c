"""Count the model's FLOPs in an early step, and compute the fraction of the device's peak that later steps reach.

The second step is counted (the first pays for compiling), and also the third if batches do not report their tokens, so
that one odd width matters less. Counting changes no results; it costs a few microseconds per operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from frameworm.data.batches.real_tokens import PLAN
from frameworm.data.steps import StepBatch
from frameworm.engine.step.step import StepResult, TrainStep
from frameworm.hardware.devices import peak_flops
from frameworm.observe.clocks import phases
from frameworm.observe.flops.counter import BACKWARD, FORWARD, FlopCount, FlopCounter
from frameworm.records.observations import Flops, MatrixProduct, ModelFlops
from frameworm.records.statistics import StepAggregate

_FIRST, _LAST = 2, 3
_PRODUCTS = 8

Dry = Callable[[Any], FlopCount]


class FlopWatch:
    """Counts the FLOPs of one rank's step.

    Args:
        device: The training device.
        mark: Receives the phase boundaries.
        dry: Counts a batch without running it, for steps whose operations cannot be observed; None if they can.
        unseen: Why FLOPs cannot be counted at all; None if they can.

    Attributes:
        counted: Called once, when the count is complete.
        notes: What the summary says about the count.
    """

    def __init__(
        self,
        device: torch.device,
        mark: Callable[[str], None],
        dry: Dry | None = None,
        unseen: str | None = None,
    ) -> None:
        self._device = device
        self._mark = mark
        self._dry = dry
        self.counted: Callable[[], None] = lambda: None
        self._steps = self._counted_steps = 0
        self._total = FlopCount()
        self._samples = 0
        self._tokens, self._padded, self._squared, self._padded_squared = 0, 0, 0.0, 0.0
        self._real = 0.0  # products of real tokens, if only a mask identifies them
        self.over = unseen is not None
        self.model: ModelFlops | None = None
        self.precision: str | None = None
        self.peak_per_s: float | None = None
        self.notes: list[str] = [f"the model's FLOPs were not counted: {unseen}"] if unseen else []

    def watch(self, step: TrainStep, batch: StepBatch) -> StepResult:
        """Compute a step, and count it if it is one of those to count."""
        self._steps += 1
        if self._steps < _FIRST or not batch.local_samples:
            return step.compute(batch)
        if self._dry is None:
            result = self._count(step, batch)
        else:
            result = step.compute(batch)
            for micro in batch.batches:
                self._take(self._dry(micro), micro)
        self._counted_steps += 1
        self._samples += batch.local_samples
        if batch.tokens is not None:
            padded = batch.padded_tokens or batch.tokens
            self._tokens += batch.tokens
            self._padded += padded
            self._squared += batch.tokens**2 / batch.local_samples
            self._padded_squared += padded**2 / batch.local_samples
        self._settle()
        if self._steps >= _LAST or self._tokens:
            step.flops = None
            self.over = True
            self.counted()
        return result

    def _count(self, step: TrainStep, batch: StepBatch) -> StepResult:
        counter, micros = FlopCounter(), iter(batch.batches)

        def mark(name: str) -> None:
            self._mark(name)
            if name == phases.FORWARD:
                counter.phase = BACKWARD
            elif name == phases.BACKWARD:
                # Next comes another micro-batch, or the optimizer, which is not the model's work.
                counter.phase = FORWARD
                count, counter.count = counter.count, FlopCount()
                self._take(count, next(micros, None))

        with step.marking(mark), counter:
            return step.compute(batch)

    def _take(self, count: FlopCount, micro: Any) -> None:
        count.settle()
        self._real += count.products * _real_share(micro)
        self._total.merge(count)

    def _settle(self) -> None:
        total = self._total
        if total.problem is not None or not total.total or not self._samples:
            reason = total.problem or "none of its operations has a formula"
            self.notes = [f"the model's FLOPs were not counted: {reason}"]
            self.model = None
            return
        attention = total.attention + total.masked_attention
        self.model = ModelFlops((self._real + attention) / self._samples)
        if self._tokens:
            masked = total.masked_attention / self._squared
            self.model = ModelFlops(
                self.model.per_sample, total.products / self._padded, total.attention / self._padded_squared + masked
            )
        self.precision, self.peak_per_s = precision_of(total.main_type, self._device)
        if total.uncounted:
            names = ", ".join(sorted(total.uncounted)[:5])
            self.notes = [
                f"operations without a FLOP formula were not counted: {names}; "
                "torch.utils.flop_counter.register_flop_formula gives them one"
            ]

    def mfu(self, samples: float, tokens: float | None, squared_tokens: float | None, seconds: float) -> float | None:
        """Fraction of this device's peak that this rank's steps reach; None if unknown."""
        if self.model is None or self.peak_per_s is None or seconds <= 0:
            return None
        return self.model.of(samples, tokens, squared_tokens) / seconds / self.peak_per_s

    def own_flops(self, aggregate: StepAggregate) -> float | None:
        """FLOPs of this rank's measured steps."""
        return None if self.model is None else aggregate.measured_flops(self.model)

    def _attention_share(self, aggregate: StepAggregate) -> float:
        assert self.model is not None
        own, tokens = aggregate.measured_flops(self.model), aggregate.measured_tokens
        if self.model.per_token is not None and tokens is not None:
            return 1 - self.model.per_token * tokens / own
        attention = self._total.attention + self._total.masked_attention
        return attention / (self._real + attention)

    def result(self, aggregate: StepAggregate, flops: float, world_size: int) -> Flops | None:
        """Build the record; `flops` is the sum over the measured steps of all ranks."""
        steps, seconds = aggregate.measured_steps, aggregate.measured_training_s
        if self.model is None or not steps:
            return None
        total = self._total
        largest = sorted(total.shapes.items(), key=lambda item: -item[1])[:_PRODUCTS]
        return Flops(
            per_step=flops / steps,
            per_s=flops / seconds if seconds > 0 else None,
            attention_share=self._attention_share(aggregate),
            precision=self.precision,
            peak_per_s=None if self.peak_per_s is None else self.peak_per_s * world_size,
            products=[MatrixProduct(*shape, share=part / total.total) for shape, part in largest],
            model=self.model,
        )

    def expected(self, world_size: int) -> Flops | None:
        """Estimate while the run is going on, assuming that later steps and other ranks are like the counted ones."""
        if self.model is None:
            return None
        tokens = (self._tokens, self._squared) if self._tokens else (None, None)
        return Flops(
            per_step=self.model.of(self._samples, *tokens) / self._counted_steps * world_size,
            precision=self.precision,
            peak_per_s=None if self.peak_per_s is None else self.peak_per_s * world_size,
            model=self.model,
        )


def precision_of(main_type: str | None, device: torch.device) -> tuple[str | None, float | None]:
    """Return the precision in which a device multiplies a dtype, and its dense peak."""
    if main_type is None or device.type != "cuda":
        return main_type, None
    name = torch.cuda.get_device_name(device)
    if main_type == "fp32" and torch.backends.cuda.matmul.allow_tf32:
        peak = peak_flops(name, "tf32")
        if peak is not None:
            return "tf32", peak
    return main_type, peak_flops(name, main_type)


def _real_share(micro: Any) -> float:
    """Fraction of the computed tokens that are not padding, by the batch's `attention_mask`; 1 without one."""
    mask = micro.get("attention_mask") if isinstance(micro, Mapping) else None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.is_floating_point() or not mask.numel():
        return 1.0
    computed = len(micro[PLAN]["places"]) if PLAN in micro else mask.numel()
    return float((mask != 0).sum()) / computed
