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
    """Replace a file as a whole: after a crash at any moment, either the old or the new content is there.

    Raises:
        RunFolderError: The file cannot be written; the old one is unchanged.
    """
    try:
        with replacing(path) as file:
            file.write(text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file next to `path` that replaces it once it is durable."""
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
    """Refuse a symbolic link where a file is about to be written or removed.

    Raises:
        RunFolderError: `path` is a link.
    """
    if path.is_symlink():
        raise RunFolderError(
            f"{path} is a link, and frameworm does not write through links inside its own folders: replace it by its "
            "target, or use another folder"
        )


def make_folder_in(root: Path, folder: Path) -> None:
    """Make a folder below `root`. `root` itself may be a link, but no folder below it may.

    Raises:
        RunFolderError: There is a link on the way.
        OSError: The folder cannot be made.
    """
    for part in (*reversed(folder.relative_to(root).parents), folder.relative_to(root)):
        if part.parts:
            refuse_link(root / part)
        (root / part).mkdir(parents=not part.parts, exist_ok=True)


@contextlib.contextmanager
def written_anew(path: Path) -> Iterator[BinaryIO]:
    """Yield a new, unbuffered file. An existing file of that name is removed first, so that no link is followed.

    Raises:
        OSError: The file cannot be made.
    """
    path.unlink(missing_ok=True)
    with open(path, "xb", buffering=0, opener=_own_file) as file:
        yield file


def open_to_append(path: Path, flags: int = os.O_WRONLY) -> int:
    """Return a descriptor that appends to a file, which is created if it does not exist.

    Raises:
        OSError: The file cannot be made, or is a link or a pipe.
    """
    wanted = flags | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, wanted, FILE_MODE)
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a plain file", str(path))


def private_folder() -> Path:
    """Return a folder for notes between this user's processes, which no other user can read or write.

    Raises:
        OSError: The name is taken by a link, or by a folder that another user owns or can access.
    """
    folder = Path(tempfile.gettempdir()) / f"frameworm-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Refuse a folder that other users could write to.

    Raises:
        OSError: The path is not a folder, or other users own it or can open it or write to it.
    """
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(errno.EPERM, "not a folder that only you can open; remove it, or set TMPDIR", str(folder))


def _own_file(name: str, flags: int) -> int:
    """Opener for `open`: in mode "x", the system refuses a name that is taken, even by a link."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)


def forbid_world_writable() -> int:
    """Set the umask so that this process creates no world-writable files; return the previous umask."""
    before = os.umask(0o022)
    os.umask(before | 0o002)
    return before


@contextlib.contextmanager
def not_world_writable() -> Iterator[None]:
    """Context manager for `forbid_world_writable`: restores the umask afterwards."""
    before = forbid_world_writable()
    try:
        yield
    finally:
        os.umask(before)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the file system can sync a folder."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
