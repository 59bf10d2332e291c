"""Agree on one run folder for all processes of a job before any of them has a process group."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

import psutil

from frameworm.errors import EnvironmentSetupError, RunFolderError
from frameworm.launch.environment import ProcessInfo, all_variables, detect, different_variables, restart_count
from frameworm.records.atomic import check_private, private_folder, write_atomic
from frameworm.records.reading import read_text
from frameworm.records.store import RunFolder

WAIT_FOR_FOLDER_S = 60.0
WAIT_FOR_RANKS_S = 10.0
_POLL_S = 0.02


class SharedFolder:
    """The run folder, created by rank 0; other ranks on the machine read its path from a file.

    Workers of one launcher have the same parent, so its process ID and start time identify the job. Ranks on other
    machines do not see that file: they need `--out`, a folder that all machines share.

    Args:
        process: This process's place among the ranks.
        out: The requested folder, or None for runs/<name>-<time>.
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
        """Return the folder; ranks other than 0 wait for it.

        Raises:
            RunFolderError: If rank 0 does not create it in time.
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
        """Signal that this rank has written everything."""
        if self.process.rank > 0 and self.folder is not None:
            with contextlib.suppress(OSError):
                self._done_file(self.process.rank).touch()

    def wait_for_ranks(self, timeout_s: float = WAIT_FOR_RANKS_S) -> list[int]:
        """Wait on rank 0 until the others are done; return those that are not."""
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


class RankMeeting:
    """Coordinates the processes of one launcher on one machine: rank 0 gets all their variables and decides.

    Args:
        process: This process's place among the ranks.

    Raises:
        EnvironmentSetupError: If the processes are spread over several machines.
    """

    def __init__(self, process: ProcessInfo) -> None:
        if process.num_nodes > 1 and process.launcher != "explicit":
            raise EnvironmentSetupError(
                f"tuning takes the processes of one machine, and these run on {process.num_nodes}; start it on one"
            )
        self.process = process
        self._note = _meeting_point(process)

    def variables(self) -> list[dict[str, str | None]]:
        """Return, on rank 0, the environment variables of each rank that differ from its own.

        Raises:
            EnvironmentSetupError: If a rank does not appear in time.
        """
        write_atomic(self._file("leader"), str(os.getpid()))
        found: list[dict[str, str | None]] = [{}]
        for rank in range(1, self.process.world_size):
            path = self._file(f"rank{rank}")
            text = self._wait(path, WAIT_FOR_FOLDER_S)
            path.unlink(missing_ok=True)  # variables may hold secrets
            if text is None:
                raise EnvironmentSetupError(
                    f"rank {rank} has not come within {WAIT_FOR_FOLDER_S:.0f} s; all of them must be on this machine"
                )
            found.append(different_variables(json.loads(text)))
        return found

    def tell(self, code: int) -> None:
        """Tell the others, on rank 0, how it ended: the exit code that `wait` returns to them."""
        write_atomic(self._file("told"), str(code))
        for rank in range(1, self.process.world_size):
            self._wait(self._file(f"heard{rank}"), WAIT_FOR_RANKS_S)
        for path in self._note.parent.glob(f"{self._note.name}-*"):
            path.unlink(missing_ok=True)

    def wait(self) -> int:
        """Return, on other ranks, the exit code from rank 0, or 1 if it ended without one."""
        write_atomic(self._file(f"rank{self.process.rank}"), json.dumps(all_variables()))
        leader = self._wait(self._file("leader"), WAIT_FOR_FOLDER_S)
        if leader is None:
            return 1
        told = None
        while told is None:
            alive = psutil.pid_exists(int(leader))  # checked first: it may tell and end right after
            told = self._read(self._file("told"))
            if told is None and not alive:
                return 1
            time.sleep(_POLL_S)
        write_atomic(self._file(f"heard{self.process.rank}"), told)
        return int(told)

    def _file(self, name: str) -> Path:
        return self._note.with_name(f"{self._note.name}-{name}")

    def _wait(self, path: Path, seconds: float) -> str | None:
        deadline = time.monotonic() + seconds
        while (text := self._read(path)) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return text

    def _read(self, path: Path) -> str | None:
        check_private(path.parent)
        return read_text(path) if path.exists() else None


def who_am_i() -> tuple[ProcessInfo, str | None]:
    """Return this process's place among the ranks, and a note if the environment variables make no sense."""
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
