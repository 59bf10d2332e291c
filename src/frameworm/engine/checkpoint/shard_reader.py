"""Read rows of a checkpoint's files: safetensors, compressed or not."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from frameworm.engine.checkpoint.compressed_files import CompressedShard
from frameworm.engine.checkpoint.file_writer import checksums_of
from frameworm.engine.checkpoint.manifest import Manifest, ShardFile, TensorEntry
from frameworm.errors import CheckpointError
from frameworm.parallel.shards import SAFETENSORS_TYPES, StoredTensor

_NAMES = {dtype: name for name, dtype in SAFETENSORS_TYPES.items()}


def type_name(dtype: torch.dtype, name: str) -> str:
    """Return safetensors' name of a dtype.

    Raises:
        CheckpointError: If safetensors has no such dtype.
    """
    if dtype not in _NAMES:
        raise CheckpointError(f"{name} is of type {dtype}, which a safetensors file cannot hold")
    return _NAMES[dtype]


def check_file(path: Path, expected: ShardFile, *, content: bool) -> None:
    """Check that a file is what was written.

    Args:
        path: The file.
        expected: Its size and checksums.
        content: Whether to read it and compare its checksums too, not only its size.

    Raises:
        CheckpointError: If it is missing, not a regular file, truncated or changed.
    """
    shown = f"{path.parent.name}/{path.name}"
    try:
        # A link could lead out of the folder, and a pipe would never end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{shown} is not a regular file")
            if status.st_size != expected.size_bytes:
                raise CheckpointError(f"{shown} is truncated: {status.st_size} of {expected.size_bytes} bytes")
            if content and _checksums(file, expected) != list(expected.sha256):
                raise CheckpointError(f"{shown} is corrupt: its content does not match its checksum")
    except OSError as error:
        raise CheckpointError(f"{shown} cannot be read: {error.strerror}") from None


def _checksums(file: Any, expected: ShardFile) -> list[str]:
    return checksums_of(memoryview(os.read(file.fileno(), size)) for size in expected.chunk_sizes())


class ShardReader:
    """The tensors of a checkpoint whose files have been checked; files are opened on demand."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._open: dict[str, Any] = {}
        self._tensors: dict[str, _FileTensor] = {}

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor by its name, the same object every time.

        Raises:
            CheckpointError: If there is no such tensor, or its dtype is unknown.
        """
        if name not in self._tensors:
            entry = self._manifest.tensors.get(name)
            if entry is None or entry.dtype not in SAFETENSORS_TYPES:
                raise CheckpointError(f"{self._folder.name} holds no tensor {name} that can be read")
            self._tensors[name] = _FileTensor(self, name, entry)
        return self._tensors[name]

    def rows(self, file: str, name: str, entry: TensorEntry, stored: int) -> Any:
        """Open a tensor in a file that holds `stored` of its rows."""
        if file not in self._open:
            path = self._folder / file
            check_file(path, self._manifest.files[file], content=False)
            shard = self._manifest.files[file]
            if shard.frames is None:
                self._open[file] = safe_open(path, framework="pt", device="cpu")
            else:
                self._open[file] = CompressedShard(path, shard, SAFETENSORS_TYPES)
        found = self._open[file].get_slice(name)
        shape = [stored, *entry.shape[1:]] if entry.shape else []
        if found.get_shape() != shape or found.get_dtype() != entry.dtype:
            raise CheckpointError(f"{self._folder.name}/{file} holds another {name} than its manifest says")
        return found

    def whole(self, file: str, name: str) -> torch.Tensor:
        """Read a whole tensor from a file that `rows` has opened."""
        tensor: torch.Tensor = self._open[file].get_tensor(name)
        return tensor


class _FileTensor(StoredTensor):
    def __init__(self, reader: ShardReader, name: str, entry: TensorEntry) -> None:
        self.shape = torch.Size(entry.shape)
        self.dtype = SAFETENSORS_TYPES[entry.dtype]
        self._reader = reader
        self._name = name
        self._entry = entry

    def read(self, first_row: int = 0, rows: int | None = None) -> torch.Tensor:
        entry = self._entry
        end = entry.rows if rows is None else first_row + rows
        assert 0 <= first_row <= end <= entry.rows
        wanted = [part for part in entry.parts if part.first_row < end and first_row < part.first_row + part.rows]
        try:
            # Check all files first, so that no memory is allocated that they cannot fill.
            found = [self._reader.rows(part.file, self._name, entry, part.rows) for part in wanted]
            if not entry.shape:
                return self._reader.whole(wanted[0].file, self._name).clone()
            result = torch.empty((end - first_row, *entry.shape[1:]), dtype=self.dtype)
            for part, source in zip(wanted, found):
                begin, stop = max(first_row, part.first_row), min(end, part.first_row + part.rows)
                place = result[begin - first_row : stop - first_row]
                if place.numel():
                    place.copy_(source[begin - part.first_row : stop - part.first_row])
            return result
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._name} cannot be read: {error}") from None
