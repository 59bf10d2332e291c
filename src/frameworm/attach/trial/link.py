"""How the processes of a trial talk with the tuner: lines of JSON, in a pipe each way for each rank."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

# More steps than a script makes: a process that nobody times is not to stand.
_NEVER = 10**9
_WAIT_S = 3600.0


class Link:
    """This process's end.

    Args:
        commands: Numbers of the files to read from, one for each rank.
        reports: Numbers of the files to write to, likewise.
        rank: Of this process; None: it is known once the process trains, from the process group that it has joined.
        is_child: The script has started this process.
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
        """Of this process, among those that the tuner waits for; None: it does not wait for this one, or not yet."""
        if self._given is not None:
            return None if self._is_child() else self._given
        group = _group()
        if group is not None and group[1] == len(self._reports):
            self._joined = group[0]  # for good: a script may leave its group before it ends
        return self._joined

    def report(self, told: dict[str, Any]) -> None:
        """Tell the tuner something; without a tuner the trial ends."""
        rank = self.rank
        if rank is not None:
            self._write(rank, told)
            self._has_told = True
        elif self._given is not None and not self._has_told:
            # The script trains here, and not in the process that the tuner has started.
            group = _group()
            self._write(self._given, {"event": "elsewhere", "world_size": 0 if group is None else group[1]})
            time.sleep(_WAIT_S)  # the tuner kills this process

    def report_end(self, told: dict[str, Any]) -> None:
        """Tell that the script has come to its end, whichever of its processes the tuner waits for."""
        for rank in range(len(self._reports)) if self._given is None else (self._given,):
            self._write(rank, told)

    def receive(self) -> dict[str, Any]:
        """What to do next."""
        rank = self.rank
        if rank is None:
            return {"go": _NEVER}
        if self._reading is None:
            self._reading = os.fdopen(self._commands[rank], encoding="utf-8")
        line = self._reading.readline()
        if not line:
            os.kill(os.getpid(), signal.SIGKILL)  # an end by itself would run the script's own clean-up
        told: dict[str, Any] = json.loads(line)
        return told

    def _is_child(self) -> bool:
        """Whether the script has started this process."""
        return os.getpid() != self._process

    def _write(self, rank: int, told: dict[str, Any]) -> None:
        try:
            with os.fdopen(self._reports[rank], "w", encoding="utf-8", closefd=False) as reports:
                print(json.dumps(told), file=reports)
        except OSError:
            os.kill(os.getpid(), signal.SIGKILL)


def _group() -> tuple[int, int] | None:
    """This process's rank in its process group, and the group's size."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return None
    return module.get_rank(), module.get_world_size()
