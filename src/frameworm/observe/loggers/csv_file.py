"""A table of all values, for a spreadsheet or pandas: one row per point, one column per name."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frameworm.observe.loggers.protocol import LoggedRun
from frameworm.records.atomic import replacing

FILE_NAME = "metrics.csv"
_STEP = "step"


class CsvLogger:
    """Writes `metrics.csv`; a resumed run drops the rows of steps that it repeats.

    Args:
        file: The table; None: `metrics.csv` in the run folder.
    """

    def __init__(self, file: str | None = None) -> None:
        self._file = None if file is None else Path(file)
        self._path = Path(FILE_NAME)
        self._columns = [_STEP]

    def start(self, run: LoggedRun) -> str | None:
        """Start the table, or continue that of a resumed run."""
        self._path = self._file or (run.folder or Path()) / FILE_NAME
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows: Sequence[dict[str, str]] = []
        if run.step and self._path.is_file():
            self._columns, rows = self._read()
        self._rewrite([row for row in rows if _number(row.get(_STEP)) <= run.step])
        return None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a row; a new name adds a column."""
        new = sorted(name for name in values if name not in self._columns)
        if new:
            columns, rows = self._read()
            self._columns = [*columns, *new]
            self._rewrite(rows)
        row = {_STEP: str(step), **{name: repr(value) for name, value in values.items()}}
        with self._path.open("a", newline="", encoding="utf-8") as file:
            self._table(file).writerow(row)

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """Leave the table as it is: status and summary are in summary.json."""

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        with self._path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            rows = list(table)
            return list(table.fieldnames or [_STEP]), rows

    def _rewrite(self, rows: Sequence[dict[str, str]]) -> None:
        """Write the whole table atomically, so that a crash leaves the old one or the new one."""
        text = io.StringIO()
        table = self._table(text)
        table.writeheader()
        table.writerows(rows)
        with replacing(self._path) as file:
            file.write(text.getvalue().encode())

    def _table(self, file: Any) -> csv.DictWriter[str]:
        return csv.DictWriter(file, self._columns, restval="", extrasaction="ignore", lineterminator="\n")


def _number(text: str | None) -> float:
    """The step of a row; infinite if the row was cut off."""
    try:
        return float(text or math.inf)
    except ValueError:
        return math.inf
