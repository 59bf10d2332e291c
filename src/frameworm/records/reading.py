"""Reads stored files within limits: a file may come from anywhere, and must neither hang nor exhaust its reader.

All files that frameworm has written are read here. Anything but a plain file (a pipe, a device) is refused without
waiting for it, as is a file that is larger or nested more deeply than any that frameworm writes.
"""

from __future__ import annotations

import errno
import json
import os
import random
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO

MOST_BYTES = 64 * 2**20
MOST_CONFIG_BYTES = 2**20
_MOST_LINE_BYTES = 2**20
_BLOCK_BYTES = 2**16
_FEWEST_BLOCKS = 64
_SMALLEST_BLOCK_BYTES = 2**11
_DEEPEST = 100
_MOST_DIGITS = 40  # more than any count has, yet few enough to convert to a float


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a plain file for reading; links are followed.

    Raises:
        OSError: The file does not exist, or is a pipe, a device or a folder.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "not a plain file", os.fspath(path))


def read_bytes(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a plain file.

    Raises:
        OSError: The file cannot be read, or is too large.
    """
    with open_plain(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"larger than {most_bytes // 2**20} MiB", os.fspath(path))
    return content


def read_text(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a plain file.

    Raises:
        OSError: The file cannot be read, or is too large.
        ValueError: The content is not UTF-8.
    """
    return read_bytes(path, most_bytes).decode("utf-8")


def read_tail(path: str | os.PathLike[str], most_bytes: int) -> str:
    """Return the last few bytes of a log as text.

    Raises:
        OSError: The file cannot be read.
    """
    with open_plain(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
        return file.read(most_bytes).decode("utf-8", errors="replace")


def read_json(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: The file cannot be read, or is too large.
        ValueError: It is not JSON, or is nested too deeply.
    """
    return parse_json(read_text(path, most_bytes))


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: It is not JSON, is nested too deeply, or contains a number with too many digits.
    """
    value = parse_line(text)
    layer = [value]
    for _ in range(_DEEPEST):
        inner = [item.values() if isinstance(item, dict) else item for item in layer if isinstance(item, (dict, list))]
        if not inner:
            return value
        layer = [item for items in inner for item in items]
    raise ValueError("nested too deeply")


def parse_line(text: str | bytes) -> Any:
    """Parse a line of a JSON lines file without the depth check of `parse_json`.

    Raises:
        ValueError: It is not JSON, is nested too deeply for the parser, or contains a number with too many digits.
    """
    try:
        return _decoder.decode(text if isinstance(text, str) else text.decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yield the lines of a plain file. A line that is too long comes in pieces, none of which is valid JSON.

    Raises:
        OSError: The file cannot be read.
    """
    with open_plain(path) as file:
        while line := file.readline(_MOST_LINE_BYTES):
            yield line


def blocks(size: int, most_bytes: int) -> list[tuple[int, int]]:
    """Choose which parts of a file of `size` bytes to read: begin and end of evenly spread blocks.

    The file is divided into equal parts, and one block is read at a random place in each, the same one every time. So
    every line is equally likely to be read, even if something recurs at regular intervals.
    """
    if size <= most_bytes:
        return [(0, size)]
    count = max(most_bytes // _BLOCK_BYTES, min(_FEWEST_BLOCKS, most_bytes // _SMALLEST_BLOCK_BYTES), 1)
    length, part = most_bytes // count, size / count
    draw = random.Random(count)
    begins = [int(index * part + draw.random() * (part - length)) for index in range(count)]
    return [(begin, begin + length) for begin in begins]


def sample_lines(path: str | os.PathLike[str], most_bytes: int) -> Iterator[bytes]:
    """Yield the lines that begin in the `blocks` of a plain file, in order.

    Raises:
        OSError: The file cannot be read.
    """
    with open_plain(path) as file:
        for begin, end in blocks(os.fstat(file.fileno()).st_size, most_bytes):
            offset = begin
            if begin:  # a line belongs to the block in which it begins
                file.seek(begin - 1)
                offset += len(file.readline(_MOST_LINE_BYTES)) - 1
            while offset < end and (line := file.readline(_MOST_LINE_BYTES)):
                yield line
                offset += len(line)


def _whole_number(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError("a number of too many digits")
    return int(text)


_decoder = json.JSONDecoder(parse_int=_whole_number)
