"""What results of searches, of configs and of scripts, have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from frameworm.guard.gain import Speedup
from frameworm.records.printable import Shown, speedup_in_words

REPORT_NAME = "report.html"
_MOST_CHANGES = 6


class _Attempt(Protocol):
    status: Any


class Found(Shown):
    """The result of a search, which prints as a few lines."""

    folder: Path | None
    stopped: str

    @property
    def report(self) -> Path | None:
        """The HTML report of the search; None if it was not written."""
        return None if self.folder is None else self.folder / REPORT_NAME

    def told(
        self, speedup: Speedup | None, failed: str | None, changes: Sequence[str], tried: Sequence[_Attempt]
    ) -> list[str]:
        """The lines of a result: the speedup, the changes, what was tried, and the path of the report."""
        if failed is not None:
            first = f"it cannot be tuned: {failed}"
        elif speedup is not None:
            first = speedup_in_words(speedup.value, speedup.low, speedup.high)
        else:
            first = "faster, but not proved as a whole" if changes else "nothing faster was found"
        lines = [f"{type(self).__name__}: {first}", *changes[:_MOST_CHANGES]]
        if len(changes) > _MOST_CHANGES:
            lines.append(f"and {len(changes) - _MOST_CHANGES} more changes")
        counts = Counter(item.status for item in tried)
        told = ", ".join(f"{count} {status}" for status, count in counts.items())
        if not failed:
            lines.append(f"{told or 'nothing was tried'}; {self.stopped}")
        return lines if self.report is None else [*lines, f"report: {self.report}"]

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The content of `tune.json`."""


def finite(value: Any) -> Any:
    """Replace non-finite numbers by None, because JSON has none."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
