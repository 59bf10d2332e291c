"""The baseline file: the measurements of a guarded program in a small JSON file that can be kept next to its code."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from frameworm.errors import BaselineError, RunFolderError
from frameworm.guard.run_metrics import RunMetrics, read_runs
from frameworm.records.atomic import write_atomic
from frameworm.records.reading import read_json

FORMAT = "frameworm baseline"
VERSION = 1
MOST_RUNS = 8

_NUMBERS = re.compile(r"\[\s+((?:-?[\d.e+-]+,\s+)*-?[\d.e+-]+)\s+\]")


@dataclass(slots=True)
class Baseline:
    """Runs to compare with, oldest first; `path` is where they came from."""

    path: Path
    runs: list[RunMetrics] = field(default_factory=list)


def read_baseline(path: str | os.PathLike[str]) -> Baseline:
    """Read a baseline from its file, or from the folder of a single run.

    Raises:
        BaselineError: There is no such file, or it is not a baseline.
        RunFolderError: The folder contains no run.
    """
    place = Path(path)
    if place.is_dir():
        return Baseline(place, read_runs([str(place)]))
    try:
        data = read_json(place)
    except FileNotFoundError as error:
        raise BaselineError(f"there is no baseline at {place}; make one with --update-baseline") from error
    except OSError as error:
        raise BaselineError(f"cannot read the baseline {place}: {error.strerror or error}") from error
    except ValueError as error:
        raise BaselineError(f"{place} is not a baseline of frameworm: it is not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise BaselineError(f'{place} is not a baseline of frameworm: it has no "format": "{FORMAT}"')
    if data.get("version") != VERSION:
        raise BaselineError(f"{place} is a baseline of version {data.get('version')}; this frameworm reads {VERSION}")
    try:
        runs = [RunMetrics.from_dict(item) for item in data["runs"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BaselineError(f"the baseline {place} is damaged: {type(error).__name__}: {error}") from error
    if not runs:
        raise BaselineError(f"the baseline {place} holds no run; make a new one with --update-baseline")
    return Baseline(place, runs)


def write_baseline(baseline: Baseline) -> None:
    """Write the file as a whole, with each list of numbers on one line.

    Raises:
        BaselineError: The file cannot be written.
    """
    data = {"format": FORMAT, "version": VERSION, "runs": [run.to_dict() for run in baseline.runs]}
    text = json.dumps(data, indent=2, default=str, allow_nan=False)
    text = _NUMBERS.sub(lambda match: "[" + " ".join(match[1].split()) + "]", text)
    try:
        baseline.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(baseline.path, text + "\n")
    except (OSError, RunFolderError) as error:
        raise BaselineError(f"cannot write the baseline {baseline.path}: {error}") from error


def with_runs(baseline: Baseline, runs: Sequence[RunMetrics]) -> Baseline:
    """Return the baseline with these runs added; runs already there are replaced, and the oldest are dropped."""
    added = {(run.name, run.started) for run in runs}
    kept = [run for run in baseline.runs if (run.name, run.started) not in added]
    return Baseline(baseline.path, [*kept, *runs][-MOST_RUNS:])
