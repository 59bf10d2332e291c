"""Which launch works on a run: so that workers which were started again find the folder that they began with."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from frameworm.records.atomic import write_atomic
from frameworm.records.reading import read_text

NAME = ".launch"
# What a run leaves that was killed before it wrote its config: notes, and files that were to take another's place.
_BEFORE_A_RUN = re.compile(r"\.launch|\.storage\.json|\..+\.tmp")


def write_launch(folder: Path, launch: str) -> None:
    """Write a launch's id into a run folder.

    Raises:
        RunFolderError: The folder cannot be written.
    """
    write_atomic(folder / NAME, launch + "\n")


def read_launch(folder: Path) -> str | None:
    """The id of the launch that last worked on a run; None where nobody wrote it down."""
    try:
        return read_text(folder / NAME).strip() or None
    except (OSError, ValueError):
        return None


def begun_by(launch: str, folders: Iterable[Path]) -> Path | None:
    """The folder that a launch has begun with, if any."""
    return next((folder for folder in folders if read_launch(folder) == launch), None)


def is_before_a_run(name: str) -> bool:
    """Whether a file of that name may be in a folder in which no run has begun yet."""
    return _BEFORE_A_RUN.fullmatch(name) is not None


def take_back(folder: Path) -> None:
    """Remove the folder of a run that could not begin; one with anything else in it stays as it is."""
    with contextlib.suppress(OSError):
        notes = list(folder.iterdir())
        if all(is_before_a_run(path.name) for path in notes):
            for path in notes:
                path.unlink()
        folder.rmdir()
