"""Communication of a trial's processes with the tuner: lines of JSON in two pipes per rank."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

# More steps than any script makes, so that a process that is not timed never pauses.
_NEVER = 10**9
_WAIT_S = 3600.0


class Link:
    """This process's end of the pipes.

    Args:
        commands: File descriptors to read from, one per rank.
        reports: File descriptors to write to, one per rank.
        rank: Rank of this process; None if it will be known from the process group once the process trains.
        is_child: Whether the script has started this process.
    """

    def __init__(
        self, commands: Sequence[int], reports: Sequence[int], rank: int | None, *, is_child: bool = False
    ) -> None:
        self._commands, self._reports, self._given = commands, reports, rank
        self._process = 0 if is_child else os.getpid()
        self._reading: TextIO | None = None
        self._joined: int | None = None
        self._has_told = False

    @property
    def rank(self) -> int | None:
        """Rank of this process among those that the tuner waits for; None if it is not (yet) one of them."""
        if self._given is not None:
            return None if self._is_child() else self._given
        group = _group()
        if group is not None and group[1] == len(self._reports):
            self._joined = group[0]  # kept, as a script may leave its group before it ends
        return self._joined

    def report(self, told: dict[str, Any]) -> None:
        """Send a message to the tuner; the trial ends if the tuner is gone."""
        rank = self.rank
        if rank is not None:
            self._write(rank, told)
            self._has_told = True
        elif self._given is not None and not self._has_told:
            # The script trains here, not in the process that the tuner has started.
            group = _group()
            self._write(self._given, {"event": "elsewhere", "world_size": 0 if group is None else group[1]})
            time.sleep(_WAIT_S)  # the tuner kills this process

    def report_end(self, told: dict[str, Any]) -> None:
        """Report the end of the script for every process that the tuner waits for."""
        for rank in range(len(self._reports)) if self._given is None else (self._given,):
            self._write(rank, told)

    def receive(self) -> dict[str, Any]:
        """Return the next command."""
        rank = self.rank
        if rank is None:
            return {"go": _NEVER}
        if self._reading is None:
            self._reading = os.fdopen(self._commands[rank], encoding="utf-8")
        line = self._reading.readline()
        if not line:
            os.kill(os.getpid(), signal.SIGKILL)  # a normal exit would run the script's own cleanup
        told: dict[str, Any] = json.loads(line)
        return told

    def _is_child(self) -> bool:
        """Whether this process is a child of the trial's process."""
        return os.getpid() != self._process

    def _write(self, rank: int, told: dict[str, Any]) -> None:
        try:
            with os.fdopen(self._reports[rank], "w", encoding="utf-8", closefd=False) as reports:
                print(json.dumps(told), file=reports)
        except OSError:
            os.kill(os.getpid(), signal.SIGKILL)


def _group() -> tuple[int, int] | None:
    """Return this process's rank in its process group, and the group's size."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return None
    return module.get_rank(), module.get_world_size()
