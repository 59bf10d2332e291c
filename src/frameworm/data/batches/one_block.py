"""Batches that come from loader processes in one piece of shared memory.

Every tensor that crosses takes a file descriptor of its own, which the training process has to ask for over a socket
while it should launch kernels. Here the tensors of a batch lie in one block, which is also page-locked as one, and
in memory that is used again where nobody else takes the batches on.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.utils.data import DataLoader

from frameworm.data.batches.lent_memory import HEAD_BYTES, Piece, Pieces, arrived, forget, page_lock
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
    """A batch on its way: its parts, and its tensors in one block.

    Args:
        batch: The parts, with a `_Number` in place of each tensor.
        memory: The bytes in which they lie.
        places: Where.
        piece: The memory where it is lent, and not the batch's own.
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
        """As torch's loader asks of a batch."""
        self._memory, self._name = self._memory.pin_memory(), None
        return self

    def open(self, *, page_locked: bool = False) -> Any:
        """The batch as it was; `page_locked`: in memory that the device can read, where that is lent."""
        if page_locked and self._name is not None:
            page_lock(self._use, self._name)
        storage = self._memory.untyped_storage()
        return _put_back(self._batch, [_tensor_at(place, storage) for place in self._places])


class InOneBlock:
    """Puts batches together as a function does, each in one block where that pays.

    Args:
        collate: The function.
        lends: Blocks lie in memory that is used again; for loader processes whose batches nobody else takes on.
    """

    def __init__(self, collate: Callable[[Any], Any], *, lends: bool = False) -> None:
        self._collate = collate
        self.pieces = Pieces() if lends else None

    def __call__(self, rows: Any) -> Any:
        """The batch, or a `Block` of it."""
        batch = self._collate(rows)
        tensors: list[Tensor] = []
        parts = _taken_out(batch, tensors)
        places, size_bytes = [], 0 if self.pieces is None else HEAD_BYTES
        for tensor in tensors:
            dense = torch.empty_like(tensor, device="meta")  # strides as they are, without gaps
            places.append(_Place(tensor.dtype, tensor.size(), dense.stride(), size_bytes))
            size_bytes += -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        if len(tensors) < (2 if self.pieces is None else 1) or size_bytes > _MOST_BYTES:
            return batch
        piece = None if self.pieces is None else self.pieces.take(size_bytes)
        if piece is None:
            memory = torch.empty(0, dtype=torch.uint8).set_(UntypedStorage._new_shared(size_bytes, device="cpu"))
        else:
            memory = piece.memory
        for tensor, place in zip(tensors, places):
            _tensor_at(place, memory.untyped_storage()).copy_(tensor)
        return Block(parts, memory, places, piece, None if self.pieces is None else self.pieces.use)


class BlockLoader(DataLoader[Any]):
    """A loader whose function `InOneBlock` has wrapped: opens what arrives.

    Attributes:
        page_locks: Lent memory is page-locked. Whoever reads must then hold a batch until it has been copied: torch
            does not know when a device has read memory that torch did not page-lock.
    """

    page_locks = False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        together: Any = self.collate_fn
        pieces = together.pieces
        # Processes that stay belong to the loader, others to this iteration.
        starts = pieces is not None and self._iterator is None
        if starts:
            pieces.begin()
        batches = _Opened(super().__iter__(), self.page_locks)
        if starts:
            weakref.finalize(self if self.persistent_workers else batches, forget, pieces.use)
        return batches


class _Opened:
    """Batches of a loader, opened."""

    def __init__(self, batches: Iterator[Any], page_locks: bool) -> None:
        self._batches, self._page_locks = batches, page_locks

    def __iter__(self) -> _Opened:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        return batch.open(page_locked=self._page_locks) if type(batch) is Block else batch


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
