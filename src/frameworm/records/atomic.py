"""Files that are never half written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from frameworm.errors import RunFolderError

FILE_MODE = 0o644


def write_atomic(path: Path, text: str) -> None:
    """Replace a file as a whole: after a crash at any moment it is the old one or the new one.

    Raises:
        RunFolderError: It cannot be written; the old one is left as it was.
    """
    try:
        with replacing(path) as file:
            file.write(text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file beside `path` that takes its place once it is durable."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, FILE_MODE)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def forbid_world_writable() -> int:
    """From now on nothing this process makes can be written by everybody, whatever its umask was; returns that."""
    before = os.umask(0o022)
    os.umask(before | 0o002)
    return before


@contextlib.contextmanager
def not_world_writable() -> Iterator[None]:
    """The same for a while."""
    before = forbid_world_writable()
    try:
        yield
    finally:
        os.umask(before)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable; file systems that cannot sync one have no such promise to give."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
