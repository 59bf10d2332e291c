"""A training step in fp64 on a copy of the model: the step's result without rounding errors."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from frameworm.data.prefetch import map_tensors
from frameworm.data.steps import StepBatch
from frameworm.engine.model.precision import Precision
from frameworm.engine.step.loss import LossFunction
from frameworm.engine.step.step import TrainStep
from frameworm.numerics.comparison import Sketches, outputs_of
from frameworm.numerics.sketch import dense
from frameworm.numerics.state import Named, StepTensors
from frameworm.parallel.strategy import Strategy


class PreciseStep:
    """A run's step in fp64 on a copy of its model; `works` becomes False when the model fails in fp64."""

    def __init__(self, step: TrainStep | None, tensors: StepTensors | None) -> None:
        self._step = step
        self._tensors = tensors
        self.works = step is not None

    @classmethod
    def of(cls, eager: TrainStep, loss_fn: Any) -> PreciseStep:
        """Copy a run's step; the result has `works=False` if no copy is possible."""
        strategy = eager.strategy
        if strategy.world_size > 1 or strategy.name != "single" or strategy.beside.parameters:
            return cls(None, None)
        try:
            model = copy.deepcopy(eager.model).double()
            if isinstance(loss_fn, nn.Module):
                loss_fn = copy.deepcopy(loss_fn).double()
        except Exception:  # a model may raise anything
            return cls(None, None)
        alone = Strategy(strategy.device)
        step = copy.copy(eager)
        step.update = copy.copy(eager.update)
        step.update.half_weights = None
        step.model = step.wrapped = model
        step.strategy = alone
        step.loss_function = LossFunction(model, loss_fn, False)
        step.splitter = step.probe = None
        return cls(step, StepTensors(model.named_parameters(), model.named_buffers()))

    def outputs(self, batch: StepBatch, state: Named) -> Sketches | None:
        """Compute the step from a state; None if the model fails in fp64 or memory is short."""
        assert self._step is not None
        assert self._tensors is not None
        step, model = self._step, self._step.model
        try:
            self._tensors.restore(state)
            before = self._tensors.copy()
            with step.in_precision(Precision("off", step.strategy.device)), step.marking(None):
                result, factor = step.gradients(copied(batch, in_fp64=True))
            scale = 1.0 if factor is None else float(factor)
            named = model.named_parameters()
            gradients = {name: dense(item.grad) * scale for name, item in named if item.grad is not None}
            return outputs_of(result.loss, gradients, self._tensors, before)
        except Exception:  # a model or its kernels may raise anything
            self.works = False
            return None
        finally:
            model.zero_grad(set_to_none=True)


def copied(batch: StepBatch, *, in_fp64: bool = False) -> StepBatch:
    """Copy a batch so that a step may change it in place."""

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.float64 if in_fp64 and tensor.is_floating_point() else tensor.dtype, copy=True)

    return replace(batch, batches=[map_tensors(item, copy_of) for item in batch.batches])
