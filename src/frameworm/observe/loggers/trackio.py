"""trackio, on this machine or in a Hugging Face Space."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from frameworm.observe.loggers.protocol import LoggedRun


class TrackioLogger:
    """Logs to trackio; `trackio show` opens the page. `TRACKIO_DIR` says where trackio keeps its database.

    Args:
        project: Project; None: the name of the run in its config.
        space: Hugging Face Space to log to, `user/name`; None: keep everything on this machine.

    Raises:
        ImportError: trackio is not installed.
    """

    def __init__(self, project: str | None = None, space: str | None = None) -> None:
        self._trackio: Any = import_module("trackio")
        self._project = project
        self._space = space
        self._run: Any = None

    def start(self, run: LoggedRun) -> str | None:
        """Open the run, or continue the one of the same name."""
        project = self._project or str(run.config.get("name", run.name))
        with contextlib.redirect_stdout(sys.stderr):  # trackio's output is not part of the command's result
            self._run = self._trackio.init(
                project=project,
                name=run.id or run.name,
                space_id=self._space,
                config=dict(run.config),
                resume="never" if run.id is None else "allow",
                embed=False,
            )
        return str(self._run.name)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the values at their step."""
        self._run.log(dict(values), step=step)

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """Log the numbers of the summary and close the run."""
        numbers = {name: value for name, value in summary.items() if not isinstance(value, (str, bool))}
        with contextlib.redirect_stdout(sys.stderr):
            self._run.log(
                {"summary/status": status, **{f"summary/{name}": value for name, value in numbers.items()}},
                step=int(summary.get("steps", 0)),
            )
            self._run.finish()
