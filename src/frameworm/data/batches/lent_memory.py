"""Reusable shared memory in which worker processes hand over batches.

Shared memory crosses to another process as a file descriptor, which that process must request over a socket and then
map. So each piece crosses only once. Its first byte says whether it is in use: the worker process sets it, and the
training process clears it when the last tensor in the piece is gone.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import weakref
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from frameworm.torch_private.tensors import shared_memory

HEAD_BYTES = 64  # before each batch; keeps the tensors aligned
_MOST_PIECES = 8  # per worker process, which prefetches some batches
_SPARE = 1.25  # room for batches larger than the first one in a piece
_PAGE_BYTES = 4096

_uses = itertools.count()


class Piece:
    """One piece of memory, as seen by the process that fills it."""

    def __init__(self, number: int, size_bytes: int) -> None:
        size_bytes = -(-int(size_bytes * _SPARE) // _PAGE_BYTES) * _PAGE_BYTES
        self.number = number
        self.memory = shared_memory(size_bytes)
        self.has_crossed = False
        self._taken = ctypes.c_ubyte.from_address(self.memory.data_ptr())

    @property
    def is_taken(self) -> bool:
        """Whether the training process may still read its contents."""
        return self._taken.value != 0

    def take(self) -> Piece:
        """Mark it as in use until the training process gives it back."""
        self._taken.value = 1
        return self


class Pieces:
    """The pieces of the current process; after a fork, the child starts with none.

    Attributes:
        use: Identifies the loader iteration that they serve, also in the training process.
    """

    def __init__(self) -> None:
        self.use: Hashable = None
        self._process: int | None = None
        self._pieces: list[Piece] = []

    def __getstate__(self) -> dict[str, Hashable]:
        return {"use": self.use}

    def __setstate__(self, state: dict[str, Hashable]) -> None:
        self.__init__()  # type: ignore[misc]
        self.use = state["use"]

    def begin(self) -> None:
        """Start a new use; call before the worker processes start."""
        self.use = (os.getpid(), next(_uses))

    def take(self, size_bytes: int) -> Piece | None:
        """Take a free piece with room for `size_bytes` after its head; None if all pieces are still in use."""
        if self._process != os.getpid():
            self._process, self._pieces = os.getpid(), []
        size_bytes += HEAD_BYTES
        free = [piece for piece in self._pieces if not piece.is_taken]
        fitting = [piece for piece in free if piece.memory.nbytes >= size_bytes]
        if fitting:
            return fitting[0].take()
        if not free and len(self._pieces) == _MOST_PIECES:
            return None
        number = free[0].number if free else len(self._pieces)  # a larger piece replaces one that is too small
        self._pieces[number : number + 1] = [Piece(number, size_bytes)]
        return self._pieces[number].take()


class _Known:
    """One piece of memory, as seen by the process that reads it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.address = memory.data_ptr()
        self.process = os.getpid()
        # A class of our own, because its instances support weak references.
        self._view: Any = type("_Bytes", (ctypes.c_ubyte * memory.nbytes,), {})
        self._is_locked = False

    def lend(self) -> Tensor:
        """A tensor of its bytes; the piece is given back when this and all tensors that share its memory are gone."""
        view = self._view.from_address(self.address)
        weakref.finalize(view, self._give_back).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def _give_back(self) -> None:
        if os.getpid() == self.process:  # not in a forked child, which holds no tensors
            ctypes.c_ubyte.from_address(self.address).value = 0

    def page_lock(self) -> None:
        """Page-lock the memory, once, so that the device can read it directly."""
        if not self._is_locked:
            self._is_locked = int(torch.cuda.cudart().cudaHostRegister(self.address, self.memory.nbytes, 0)) == 0

    def __del__(self) -> None:
        if self._is_locked and os.getpid() == self.process and not sys.is_finalizing():
            with suppress(RuntimeError):
                torch.cuda.cudart().cudaHostUnregister(self.address)


_known: dict[Hashable, dict[Hashable, _Known]] = {}


def arrived(use: Hashable, piece: Hashable, memory: Tensor | None) -> Tensor:
    """The bytes of a piece that has just arrived with a batch.

    Args:
        use: See `Pieces`.
        piece: Identifies the piece.
        memory: Its memory, when it arrives for the first time.
    """
    pieces = _known.setdefault(use, {})
    if memory is not None:
        pieces[piece] = _Known(memory)
    return pieces[piece].lend()


def page_lock(use: Hashable, piece: Hashable) -> None:
    """Page-lock a piece, so that the device can read it directly."""
    _known[use][piece].page_lock()


def forget(use: Hashable) -> None:
    """Drop the pieces of a use that has ended; tensors still in use keep their memory."""
    _known.pop(use, None)
