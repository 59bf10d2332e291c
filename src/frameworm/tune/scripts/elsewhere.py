"""Detects that a script only waits for another program it has started, which computes with torch."""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

_TORCH = str(Path(torch.__file__).parent)
_COMPUTES_S = 10.0  # CPU seconds, more than imports take
_IDLE = 0.05
_LONGEST_COMMAND = 100


class _Seen(NamedTuple):
    """CPU seconds of a program and of the script itself when the script began to wait, and that moment."""

    program_s: float
    script_s: float
    at: float


class ElsewhereWatch:
    """Checks the processes of one trial from time to time.

    Args:
        pid: The trial's first process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: dict[int, _Seen] = {}

    def look(self) -> str | None:
        """The command of a program that trains in the script's place; None if there is none so far."""
        with suppress(psutil.Error):
            first = psutil.Process(self._pid)
            processes = [first, *first.children(recursive=True)]
            own = first.cmdline()
            script_s = sum(_computed_s(item) for item in processes if item.cmdline() == own)
            for item in processes:
                if item.cmdline() != own and _computes_with_torch(item):
                    now = _Seen(_computed_s(item), script_s, time.monotonic())
                    before = self._seen.setdefault(item.pid, now)
                    if now.script_s - before.script_s > _IDLE * (now.at - before.at):
                        self._seen[item.pid] = now
                    elif now.program_s - before.program_s > _COMPUTES_S:
                        command = shlex.join(item.cmdline())
                        return command if len(command) <= _LONGEST_COMMAND else f"{command[:_LONGEST_COMMAND]} ..."
        return None


def _computed_s(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def _computes_with_torch(process: psutil.Process) -> bool:
    """Whether it has loaded torch and is not a helper process of torch or multiprocessing."""
    helps = any(part.startswith(_TORCH) or "multiprocessing" in part for part in process.cmdline())
    with suppress(OSError):
        return not helps and "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
    return False
