"""Memory in which loader processes hand over batches, used again once the batch in it is gone.

A piece of shared memory crosses to another process as a file descriptor, which that process must request over a socket
and then map. So each piece crosses once. Its first byte says whether it is still in use: the loader process sets it,
and the training process clears it when the last tensor in the piece is gone.
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

HEAD_BYTES = 64  # before a batch; what follows is aligned as memory of its own would be
_MOST_PIECES = 8  # of a loader process, which makes some batches ahead
_SPARE = 1.25  # a batch may be larger than the one that a piece was made for
_PAGE_BYTES = 4096

_uses = itertools.count()


class Piece:
    """One piece of memory, in the process that fills it."""

    def __init__(self, number: int, size_bytes: int) -> None:
        size_bytes = -(-int(size_bytes * _SPARE) // _PAGE_BYTES) * _PAGE_BYTES
        self.number = number
        self.memory = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size_bytes, device="cpu"))
        self.has_crossed = False
        self._taken = ctypes.c_ubyte.from_address(self.memory.data_ptr())

    @property
    def is_taken(self) -> bool:
        """Whether somebody may still read what is in it."""
        return self._taken.value != 0

    def take(self) -> Piece:
        """Fill it, and leave it alone until it is given back."""
        self._taken.value = 1
        return self


class Pieces:
    """The pieces of the process that asks; another one, as after a fork, begins with none.

    Attributes:
        use: Names the loader's iteration that they are for, in the training process too.
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
        """For loader processes that are about to start."""
        self.use = (os.getpid(), next(_uses))

    def take(self, size_bytes: int) -> Piece | None:
        """One with room for so much behind its head; None: too many are still read."""
        if self._process != os.getpid():
            self._process, self._pieces = os.getpid(), []
        size_bytes += HEAD_BYTES
        free = [piece for piece in self._pieces if not piece.is_taken]
        fitting = [piece for piece in free if piece.memory.nbytes >= size_bytes]
        if fitting:
            return fitting[0].take()
        if not free and len(self._pieces) == _MOST_PIECES:
            return None
        number = free[0].number if free else len(self._pieces)  # a larger one takes the place of one too small
        self._pieces[number : number + 1] = [Piece(number, size_bytes)]
        return self._pieces[number].take()


class _Known:
    """One piece of memory, in the process that reads it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.address = memory.data_ptr()
        self.process = os.getpid()
        # Of a class of ours, whose objects can be waited for.
        self._view: Any = type("_Bytes", (ctypes.c_ubyte * memory.nbytes,), {})
        self._is_locked = False

    def lend(self) -> Tensor:
        """Its bytes; when they and all tensors that lie in them are gone, it is given back."""
        view = self._view.from_address(self.address)
        weakref.finalize(view, self._give_back).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def _give_back(self) -> None:
        if os.getpid() == self.process:  # a process that was forked meanwhile holds nothing
            ctypes.c_ubyte.from_address(self.address).value = 0

    def page_lock(self) -> None:
        """Let the device read it by itself; once."""
        if not self._is_locked:
            self._is_locked = int(torch.cuda.cudart().cudaHostRegister(self.address, self.memory.nbytes, 0)) == 0

    def __del__(self) -> None:
        if self._is_locked and os.getpid() == self.process and not sys.is_finalizing():
            with suppress(RuntimeError):
                torch.cuda.cudart().cudaHostUnregister(self.address)


_known: dict[Hashable, dict[Hashable, _Known]] = {}


def arrived(use: Hashable, piece: Hashable, memory: Tensor | None) -> Tensor:
    """The bytes of a piece, with the batch that was put in it just now.

    Args:
        use: See `Pieces`.
        piece: Names the piece.
        memory: Its memory, when it comes for the first time.
    """
    pieces = _known.setdefault(use, {})
    if memory is not None:
        pieces[piece] = _Known(memory)
    return pieces[piece].lend()


def page_lock(use: Hashable, piece: Hashable) -> None:
    """Let the device read a piece by itself, from now on."""
    _known[use][piece].page_lock()


def forget(use: Hashable) -> None:
    """None of its pieces will arrive any more; what was lent stays until it is given back."""
    _known.pop(use, None)
