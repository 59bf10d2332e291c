"""Static batches for CUDA graphs: their signature, a copy for a graph to read, and refilling it."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from frameworm.data.prefetch import tensors_in
from frameworm.data.steps import StepBatch
from frameworm.engine.step.graphs import CaptureError
from frameworm.torch_private.tensors import foreach_copy_


def signature(batch: Any) -> Hashable:
    """Return what two batches must have in common to share a recorded step.

    Raises:
        CaptureError: If the batch holds something other than tensors and plain values.
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
    raise CaptureError(f"the batch holds a {kind.__name__}, and only tensors can be refilled for each replay")


def own_copy(batch: StepBatch) -> StepBatch:
    """Copy a step's batch with its tensors."""
    return StepBatch([_cloned(micro) for micro in batch.batches], list(batch.samples), batch.global_samples)


class StaticInputs:
    """The tensors that a recorded step reads.

    Args:
        batch: The batch that holds them.
    """

    def __init__(self, batch: StepBatch) -> None:
        self.tensors = _tensors_of(batch)
        first = batch.batches[0]
        # Most batches are one flat dict, which needs no search for its tensors.
        alone = len(batch.batches) == 1 and type(first) is dict
        self._flat = alone and all(isinstance(value, torch.Tensor) for value in first.values())
        # One kernel copies all tensors of one dtype.
        self._groups: list[tuple[list[torch.Tensor], list[int]]] = []
        for dtype in dict.fromkeys(tensor.dtype for tensor in self.tensors):
            places = [place for place, tensor in enumerate(self.tensors) if tensor.dtype == dtype]
            self._groups.append(([self.tensors[place] for place in places], places))

    def fill(self, batch: StepBatch) -> None:
        """Copy a batch of the same signature into them."""
        given = list(batch.batches[0].values()) if self._flat else _tensors_of(batch)
        for targets, places in self._groups:
            foreach_copy_(targets, [given[place] for place in places], non_blocking=True)


def _tensors_of(batch: StepBatch) -> list[torch.Tensor]:
    return [tensor for micro in batch.batches for tensor in tensors_in(micro)]


def _cloned(batch: Any) -> Any:
    kind = type(batch)
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if kind is dict:
        return {name: _cloned(item) for name, item in batch.items()}
    if kind is tuple or kind is list:
        return kind(_cloned(item) for item in batch)
    return copy.deepcopy(batch)
