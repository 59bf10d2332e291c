"""Files below one folder, read whole or as they grow; files outside are never opened."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import deque
from pathlib import Path
from typing import BinaryIO, NamedTuple

from frameworm.records.reading import blocks

MOST_LINE_BYTES = 2**18
_FINGERPRINT_BYTES = 64


class Inside:
    """Opens regular files that are located below `root`, after resolving links.

    Args:
        root: The folder, which may be a link itself.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def open(self, path: Path) -> BinaryIO:
        """Open a file for reading, without blocking on a pipe.

        Raises:
            OSError: It does not exist, is not a regular file, or is outside the folder.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except ValueError:  # a NUL in the name
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL)) from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not a plain file", str(path))
            # Checked on the open file, so that swapping a link in between has no effect.
            if not _place(descriptor, path).is_relative_to(self.root):
                raise PermissionError(errno.EACCES, "leads out of the folder that is shown", str(path))
        except BaseException:
            os.close(descriptor)
            raise
        return os.fdopen(descriptor, "rb")

    def read_text(self, path: Path, most_bytes: int) -> str:
        """The text of a file, for `RunFolder`.

        Raises:
            OSError: It cannot be read, or is too large.
            ValueError: It is not UTF-8.
        """
        with self.open(path) as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise OSError(errno.EFBIG, f"larger than {most_bytes // 2**20} MiB", str(path))
        return content.decode("utf-8")

    def tail(self, path: Path, most_bytes: int) -> str:
        """The last bytes of a log, starting at the beginning of a line.

        Raises:
            OSError: It cannot be read.
        """
        with self.open(path) as file:
            start = max(0, os.fstat(file.fileno()).st_size - most_bytes)
            file.seek(start)
            text = file.read(most_bytes).decode("utf-8", errors="replace")
        return text.partition("\n")[2] if start and "\n" in text else text


def _place(descriptor: int, path: Path) -> Path:
    try:
        return Path(f"/proc/self/fd/{descriptor}").readlink()
    except OSError:
        return path.resolve()


class Line(NamedTuple):
    """One line without its end, and its offset in the file."""

    offset: int
    text: bytes


class Portion(NamedTuple):
    """What was added to a file.

    Attributes:
        lines: Complete lines; a line that is still being written is left for the next portion.
        restarted: The file was replaced or truncated, so everything read before is invalid.
        behind: Bytes of the file left to read.
        weight: How many lines of the file each of these stands for; more than one if only a sample is read.
    """

    lines: list[Line]
    restarted: bool
    behind: int
    weight: float = 1.0


class Follower:
    """Reads a growing file of lines, continuing where it stopped.

    Args:
        inside: Opens the file.
        path: The file; it need not exist yet, and may disappear.
        backlog_bytes: If the file is larger when first read, only blocks of lines of this total size are read, evenly
            spread, one per portion. Everything added later is read completely.

    Attributes:
        thinning: How many lines of that backlog each line read stands for; 1 if all are read.
    """

    def __init__(self, inside: Inside, path: Path, backlog_bytes: int | None = None) -> None:
        self.path = path
        self.thinning = 1.0
        self._backlog_bytes = backlog_bytes
        self._blocks: deque[tuple[int, int]] = deque()
        self._backlog_end = 0
        self.offset = 0
        self.size = 0  # of the file when it was last checked
        self._inside = inside
        self._identity: tuple[int, int] | None = None
        self._fingerprint = b""  # the last bytes read, to detect a file that was rewritten in place
        self._skipping = False  # inside a line that is too long
        with contextlib.suppress(OSError, ValueError):
            self.size = path.stat().st_size

    def read(self, most_bytes: int) -> Portion:
        """Read up to `most_bytes` more; a file that is missing or unreadable yields nothing."""
        try:
            with self._inside.open(self.path) as file:
                return self._read(file, max(most_bytes, MOST_LINE_BYTES))
        except OSError:
            restarted = self.offset > 0
            self._forget()
            return Portion([], restarted, 0)

    def _read(self, file: BinaryIO, most_bytes: int) -> Portion:
        status = os.fstat(file.fileno())
        restarted = self.offset > 0 and not self._goes_on(file, status)
        if restarted:
            self._forget()
        if self._identity is None and self._backlog_bytes is not None and status.st_size > self._backlog_bytes:
            self._blocks.extend(blocks(status.st_size, self._backlog_bytes))
            self.thinning = status.st_size / self._backlog_bytes
            self._backlog_end = status.st_size
        self._identity = (status.st_dev, status.st_ino)
        self.size = status.st_size
        if self._blocks:
            return self._read_block(file, restarted)
        file.seek(self.offset)
        data = file.read(most_bytes)
        end = data.rfind(b"\n") + 1
        if not end and len(data) >= MOST_LINE_BYTES:
            end, self._skipping = len(data), True
            lines: list[Line] = []
        else:
            lines = self._split(data[:end])
        self._fingerprint = (self._fingerprint + data[:end])[-_FINGERPRINT_BYTES:]
        self.offset += end
        return Portion(lines, restarted, max(0, status.st_size - self.offset) if end else 0)

    def _read_block(self, file: BinaryIO, restarted: bool) -> Portion:
        """The lines that begin in the next block of the sample; after the last block, reading continues normally."""
        begin, end = self._blocks.popleft()
        file.seek(max(0, begin - 1))
        self.offset = begin + max(0, len(file.readline(MOST_LINE_BYTES)) - 1) if begin else 0
        file.seek(self.offset)
        data = b""
        if self.offset < end:
            data = file.read(end - self.offset) + file.readline(MOST_LINE_BYTES)
            data = data[: data.rfind(b"\n") + 1]
        lines = self._split(data)
        self.offset += len(data)
        self._fingerprint = data[-_FINGERPRINT_BYTES:]
        weight = self.thinning
        if self._blocks:
            return Portion(lines, restarted, round(sum(end - begin for begin, end in self._blocks) * weight), weight)
        self._skip_to_last(file)
        return Portion(lines, restarted, max(0, self._backlog_end - self.offset), weight)

    def _skip_to_last(self, file: BinaryIO) -> None:
        """Skip to the last complete line of the original backlog, unless a block contained it."""
        start = max(self.offset, self._backlog_end - MOST_LINE_BYTES)
        file.seek(start)
        rest = file.read(max(0, self._backlog_end - start))
        end = rest.rfind(b"\n") + 1
        if end:
            begin = rest.rfind(b"\n", 0, end - 1) + 1
            if not begin and start > self.offset:
                begin = end  # the line is too long
            self.offset = start + begin
            if begin:
                self._fingerprint = rest[max(0, begin - _FINGERPRINT_BYTES) : begin]

    def _goes_on(self, file: BinaryIO, status: os.stat_result) -> bool:
        if status.st_size < self.offset or self._identity != (status.st_dev, status.st_ino):
            return False
        file.seek(self.offset - len(self._fingerprint))
        return file.read(len(self._fingerprint)) == self._fingerprint

    def _split(self, data: bytes) -> list[Line]:
        lines = []
        offset = self.offset
        for text in data.split(b"\n")[:-1]:
            if self._skipping:
                self._skipping = False
            elif len(text) <= MOST_LINE_BYTES and text.strip():
                lines.append(Line(offset, text))
            offset += len(text) + 1
        return lines

    def _forget(self) -> None:
        self.offset = self.size = 0
        self._identity, self._fingerprint, self._skipping = None, b"", False
        self._blocks.clear()
        self.thinning = 1.0
