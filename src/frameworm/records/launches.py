"""Which launch works on a run: so that workers which were started again find the folder that they began with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from frameworm.records.atomic import write_atomic
from frameworm.records.reading import read_text

NAME = ".launch"
_NOTES = (NAME, ".storage.json")


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


def take_back(folder: Path) -> None:
    """Remove the folder of a run that could not begin; one with anything else in it stays as it is."""
    with contextlib.suppress(OSError):
        notes = list(folder.iterdir())
        if all(path.name in _NOTES for path in notes):
            for path in notes:
                path.unlink()
        folder.rmdir()
