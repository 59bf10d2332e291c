"""Identifies the samples in a batch, regardless of order and padding: a sum of hashes of the samples' content.

It hashes the batch itself, not the loader's plan, so a collate function that drops samples is noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from frameworm.data.batches.packed import IGNORED_LABEL
from frameworm.data.batches.real_tokens import PLAN
from frameworm.data.prefetch import tensors_in

_MODULUS = 2**64


def batch_hash(batch: Any) -> int | None:
    """Return the same number for the same samples, padded, bucketed or packed. Hashes of batches can be added.

    Returns:
        The hash, or None if the samples in the batch cannot be separated.
    """
    samples = _samples_of(batch)
    if samples is None:
        return None
    return sum(_hash(parts) for parts in samples) % _MODULUS


def add_hashes(hashes: Sequence[int | None]) -> int | None:
    """Return the hash of several batches together; None if one is unknown."""
    known = [item for item in hashes if item is not None]
    return sum(known) % _MODULUS if len(known) == len(hashes) else None


def _samples_of(batch: Any) -> list[list[NDArray[Any]]] | None:
    if isinstance(batch, Mapping):
        batch = {name: item for name, item in batch.items() if name != PLAN}
        keys = set(batch)
        if keys == {"labels", "input_ids", "positions", "offsets"}:
            return _packed(batch)
        if keys == {"labels", "input_ids", "lengths"}:
            ids, lengths, labels = (_array(batch[name]) for name in ("input_ids", "lengths", "labels"))
            return [[ids[row, : lengths[row]], labels[row]] for row in range(len(lengths))]
    tensors = list(tensors_in(batch))
    if not tensors or any(item.dim() == 0 or len(item) != len(tensors[0]) for item in tensors):
        return None
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return _rows(tensors, mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None)


def _packed(batch: Mapping[str, torch.Tensor]) -> list[list[NDArray[Any]]]:
    ids, offsets, labels = (_array(batch[name]) for name in ("input_ids", "offsets", "labels"))
    there = [row for row in range(len(labels)) if labels[row] != IGNORED_LABEL]
    return [[ids[offsets[row] : offsets[row + 1]], labels[row]] for row in there]


def _rows(tensors: Sequence[torch.Tensor], mask: torch.Tensor | None) -> list[list[NDArray[Any]]]:
    arrays = [_array(item) for item in tensors]
    kept = None if mask is None else _array(mask) != 0
    return [
        [array[row][kept[row]] if kept is not None and array.shape == kept.shape else array[row] for array in arrays]
        for row in range(len(arrays[0]))
    ]


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    """Convert to a host array; all integers become int64, because their width says nothing about the sample."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16 or tensor.is_complex():
        tensor = tensor.to(torch.float32) if tensor.dtype == torch.bfloat16 else torch.view_as_real(tensor)
    elif not tensor.is_floating_point():
        tensor = tensor.to(torch.int64)
    return tensor.cpu().numpy()


def _hash(parts: Sequence[NDArray[Any]]) -> int:
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(np.ascontiguousarray(part).tobytes())
        state.update(b"|")
    return int.from_bytes(state.digest(), "little")
