"""Batches that stay where they are: what shape one has, a copy of its own for a graph to read, and filling it anew."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from frameworm.data.prefetch import tensors_in
from frameworm.data.steps import StepBatch
from frameworm.engine.graphs import CaptureError


def signature(batch: Any) -> Hashable:
    """What two batches must have in common to be served by the same recorded step.

    Raises:
        CaptureError: The batch holds something other than tensors and plain values.
    """
    kind = type(batch)
    if kind is dict:
        return tuple([(name, signature(item)) for name, item in batch.items()])
    if isinstance(batch, torch.Tensor):
        return batch.shape, batch.dtype
    if kind is tuple or kind is list:
        return tuple([signature(item) for item in batch])
    if batch is None or isinstance(batch, (bool, int, float, str)):
        return batch  # a constant of the recorded step
    if isinstance(batch, Mapping):
        return tuple([(name, signature(item)) for name, item in batch.items()])
    if isinstance(batch, (tuple, list)):
        return (kind, *[signature(item) for item in batch])
    raise CaptureError(f"the batch holds a {kind.__name__}, and only tensors can be filled anew for each replay")


def own_copy(batch: StepBatch) -> StepBatch:
    """The same step with tensors of its own."""
    return StepBatch([_cloned(micro) for micro in batch.batches], list(batch.samples), batch.global_samples)


def fill(inputs: list[torch.Tensor], batch: StepBatch) -> None:
    """Copy a batch into the tensors of another of the same signature."""
    first = batch.batches[0]
    if len(batch.batches) == 1 and type(first) is dict:
        given = list(first.values())
        if len(given) != len(inputs):  # nested, or with plain values among the tensors
            given = list(tensors_in(first))
    else:
        given = [tensor for micro in batch.batches for tensor in tensors_in(micro)]
    if len({tensor.dtype for tensor in inputs}) == 1:
        torch._foreach_copy_(inputs, given, non_blocking=True)
        return
    # Together in one kernel only if they are of one type.
    for dtype in dict.fromkeys(tensor.dtype for tensor in inputs):
        places = [place for place, tensor in enumerate(inputs) if tensor.dtype == dtype]
        targets, sources = [inputs[place] for place in places], [given[place] for place in places]
        torch._foreach_copy_(targets, sources, non_blocking=True)


def _cloned(batch: Any) -> Any:
    kind = type(batch)
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if kind is dict:
        return {name: _cloned(item) for name, item in batch.items()}
    if kind is tuple or kind is list:
        return kind(_cloned(item) for item in batch)
    return copy.deepcopy(batch)
