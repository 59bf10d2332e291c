"""Write checkpoint files durably, computing checksums along the way.

Nothing here imports torch, so that the process that writes checkpoints starts fast and takes little memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from frameworm.engine.checkpoint.manifest import CHUNK_BYTES, ShardFile
from frameworm.records.atomic import written_anew

_MOST_THREADS = 4


@dataclass(frozen=True)
class Layout:
    """A safetensors file: its header, and where its content is in memory, in order.

    Attributes:
        header: The file's first bytes.
        segments: Offset and length of each piece of memory.
    """

    header: bytes
    segments: list[tuple[int, int]]

    def parts(self, memory: memoryview) -> list[memoryview]:
        """Return the file's content."""
        return [memoryview(self.header), *(memory[place : place + length] for place, length in self.segments)]


@dataclass(frozen=True)
class Stored:
    """A tensor in memory: its dtype by safetensors name, element size, shape, offset and length."""

    dtype: str
    element_bytes: int
    shape: Sequence[int]
    place: int
    size_bytes: int


def lay_out(tensors: dict[str, Stored]) -> Layout:
    """Lay out tensors in memory as a safetensors file."""
    # Largest elements first, as safetensors does: each tensor then begins at a multiple of its element size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_bytes, name))
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        item = tensors[name]
        header[name] = {
            "dtype": item.dtype,
            "shape": list(item.shape),
            "data_offsets": [end, end + item.size_bytes],
        }
        end += item.size_bytes
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    segments = [(tensors[name].place, tensors[name].size_bytes) for name in names if tensors[name].size_bytes]
    return Layout(len(head).to_bytes(8, "little") + head, segments)


def write_file(
    path: Path, parts: Iterable[memoryview], *, compress: Callable[[bytes], bytes] | None = None, sync: bool = True
) -> ShardFile:
    """Write a file and wait until it is durable.

    Args:
        path: The file to write.
        parts: Its content.
        compress: Compresses a chunk to a zstd frame; None to write the content as it is.
        sync: Whether to wait until it is on the disk.

    Returns:
        The file's size and checksums.

    Raises:
        OSError: If writing fails.
    """

    def prepare(chunk: list[memoryview]) -> tuple[list[memoryview], str]:
        if compress is not None:
            chunk = [memoryview(compress(b"".join(chunk)))]
        checksum = hashlib.sha256()
        for part in chunk:
            checksum.update(part)
        return chunk, checksum.hexdigest()

    sizes, checksums = [], []
    with written_anew(path) as file:
        # With compression each thread holds one chunk; without, memory is only read.
        for content, checksum in _in_order(prepare, _chunks(parts)):
            for part in content:
                _write_all(file.fileno(), part)
            sizes.append(sum(len(part) for part in content))
            checksums.append(checksum)
        if sync:
            os.fsync(file.fileno())
    return ShardFile(sum(sizes), tuple(checksums), None if compress is None else tuple(sizes))


def copy_file(source: Path, target: Path, expected: ShardFile) -> None:
    """Copy a file to its final place and wait until it is durable there.

    Raises:
        OSError: If a disk fails, or the source's checksum does not match.
    """
    with source.open("rb", buffering=0) as taken:
        chunks = (memoryview(taken.read(size)) for size in expected.chunk_sizes())
        with written_anew(target) as file:
            for chunk, checksum in zip(chunks, expected.sha256):
                if hashlib.sha256(chunk).hexdigest() != checksum:
                    raise OSError(f"{source} has changed since it was written")
                _write_all(file.fileno(), chunk)
            os.fsync(file.fileno())


def pays(
    parts: Sequence[memoryview], compress: Callable[[bytes], bytes], disk_bytes_per_s: float
) -> tuple[bool, float, float]:
    """Estimate, by compressing a sample, whether compression makes a file durable sooner.

    Returns:
        Whether it pays, the compressed fraction of the size, and bytes compressed per second.
    """
    total = sum(len(part) for part in parts)
    pieces = []
    for number in range(8):  # spread over the file: weights, moments and buffers differ
        place = total * number // 8
        for part in parts:
            if place < len(part):
                pieces.append(bytes(part[place : place + 2**19]))
                break
            place -= len(part)
    sample = b"".join(pieces)
    begin = perf_counter()
    left = len(compress(sample)) / max(1, len(sample))
    speed = len(sample) / max(1e-9, perf_counter() - begin)
    return 1 / speed + left / disk_bytes_per_s < 0.9 / disk_bytes_per_s, left, speed


def _write_all(descriptor: int, content: memoryview) -> None:
    content = content.cast("B")
    while content:
        written = os.write(descriptor, content)  # may write less than it is given
        if written <= 0:
            raise OSError("the disk took nothing of what was written to it")
        content = content[written:]


def _chunks(parts: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Split the content into chunks of `CHUNK_BYTES`, each a list of pieces."""
    chunk: list[memoryview] = []
    room = CHUNK_BYTES
    for part in parts:
        while part:
            piece = part[:room]
            chunk.append(piece)
            room -= len(piece)
            part = part[len(piece) :]
            if not room:
                yield chunk
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk


def checksums_of(chunks: Iterable[memoryview]) -> list[str]:
    """Compute the SHA-256 of each chunk with several threads."""
    return [checksum for _, checksum in _in_order(lambda chunk: (chunk, hashlib.sha256(chunk).hexdigest()), chunks)]


def _in_order(task: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Yield the task's results in order, working on a few items at a time."""
    source = iter(items)
    first = list(_taken(source, 2))
    if len(first) < 2:
        yield from map(task, first)
        return
    threads = max(1, min(_MOST_THREADS, (len(os.sched_getaffinity(0)) + 1) // 2))
    with ThreadPoolExecutor(threads) as pool:
        running: deque[Future[Any]] = deque(pool.submit(task, item) for item in first)
        for item in source:
            while len(running) > threads:
                yield running.popleft().result()
            running.append(pool.submit(task, item))
        while running:
            yield running.popleft().result()


def _taken(source: Iterator[Any], count: int) -> Iterator[Any]:
    for _, item in zip(range(count), source):
        yield item
