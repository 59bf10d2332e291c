"""The logger interface: three methods, called in order from a thread other than the training thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger reports.

    Attributes:
        name: Name of the run folder, or of the config if there is no folder.
        config: The resolved config as plain values, one mapping per section.
        folder: The run folder; None if the run has none.
        id: What `start` returned when this run began; None for a new run.
        step: Steps already taken: 0 for a new run, those up to the checkpoint for a resumed one.
        seen_step: Steps taken before the run was resumed; those after `step` are repeated.
        close_s: Seconds that the end of the run waits for the logger.
    """

    name: str
    config: Mapping[str, Any]
    folder: Path | None = None
    id: str | None = None
    step: int = 0
    seen_step: int = 0
    close_s: float = 60.0


@runtime_checkable
class Logger(Protocol):
    """Sends the values of a run somewhere.

    The methods may block and may raise: training does not wait for them, and a logger that raises is not called again.
    """

    def start(self, run: LoggedRun) -> str | None:
        """Open the run, or continue the one that `run.id` names; return an id, if any, to find it after a resume."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log finite values of one step; a step may come twice, with different names.

        Steps never decrease. After a resume, a logger that continues with `run.id` does not get steps again that it
        already got; one without an id does, and must drop its values of steps after `run.step`.
        """

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """Close the run: completed, interrupted, preempted or failed, with the values of its summary by name."""
