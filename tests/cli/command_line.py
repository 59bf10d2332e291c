"""The command line inside of the test process: a start costs milliseconds instead of seconds."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from frameworm.cli.main import main


class Ended(NamedTuple):
    """How a command ended and what it said."""

    code: int
    stdout: str
    stderr: str


class CommandLine:
    """Runs `frameworm ARGS...` in a working folder; what a user would see as a traceback comes out as an exception."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._patch = patch
        self._capture = capture

    def __call__(self, *args: str | Path) -> Ended:
        self._capture.readouterr()
        self._patch.setattr(sys, "argv", ["frameworm", *(str(argument) for argument in args)])
        with pytest.raises(SystemExit) as end:
            main()
        stdout, stderr = self._capture.readouterr()
        code = end.value.code or 0
        assert isinstance(code, int)
        return Ended(code, stdout, stderr)


@contextmanager
def command_line(
    folder: Path, cache: Path, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]
) -> Iterator[CommandLine]:
    """A command line in a new folder, and a process that is afterwards as before."""
    folder.mkdir()
    patch.chdir(folder)
    patch.setenv("FRAMEWORM_DATA_CACHE_DIR", str(cache))
    patch.setenv("COLUMNS", "120")
    # Workloads of one's own are found in the working folder; their compiled copies would count as left behind.
    patch.setattr(sys, "path", list(sys.path))
    patch.setattr(sys, "dont_write_bytecode", True)
    # The command line prepares torch and the log for the whole process.
    log = logging.getLogger("frameworm")
    handlers, level, propagate = list(log.handlers), log.level, log.propagate
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    try:
        yield CommandLine(folder, patch, capture)
    finally:
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.benchmark = benchmark
