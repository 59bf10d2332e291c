"""Which launch works on a run, so that restarted workers find the folder they began with."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from frameworm.records.atomic import write_atomic
from frameworm.records.reading import read_text

NAME = ".launch"
# Files left by a run that was killed before it wrote its config: notes, and temporary files of atomic writes.
_BEFORE_A_RUN = re.compile(r"\.launch|\.storage\.json|\..+\.tmp")


def write_launch(folder: Path, launch: str) -> None:
    """Write a launch's id into a run folder.

    Raises:
        RunFolderError: The folder cannot be written.
    """
    write_atomic(folder / NAME, launch + "\n")


def read_launch(folder: Path) -> str | None:
    """Return the id of the last launch that worked on a run, or None if none was recorded."""
    try:
        return read_text(folder / NAME).strip() or None
    except (OSError, ValueError):
        return None


def begun_by(launch: str, folders: Iterable[Path]) -> Path | None:
    """Return the folder that a launch began with, if any."""
    return next((folder for folder in folders if read_launch(folder) == launch), None)


def is_before_a_run(name: str) -> bool:
    """True if a file of this name may exist in a folder in which no run has begun yet."""
    return _BEFORE_A_RUN.fullmatch(name) is not None


def take_back(folder: Path) -> None:
    """Remove the folder of a run that could not begin; leave it if it contains anything else."""
    with contextlib.suppress(OSError):
        notes = list(folder.iterdir())
        if all(is_before_a_run(path.name) for path in notes):
            for path in notes:
                path.unlink()
        folder.rmdir()
