"""Batches that come from worker processes in one piece of shared memory.

Every tensor that crosses needs its own file descriptor, which the training process must request over a socket while it
should launch kernels. Here all tensors of a batch lie in one block, which is also page-locked as one, and whose memory
is reused unless torch's pinning thread handles the batches.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from frameworm.data.batches.lent_memory import HEAD_BYTES, Piece, Pieces, arrived, forget, page_lock
from frameworm.data.batches.sizes import changed_parts
from frameworm.torch_private.loaders import live_iterator
from frameworm.torch_private.tensors import shared_memory

_ALIGNED_BYTES = 64
# For larger batches the extra copy takes longer than sending their tensors separately.
_MOST_BYTES = 16 * 2**20


class _Place(NamedTuple):
    """Where a tensor lies in the block."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int


class _Number(NamedTuple):
    """Placeholder in a batch for a tensor that lies in the block."""

    number: int


class Block:
    """A batch in transit: its structure, and its tensors in one block.

    Args:
        batch: The structure, with a `_Number` in place of each tensor.
        memory: The bytes of the block.
        places: Where each tensor lies in it.
        piece: The reusable piece that the block lies in; None if the memory is the batch's own.
        use: See `Pieces`.
    """

    def __init__(
        self, batch: Any, memory: Tensor, places: list[_Place], piece: Piece | None = None, use: Hashable = None
    ) -> None:
        self._batch, self._memory, self._places = batch, memory, places
        self._piece, self._use = piece, use
        self._name: Hashable = None

    def __getstate__(self) -> tuple[Any, ...]:
        piece = self._piece
        if piece is None:
            return self._batch, self._places, self._use, None, self._memory
        memory = None if piece.has_crossed else self._memory
        piece.has_crossed = True
        return self._batch, self._places, self._use, (os.getpid(), piece.number), memory

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._batch, self._places, self._use, self._name, memory = state
        self._piece = None
        self._memory = memory if self._name is None else arrived(self._use, self._name, memory)

    def pin_memory(self) -> Block:
        """Page-lock the block; torch's loader calls this on each batch."""
        self._memory, self._name = self._memory.pin_memory(), None
        return self

    def open(self, *, page_locked: bool = False) -> Any:
        """The original batch; `page_locked`: page-lock its memory if that is a reusable piece."""
        if page_locked and self._name is not None:
            page_lock(self._use, self._name)
        storage = self._memory.untyped_storage()
        return _put_back(self._batch, [_tensor_at(place, storage) for place in self._places])


class InOneBlock:
    """Wraps a collate function so that each batch comes in one block if that pays.

    Args:
        collate: The function.
        lends: Put blocks in reusable memory; not if torch's pinning thread handles the batches.
    """

    def __init__(self, collate: Callable[[Any], Any], *, lends: bool = False) -> None:
        self._collate = collate
        self.pieces = Pieces() if lends else None

    def __call__(self, rows: Any) -> Any:
        """Collate samples and return the batch, or a `Block` of it."""
        batch = self._collate(rows)
        tensors: list[Tensor] = []
        parts = _taken_out(batch, tensors)
        places, size_bytes = [], 0 if self.pieces is None else HEAD_BYTES
        for tensor in tensors:
            dense = torch.empty_like(tensor, device="meta")  # the same strides without gaps
            places.append(_Place(tensor.dtype, tensor.size(), dense.stride(), size_bytes))
            size_bytes += -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        if len(tensors) < (2 if self.pieces is None else 1) or size_bytes > _MOST_BYTES:
            return batch
        piece = None if self.pieces is None else self.pieces.take(size_bytes)
        if piece is None:
            memory = shared_memory(size_bytes)
        else:
            memory = piece.memory
        for tensor, place in zip(tensors, places):
            _tensor_at(place, memory.untyped_storage()).copy_(tensor)
        return Block(parts, memory, places, piece, None if self.pieces is None else self.pieces.use)


class BlockLoader(DataLoader[Any]):
    """A loader whose collate function is wrapped by `InOneBlock`; it unpacks blocks on arrival.

    Attributes:
        page_locks: Page-lock reusable memory. The consumer must then hold a batch until it has been copied: torch
            does not track when a device has read memory that torch did not page-lock itself.
    """

    page_locks = False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        together: Any = self.collate_fn
        pieces = together.pieces
        # Persistent workers belong to the loader, others to this iteration.
        starts = pieces is not None and live_iterator(self) is None
        if starts:
            pieces.begin()
        batches = _Opened(super().__iter__(), self.page_locks)
        if starts:
            weakref.finalize(self if self.persistent_workers else batches, forget, pieces.use)
        return batches


class _Opened:
    """The unpacked batches of a loader."""

    def __init__(self, batches: Iterator[Any], page_locks: bool) -> None:
        self._batches, self._page_locks = batches, page_locks

    def __iter__(self) -> _Opened:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        return batch.open(page_locked=self._page_locks) if type(batch) is Block else batch


def _tensor_at(place: _Place, storage: torch.UntypedStorage) -> Tensor:
    """A tensor in the block, made without `view`: the compiler would inspect the base of a view."""
    offset = place.offset_bytes // place.dtype.itemsize
    return torch.empty(0, dtype=place.dtype).set_(storage, offset, place.size, place.stride)


def _fits(item: Any) -> bool:
    plain = type(item) is Tensor and item.is_cpu and item.layout == torch.strided and not item.is_quantized
    return plain and not (item.requires_grad or item.is_conj() or item.is_neg())


def _taken_out(item: Any, tensors: list[Tensor]) -> Any:
    """Replace each tensor in plain containers by a `_Number` and append it to `tensors`."""
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
