"""TensorBoard event files, by torch's own writer."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from frameworm.observe.loggers.protocol import LoggedRun

FOLDER_NAME = "tensorboard"


class TensorBoardLogger:
    """Writes event files; show them with `tensorboard --logdir FOLDER`.

    Args:
        folder: Where to write them; None: `tensorboard` in the run folder.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._make_writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = None
        self._step = 0

    def start(self, run: LoggedRun) -> str | None:
        """Start a new file; TensorBoard hides values in earlier files of the run for the steps that are repeated."""
        # A folder of the user's own is shared by many runs, each in a subfolder.
        folder = (run.folder or Path()) / FOLDER_NAME if self._folder is None else self._folder / run.name
        self._step = run.step
        self._writer = self._make_writer(str(folder), purge_step=run.step + 1)
        text = yaml.safe_dump(dict(run.config), sort_keys=False)
        self._writer.add_text("config", _as_code(text), run.step)
        return None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write one scalar for each value."""
        self._step = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, status: str, summary: Mapping[str, Any]) -> None:
        """Write the summary as a text, and close the file."""
        self._writer.add_text("summary", _as_code(yaml.safe_dump(dict(summary), sort_keys=False)), self._step)
        self._writer.close()


def _as_code(text: str) -> str:
    """Indent a text by four spaces, which TensorBoard's Markdown shows verbatim."""
    return "".join(f"    {line}\n" for line in text.splitlines())
