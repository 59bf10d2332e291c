"""The store that a config asks for, and a word of warning where its place does not last."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from frameworm.config.schema import CheckpointConfig
from frameworm.engine.checkpoint_store import CheckpointStore
from frameworm.engine.committing import Retention
from frameworm.launch.reports import RankReports

log = logging.getLogger("frameworm")
_VOLATILE = {"tmpfs", "ramfs", "devtmpfs"}


def file_system_of(path: Path, mounts: str | None = None) -> str | None:
    """The kind of file system a path is, or would be, on; None where that is not known."""
    try:
        lines = (Path("/proc/self/mounts").read_text(encoding="utf-8") if mounts is None else mounts).splitlines()
    except OSError:
        return None
    wanted = path.resolve()
    found: tuple[int, str] | None = None
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        place = Path(fields[1].replace("\\040", " "))
        # Of several mounts in one place the last one counts.
        if wanted.is_relative_to(place) and (found is None or len(place.parts) >= found[0]):
            found = (len(place.parts), fields[2])
    return None if found is None else found[1]


def make_store(folder: Path, settings: CheckpointConfig, reports: RankReports, device: torch.device) -> CheckpointStore:
    """The store that a config asks for."""
    store = CheckpointStore(
        folder,
        retention=Retention(settings.keep, settings.keep_best, settings.metric),
        asynchronous=settings.mode == "async",
        reports=reports,
        device=device,
        compression=settings.compression,
        fast=None if settings.dir is None else Path(settings.dir),
    )
    kind = file_system_of(folder)
    if kind in _VOLATILE:
        text = (
            f"checkpoints go to {folder}, which is in memory ({kind}) and gone when the machine restarts: put the run "
            "folder (--out) on a disk, and set checkpoint.dir to this one if it is to be fast"
        )
        store.notes.append(text)
        if reports.rank == 0:
            log.warning("%s", text)
    return store
