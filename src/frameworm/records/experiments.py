"""Which experiment a run folder belongs to, for runs without a name of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from frameworm.records.atomic import write_atomic

NAME = ".experiment"
_MOST_BYTES = 2**16


def write_experiment(folder: Path, experiment: Mapping[str, str]) -> None:
    """Record the experiment of a run.

    Raises:
        RunFolderError: The folder cannot be written.
    """
    write_atomic(folder / NAME, json.dumps(dict(experiment), indent=2) + "\n")


def read_experiment(folder: Path) -> dict[str, str] | None:
    """Return the experiment of a run, or None if none was recorded."""
    try:
        with (folder / NAME).open(encoding="utf-8") as file:
            found = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else None
