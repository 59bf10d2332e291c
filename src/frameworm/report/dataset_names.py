"""Names of data sets: how they are shown, and how they stand in file names."""

from __future__ import annotations

import re
from collections.abc import Iterable

from frameworm.report.tables import plain
from frameworm.scaling.run_points import plain_name

_SHOWN = {"agnews": "AGNews", "imdb": "IMDB"}
_LONGEST_STEM = 80


def shown_name(name: str) -> str:
    """The name as figures and tables show it."""
    return _SHOWN.get(plain_name(name), plain(name) or "unknown")


def file_stems(names: Iterable[str]) -> dict[str, str]:
    """For each name the beginning of its files' names: lower case, safe on any disk, no two alike."""
    stems: dict[str, str] = {}
    for name in sorted(set(names)):
        stem = re.sub(r"[^a-z0-9_-]+", "_", name.lower()).strip("_-")[:_LONGEST_STEM] or "dataset"
        taken = set(stems.values())
        number = 2
        unique = stem
        while unique in taken:
            unique, number = f"{stem}_{number}", number + 1
        stems[name] = unique
    return stems
