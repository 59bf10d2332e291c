"""Batches that come from loader processes in one piece of shared memory.

Every tensor that crosses takes a file descriptor of its own, which the training process has to ask for over a socket
while it should launch kernels. Here the tensors of a batch lie in one block, which is also page-locked as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from frameworm.data.batches.sizes import changed_parts

_ALIGNED_BYTES = 64
# A larger batch is copied once more for longer than its tensors take to cross.
_MOST_BYTES = 16 * 2**20


class _Place(NamedTuple):
    """Where in the block a tensor lies."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int


class _Number(NamedTuple):
    """Stands in a batch for a tensor that lies in the block."""

    number: int


class Block:
    """A batch on its way: its parts, and its tensors in one block."""

    def __init__(self, batch: Any, memory: Tensor, places: list[_Place]) -> None:
        self._batch, self._memory, self._places = batch, memory, places

    def pin_memory(self) -> Block:
        """As torch's loader asks of a batch."""
        self._memory = self._memory.pin_memory()
        return self

    def open(self) -> Any:
        """The batch as it was."""
        storage = self._memory.untyped_storage()
        return _put_back(self._batch, [_tensor_at(place, storage) for place in self._places])


class InOneBlock:
    """Puts batches together as a function does, each in one block where that pays."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, rows: Any) -> Any:
        """The batch, or a `Block` of it."""
        batch = self._collate(rows)
        tensors: list[Tensor] = []
        parts = _taken_out(batch, tensors)
        places, size_bytes = [], 0
        for tensor in tensors:
            dense = torch.empty_like(tensor, device="meta")  # strides as they are, without gaps
            places.append(_Place(tensor.dtype, tensor.size(), dense.stride(), size_bytes))
            size_bytes += -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        if len(tensors) < 2 or size_bytes > _MOST_BYTES:
            return batch
        storage = torch.UntypedStorage._new_shared(size_bytes, device="cpu")
        for tensor, place in zip(tensors, places):
            _tensor_at(place, storage).copy_(tensor)
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        return Block(parts, memory, places)


class BlockLoader(DataLoader[Any]):
    """A loader whose function `InOneBlock` has wrapped: opens what arrives."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return map(_opened, super().__iter__())


def _opened(batch: Any) -> Any:
    return batch.open() if type(batch) is Block else batch


def _tensor_at(place: _Place, storage: torch.UntypedStorage) -> Tensor:
    """No view of anything: the compiler would look at what it is one of."""
    offset = place.offset_bytes // place.dtype.itemsize
    return torch.empty(0, dtype=place.dtype).set_(storage, offset, place.size, place.stride)


def _fits(item: Any) -> bool:
    plain = type(item) is Tensor and item.is_cpu and item.layout == torch.strided and not item.is_quantized
    return plain and not (item.requires_grad or item.is_conj() or item.is_neg())


def _taken_out(item: Any, tensors: list[Tensor]) -> Any:
    """Plain containers with numbers in place of their tensors, which are added to a list; the rest as it is."""
    if _fits(item):
        number = next((place for place, known in enumerate(tensors) if known is item), len(tensors))
        if number == len(tensors):
            tensors.append(item)
        return _Number(number)
    return changed_parts(item, lambda part: _taken_out(part, tensors))


def _put_back(item: Any, tensors: list[Tensor]) -> Any:
    if type(item) is _Number:
        return tensors[item.number]
    return changed_parts(item, lambda part: _put_back(part, tensors))
