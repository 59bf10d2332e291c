"""How fast a folder accepts writes, and the kind of its file system."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import psutil

from frameworm.records.machine import StorageFacts

PROBE_BYTES = 128 * 2**20
PROBE_S = 2.0
_PIECE_BYTES = 4 * 2**20
_FREE_SHARE = 0.05


def probe_storage(folder: Path, most_bytes: int | None = None, limit_s: float = PROBE_S) -> StorageFacts:
    """Write a file to a folder, sync it, time both, and remove it.

    It is written like a checkpoint: sequentially, and counted only once it is durable. The file takes at most a
    twentieth of the free space, and writing stops after `limit_s`.

    Args:
        folder: Where runs are written; if it does not exist, the nearest existing parent is used.
        most_bytes: Most bytes to write; None: 128 MiB, 0: nothing.
        limit_s: Most seconds to write; the sync is extra.
    """
    there = _existing(folder)
    path = str(folder)
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        return StorageFacts(path, False, error.strerror)
    kind = _filesystem(there)
    wanted = PROBE_BYTES if most_bytes is None else most_bytes
    wanted = min(wanted, int(free * _FREE_SHARE))
    if not there.is_dir():
        return StorageFacts(path, False, f"{there} is not a folder", free, None, None, kind)
    try:
        written, took_s = _write(there, wanted, limit_s)
    except OSError as error:
        return StorageFacts(path, False, error.strerror or str(error), free, None, None, kind)
    rate = written / took_s if written and took_s > 0 else None
    return StorageFacts(path, True, None, free, rate, written, kind)


def _write(folder: Path, wanted: int, limit_s: float) -> tuple[int, float]:
    # Not zeros, because some file systems do not store them.
    piece = os.urandom(min(_PIECE_BYTES, max(wanted, 1)))
    written = 0
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".frameworm-doctor-") as file:
        began = time.perf_counter()
        while written < wanted and time.perf_counter() - began < limit_s:
            written += file.write(piece[: wanted - written])
        file.flush()
        os.fsync(file.fileno())
        return written, time.perf_counter() - began


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _filesystem(folder: Path) -> str | None:
    """File system of the mount that holds a folder: the longest mount point above it."""
    try:
        mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    except OSError:
        return None
    for above in (folder.resolve(), *folder.resolve().parents):
        if above in mounts:
            return mounts[above] or None
    return None
