"""Files that are never half written."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import tempfile
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
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", opener=_own_file) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def refuse_link(path: Path) -> None:
    """Refuse a link in the place of what is about to be written to, or removed.

    Raises:
        RunFolderError: It leads elsewhere.
    """
    if path.is_symlink():
        raise RunFolderError(
            f"{path} is a link, and frameworm writes through no link inside a folder of its own: put what it points to "
            "in its place, or use another folder"
        )


def make_folder_in(root: Path, folder: Path) -> None:
    """Make a folder somewhere in another; `root` may be a link, but what lies between them may not.

    Raises:
        RunFolderError: There is a link on the way.
        OSError: It cannot be made.
    """
    for part in (*reversed(folder.relative_to(root).parents), folder.relative_to(root)):
        if part.parts:
            refuse_link(root / part)
        (root / part).mkdir(parents=not part.parts, exist_ok=True)


@contextlib.contextmanager
def written_anew(path: Path) -> Iterator[BinaryIO]:
    """A new, unbuffered file; what has its name is removed first, so that no link is followed.

    Raises:
        OSError: It cannot be made.
    """
    path.unlink(missing_ok=True)
    with open(path, "xb", buffering=0, opener=_own_file) as file:
        yield file


def open_to_append(path: Path, flags: int = os.O_WRONLY) -> int:
    """A descriptor that appends to a file, which is made if it is not there.

    Raises:
        OSError: It cannot be made, or is a link or a pipe.
    """
    wanted = flags | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, wanted, FILE_MODE)
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a plain file", str(path))


def private_folder() -> Path:
    """A folder for notes between this user's processes, in which nobody else can make, see or replace anything.

    Raises:
        OSError: Its name is taken by a link, or by a folder that others can write to or own.
    """
    folder = Path(tempfile.gettempdir()) / f"frameworm-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Refuse a folder that others could put something into.

    Raises:
        OSError: It is a link, or others may own it, open it or write to it.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(errno.EPERM, "not a folder that only you can open; remove it, or set TMPDIR", str(folder))


def _own_file(name: str, flags: int) -> int:
    """For `open`: with "x" the system itself refuses a name that is taken, also by a link."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)


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
