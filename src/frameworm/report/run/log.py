"""The log in a run's folder: progress lines and log messages of the engine, with timestamps."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from datetime import datetime
from pathlib import Path
from typing import TextIO

from frameworm.records.printable import printable
from frameworm.records.schema import RunRecord
from frameworm.report.kit.tables import number
from frameworm.report.run.progress import Mfu, ProgressLine

EVERY_S = 30.0
_LOGGER = logging.getLogger("frameworm")


def _opened(path: Path) -> TextIO:
    """Open the file to append; a new one is not world-writable, whatever the umask."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), "a", encoding="utf-8")


class RunLog(ProgressLine):
    """Writes `train.log`, starting at `begin`: a folder with only a log would not look like a run's.

    Args:
        path: Lines are appended to this file.
        total_steps: As in `ProgressLine`.
        epochs: As in `ProgressLine`.
        world_size: As in `ProgressLine`.
        mfu: As in `ProgressLine`.
    """

    def __init__(
        self, path: Path, total_steps: int | None, epochs: int, world_size: int, mfu: Mfu | None = None
    ) -> None:
        super().__init__(total_steps, epochs, world_size, io.StringIO(), mfu)
        self._path = path
        self._every_s = EVERY_S
        # A filter, not a handler: with one, `logging` would stop printing warnings if the user has not configured it.
        _LOGGER.addFilter(self._hear)

    def begin(self) -> None:
        """Write the messages so far, and from now on all new ones; a second call has no effect.

        Raises:
            OSError: The file cannot be written.
        """
        if isinstance(self._stream, io.StringIO):
            said = self._stream.getvalue()
            self._stream = _opened(self._path)
            self._stream.write(said)
            self._stream.flush()

    def on_run_end(self, record: RunRecord) -> None:
        """Log how the run ended."""
        super().on_run_end(record)
        for note in record.notes:
            self._say(f"note: {note}")
        self._say(f"{record.status} after step {record.steps:,}, loss {number(record.quality.train_loss)}")

    def close(self) -> None:
        """Stop logging."""
        _LOGGER.removeFilter(self._hear)
        with contextlib.suppress(OSError):  # such as a full disk
            self._stream.close()

    def _hear(self, record: logging.LogRecord) -> bool:
        with contextlib.suppress(OSError, ValueError):
            self._say(record.getMessage())
        return True

    def _say(self, text: str) -> None:
        stamp = datetime.now().isoformat(" ", "seconds")
        for line in text.splitlines():
            self._stream.write(f"{stamp}  {printable(line)}\n")
        self._stream.flush()
