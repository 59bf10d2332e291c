"""A moving average of the weights (EMA): after every update `average += (1 - decay) * (weights - average)`.

The average starts from the initial weights and lives on the rank that updates them: each rank averages its own shard,
or under zero1 the parameters that it updates. Buffers are not averaged; evaluation uses the model's own. Half-precision
weights are averaged in float32, so that small changes are not lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from frameworm.parallel.shards import HeldState, is_part, like_part, loaded, own_part, shard_of
from frameworm.parallel.strategy import Strategy
from frameworm.torch_private.optimizers import fused_sgd_
from frameworm.torch_private.tensors import foreach_copy_


class AveragedWeights:
    """Moving averages of the trained parameters.

    Args:
        decay: Weight of the old average in each update, between 0 and 1.
        model: The model as the strategy has placed it.
        optimizer: The optimizer that updates it.
        strategy: Knows which part of which parameters this rank updates.
    """

    def __init__(self, decay: float, model: nn.Module, optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
        self.decay = decay
        self._optimizer = optimizer
        self._strategy = strategy
        self._named = dict(strategy.named_parameters(model))
        self._averaged: dict[str, nn.Parameter] = {}  # the same on all ranks, regardless of which holds the average
        self._own: dict[str, Tensor] = {}
        self._batches: list[tuple[list[Tensor], list[nn.Parameter]]] = []

    @property
    def note(self) -> str:
        """What the summary says about validation."""
        steps = round(1 / (1 - self.decay))
        return (
            f"validation scores averaged weights (training.ema: {self.decay:g}, about the last {steps:,} steps); the "
            "model keeps the trained ones"
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The averages that this rank holds, by the names of their parameters; not copied."""
        return self._own

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Also average parameters that have become trainable; each starts from its current value."""
        trained = {id(item) for item in parameters if item.requires_grad}
        names = [name for name, item in self._named.items() if id(item) in trained]
        self._begin(name for name in names if name not in self._averaged)

    @torch.no_grad()
    def _begin(self, names: Iterable[str]) -> None:
        for name in names:
            parameter = self._named[name]
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            self._averaged[name] = parameter
            if self._strategy.owner_of(self._optimizer, parameter) in (None, self._strategy.rank):
                part = own_part(parameter)
                kind = torch.promote_types(part.dtype, torch.float32)
                self._own[name] = torch.empty_like(part, dtype=kind, requires_grad=False).copy_(part)
        batches: dict[Any, tuple[list[Tensor], list[nn.Parameter]]] = {}
        for name, average in self._own.items():
            batch = batches.setdefault((average.device, average.dtype), ([], []))
            batch[0].append(average)
            batch[1].append(self._averaged[name])
        self._batches = list(batches.values())

    @torch.no_grad()
    def update(self, skipped: Tensor | None) -> None:
        """Average in the weights after an update, without synchronizing, so that a CUDA graph can record it.

        Args:
            skipped: 1 if the update was skipped, in which case this is skipped too; None if it was not.
        """
        for averages, parameters in self._batches:
            values = [_laid_out(own_part(item), average) for item, average in zip(parameters, averages)]
            averages = [_real(item) for item in averages]
            flag = None if skipped is None else skipped.to(averages[0].device)
            # torch's fused SGD does this in one kernel: it reads both once, writes once, and obeys a flag on the
            # device. With the weights as gradients to maximize and a weight decay of 1, it computes average -= lr *
            # (average - weights).
            fused_sgd_(
                averages, [_real(item) for item in values], [], weight_decay=1.0, momentum=0.0, lr=1 - self.decay,
                dampening=0.0, nesterov=False, maximize=True, is_first_step=False, grad_scale=None, found_inf=flag,
            )  # fmt: skip

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages into the model; on exit its weights are restored bit for bit.

        All ranks must enter. It copies the weights, which needs as much memory as gradients do during a step.
        """
        with torch.no_grad():
            parts = [own_part(item) for item in self._averaged.values()]
            kept = [item.clone() for item in parts]
            own = [own_part(self._averaged[name]) for name in self._own]
        try:
            with torch.no_grad():
                if own:
                    foreach_copy_(own, list(self._own.values()))
                self._strategy.send_from_owners(self._optimizer, list(self._averaged.values()))
            yield
        finally:
            if parts:
                with torch.no_grad():
                    foreach_copy_(parts, kept)

    def held_state(self) -> HeldState:
        """Return what this rank stores in a checkpoint, under `ema`."""
        state = {
            name: like_part(average, parameter) if is_part(parameter := self._averaged[name]) else average
            for name, average in self._own.items()
        }
        owned = {name for name in state if self._strategy.owner_of(self._optimizer, self._averaged[name]) is not None}
        return HeldState(
            {"ema": {name: value for name, value in state.items() if name not in owned}},
            {"ema": {name: state[name] for name in owned}} if owned else {},
        )

    @torch.no_grad()
    def load_state(self, saved: dict[str, Any] | None) -> list[str]:
        """Continue with the averages of a checkpoint.

        Args:
            saved: The averages, as stored tensors; None if the checkpoint has none, in which case the averages start
                from the model's current weights.

        Returns:
            Notes for the user.

        Raises:
            ValueError: If they belong to other parameters.
        """
        values = saved or {}
        unknown = [name for name in values if name not in self._named]
        if unknown:
            raise ValueError(f"it averages {unknown[0]}, which is unknown here")
        self._begin(name for name in values if name not in self._averaged)
        for name, average in self._own.items():
            parameter = self._averaged[name]
            if name not in values:
                average.copy_(own_part(parameter))
            elif getattr(values[name], "shape", None) != parameter.shape:
                raise ValueError(f"its average of {name} has another shape")
            else:
                value = values[name]
                average.copy_(shard_of(value, parameter).to_local() if is_part(parameter) else loaded(value))
        if saved is None:
            return ["the checkpoint holds no averaged weights: the average starts with the weights that it holds"]
        return []

    @torch.no_grad()
    def restart(self) -> None:
        """Start over from the model's current weights."""
        for name, average in self._own.items():
            average.copy_(own_part(self._averaged[name]))

    @torch.no_grad()
    def take_over(self, earlier: AveragedWeights) -> None:
        """Continue from the averages of an earlier training of the same model."""
        for name, average in self._own.items():
            before = earlier._own.get(name)
            if before is not None and before.shape == average.shape:
                average.copy_(before)


def _laid_out(value: Tensor, average: Tensor) -> Tensor:
    """Return the value with the dtype and memory layout of its average, as the kernel requires."""
    if value.dtype == average.dtype and value.stride() == average.stride():
        return value
    return torch.empty_like(average).copy_(value)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
