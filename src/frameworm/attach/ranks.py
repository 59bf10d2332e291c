"""One run folder for all processes of a job, agreed on before any of them has a process group."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

import psutil

from frameworm.errors import EnvironmentSetupError, RunFolderError
from frameworm.launch.environment import ProcessInfo, detect, restart_count
from frameworm.records.atomic import check_private, private_folder, write_atomic
from frameworm.records.reading import read_text
from frameworm.records.store import RunFolder

WAIT_FOR_FOLDER_S = 60.0
WAIT_FOR_RANKS_S = 10.0
_POLL_S = 0.02


class SharedFolder:
    """The folder of the run, made by rank 0; the others of a machine read from a file where it is.

    Workers of one launcher have the same parent, so its number and birth name the job. Ranks on other machines have no
    such file: they need `--out`, a folder that all machines see.

    Args:
        out: The folder asked for, or None for runs/<name>-<time>.
        name: Name of the run.
    """

    def __init__(self, process: ProcessInfo, out: Path | None, name: str) -> None:
        self.process = process
        self.folder: RunFolder | None = None
        self._out = None if out is None else out.absolute()
        self._note = _meeting_point(process) if process.world_size > 1 else None
        if process.rank == 0:
            self.folder = RunFolder.create(self._out, name, Path("runs").absolute())
            if self._note is not None:
                write_atomic(self._note, str(self.folder.path))

    def find(self) -> RunFolder:
        """The folder; ranks other than 0 wait for it.

        Raises:
            RunFolderError: Rank 0 has not made it in time.
        """
        deadline = time.monotonic() + WAIT_FOR_FOLDER_S
        while self.folder is None:
            if self.process.node_rank > 0 and self._out is not None:
                self.folder = RunFolder(self._out)
                self._out.mkdir(parents=True, exist_ok=True)
            elif (word := self._read_note()) is not None:
                self.folder = RunFolder(word)
            elif time.monotonic() > deadline or self.process.node_rank > 0:
                where = "give all machines the same --out" if self.process.node_rank > 0 else "see what rank 0 says"
                raise RunFolderError(f"rank {self.process.rank} found no run folder to write to; {where}")
            else:
                time.sleep(_POLL_S)
        return self.folder

    def done(self) -> None:
        """This rank has written all it had."""
        if self.process.rank > 0 and self.folder is not None:
            with contextlib.suppress(OSError):
                self._done_file(self.process.rank).touch()

    def wait_for_ranks(self, timeout_s: float = WAIT_FOR_RANKS_S) -> list[int]:
        """Rank 0 waits until the others are done; returns those that are not."""
        deadline = time.monotonic() + timeout_s
        missing = list(range(1, self.process.world_size))
        while True:
            missing = [rank for rank in missing if not self._done_file(rank).exists()]
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        for rank in range(1, self.process.world_size):
            with contextlib.suppress(OSError):
                self._done_file(rank).unlink()
        if self._note is not None:
            with contextlib.suppress(OSError):
                self._note.unlink()
        return missing

    def _done_file(self, rank: int) -> Path:
        assert self.folder is not None
        return self.folder.path / f".rank{rank}-done"

    def _read_note(self) -> str | None:
        """Return rank 0's note, or None if it is missing or another user could have written it."""
        assert self._note is not None, "rank 0 alone makes the folder"
        try:
            check_private(self._note.parent)
            return read_text(self._note)
        except (OSError, ValueError):
            return None


def who_am_i() -> tuple[ProcessInfo, str | None]:
    """This process's place among others, and what to say if the variables make no sense."""
    try:
        return detect(), None
    except EnvironmentSetupError as error:
        return ProcessInfo(), f"observed as a process of its own: {error}"


def _meeting_point(process: ProcessInfo) -> Path:
    parent = os.getppid()
    born = ""
    with contextlib.suppress(psutil.Error):
        born = repr(psutil.Process(parent).create_time())
    words = (parent, born, process.master_address, process.master_port, restart_count())
    digest = hashlib.sha256(repr(words).encode()).hexdigest()[:20]
    try:
        return private_folder() / f"profile-{digest}"
    except OSError as error:
        raise EnvironmentSetupError(f"cannot use {error.filename}: {error.strerror}") from None
