"""Read rows of zstd-compressed safetensors files, decompressing only the frames that hold them."""

from __future__ import annotations

import json
import math
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from frameworm.engine.checkpoint.manifest import CHUNK_BYTES, ShardFile
from frameworm.engine.checkpoint.zstd import zstd_functions
from frameworm.errors import CheckpointError

_MOST_HEADER_BYTES = 100 * 2**20  # safetensors' own limit


class CompressedShard:
    """A compressed replacement for `safetensors.safe_open`.

    Args:
        path: The file, already verified.
        file: Its manifest entry, with the sizes of its frames.
        types: torch's dtypes by safetensors name.

    Raises:
        MissingPackageError: If no zstd package is installed.
        CheckpointError: If it does not contain a safetensors file.
    """

    def __init__(self, path: Path, file: ShardFile, types: dict[str, torch.dtype]) -> None:
        assert file.frames is not None
        self._path = path
        self._sizes = file.frames
        self._begins = [0, *accumulate(file.frames)]
        self._types = types
        _, self._decompress = zstd_functions()
        self._cached: tuple[int, bytes] = (-1, b"")
        length = int.from_bytes(self.read(0, 8), "little")
        if length > _MOST_HEADER_BYTES:
            raise self._damaged("its header is too long")
        try:
            self._header: dict[str, Any] = json.loads(self.read(8, length))
        except (ValueError, RecursionError):
            raise self._damaged("it has no header") from None
        self._data = 8 + length

    def read(self, place: int, length: int) -> bytes:
        """Read bytes at a position of the uncompressed file."""
        found = []
        while length > 0:
            number, begin = divmod(place, CHUNK_BYTES)
            piece = self._frame(number)[begin : begin + length]
            if not piece:
                raise self._damaged("it ends too early")
            found.append(piece)
            place += len(piece)
            length -= len(piece)
        return b"".join(found)

    def get_slice(self, name: str) -> CompressedTensor:
        """Return a tensor to be read by rows."""
        try:
            fields = self._header[name]
            shape = [int(length) for length in fields["shape"]]
            begin, end = fields["data_offsets"]
            dtype = self._types[fields["dtype"]]
            if min(shape, default=0) < 0 or begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise self._damaged(f"it does not hold {name}") from None
        return CompressedTensor(self, fields["dtype"], dtype, shape, self._data + begin)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor."""
        return self.get_slice(name).whole()

    def _frame(self, number: int) -> bytes:
        if self._cached[0] != number:
            if number >= len(self._sizes):
                raise self._damaged("it ends too early")
            with self._path.open("rb", buffering=0) as file:
                file.seek(self._begins[number])
                content = file.read(self._sizes[number])
            try:
                self._cached = (number, self._decompress(content, CHUNK_BYTES))
            except Exception as error:  # each zstd package raises its own errors
                raise self._damaged(str(error)) from None
        return self._cached[1]

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self._path.parent.name}/{self._path.name} cannot be read: {why}")


class CompressedTensor:
    """A tensor in a compressed file, with the interface of safetensors' slices."""

    def __init__(self, shard: CompressedShard, kind: str, dtype: torch.dtype, shape: list[int], place: int) -> None:
        self._shard = shard
        self._kind = kind
        self._dtype = dtype
        self._shape = shape
        self._place = place

    def get_shape(self) -> list[int]:
        """Its shape."""
        return self._shape

    def get_dtype(self) -> str:
        """Its dtype by safetensors name."""
        return self._kind

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Read some of its rows."""
        row_bytes = math.prod(self._shape[1:]) * self._dtype.itemsize
        return self._tensor(rows.start * row_bytes, [rows.stop - rows.start, *self._shape[1:]])

    def whole(self) -> torch.Tensor:
        """Read all of it."""
        return self._tensor(0, self._shape)

    def _tensor(self, skipped: int, shape: list[int]) -> torch.Tensor:
        length = math.prod(shape) * self._dtype.itemsize
        if not length:
            return torch.empty(shape, dtype=self._dtype)
        content = bytearray(self._shard.read(self._place + skipped, length))
        return torch.frombuffer(content, dtype=self._dtype).reshape(shape)
