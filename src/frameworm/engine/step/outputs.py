"""Collect a model's outputs for a whole data set from all ranks, in the order of the samples."""

from __future__ import annotations

from typing import Any

import torch

from frameworm.data.places import Place
from frameworm.errors import DataError
from frameworm.launch.process_group import gather_objects
from frameworm.torch_private.tensors import tree_flatten, tree_map_only, tree_unflatten

_HALVES = (torch.float16, torch.bfloat16)


def full_precision(value: Any) -> Any:
    """Convert half-precision tensors to fp32, as few metrics support half precision."""
    return tree_map_only(torch.Tensor, lambda item: item.float() if item.dtype in _HALVES else item, value)


def on_host(value: Any) -> Any:
    """Move tensors to the host, detached from their graph."""
    return tree_map_only(torch.Tensor, lambda item: item.detach().cpu(), full_precision(value))


class Outputs:
    """Collects a model's output for each batch; every rank creates one, and all join them."""

    def __init__(self) -> None:
        self._parts: list[tuple[list[Place], Any]] = []

    def add(self, value: Any, places: list[Place]) -> None:
        """Add the output of a batch.

        Args:
            value: A tensor, or tensors in tuples, lists and mappings, on the host. Tensors with one row per sample are
                joined later.
            places: Places of the samples, from `places_of`.
        """
        self._parts.append((places, value))

    def joined(self) -> Any:
        """Join the outputs of all ranks in sample order; None on all ranks but 0. All ranks must call it.

        Tensors are joined along their first dimension. If other dimensions differ, the result is a list with one tensor
        per sample; an item without one row per sample becomes a list with one entry per batch.

        Raises:
            DataError: If there is no batch, or outputs have different numbers of tensors.
        """
        gathered = gather_objects(self._parts)
        if gathered is None:
            return None
        parts = [part for own in gathered for part in own]
        if not parts:
            raise DataError("there is nothing to predict: the loader gave no batch")
        parts.sort(key=lambda part: part[0][:1])
        places = [place for part in parts for place in part[0]]
        order = sorted(range(len(places)), key=places.__getitem__)
        flat = [tree_flatten(value) for _, value in parts]
        leaves, spec = flat[0]
        if any(len(other) != len(leaves) for other, _ in flat):
            raise DataError("the model returns different numbers of tensors for different batches")
        sizes = [len(part[0]) for part in parts]
        columns = [_join([found[place] for found, _ in flat], sizes, order) for place in range(len(leaves))]
        return tree_unflatten(columns, spec)


def _join(values: list[Any], sizes: list[int], order: list[int]) -> Any:
    rows = all(
        isinstance(value, torch.Tensor) and value.dim() and value.size(0) == size for value, size in zip(values, sizes)
    )
    if not rows:
        return values
    if len({value.shape[1:] for value in values}) > 1:
        samples = [row for value in values for row in value]
        return [samples[place] for place in order]
    whole = torch.cat(values)
    return whole if order == list(range(len(order))) else whole[torch.tensor(order)]
