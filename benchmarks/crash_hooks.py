"""Kill -9 at the n-th call to storage, for crash_campaign.py. No torch here: the writing process imports it too."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = ("write", "fsync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "truncate", "open")
_lock = threading.Lock()


class Countdown:
    """Counts calls and ends the given processes at one of them.

    Args:
        at: Number of the call, from 1; None never.
        victims: Who is killed, in this order.
        note: Where the name of the last call is left.
        folder: Only calls on what lies below it count.
    """

    def __init__(self, at: int | None, victims: list[int], note: str, folder: str) -> None:
        self.at = at
        self.count = 0
        self._victims = victims
        self._note = note
        self._folder = folder
        self._places: dict[int, str] = {}

    def reached(self, name: str, place: str | None) -> bool:
        """Count a call; whether it is the one."""
        if place is None or not place.startswith(self._folder):
            return False
        with _lock:
            self.count += 1
            if self.count == self.at:
                Path(self._note).write_text(f"{self.count} {phase_of(name, place)}", encoding="utf-8")
                return True
            return False

    def strike(self) -> None:
        """The end."""
        for process in self._victims:
            os.kill(process, signal.SIGKILL)

    def place_of(self, item: Any, directory: int | None = None) -> str | None:
        """The path that a call is about."""
        if isinstance(item, int):
            return str(Path(f"/proc/self/fd/{item}").readlink())
        path = os.fspath(item)
        path = path.decode() if isinstance(path, bytes) else path
        return path if directory is None else str(Path(f"/proc/self/fd/{directory}").readlink() / path)


def phase_of(name: str, place: str) -> str:
    """What the program was about, in the words of the results table."""
    parts = place.split("/checkpoints", 1)[-1]
    if name in ("unlink", "remove", "rmdir") and ".tmp" not in parts:
        return "prune"
    if "latest" in parts:
        return "latest"
    if "manifest" in parts:
        return "manifest"
    if name in ("rename", "replace"):
        return "rename"
    if name == "fsync" and "rank-" not in parts:
        return "folder sync"
    return "write" if "rank-" in parts or name in ("mkdir", "open") else "clean-up"


def install(countdown: Countdown) -> None:
    """Put the countdown before every call to storage of this process; a write is cut in half by it."""
    for name in CALLS:
        _wrap(countdown, name, getattr(os, name))


def _wrap(countdown: Countdown, name: str, real: Callable[..., Any]) -> None:
    def hooked(item: Any, *rest: Any, **more: Any) -> Any:
        try:
            place = countdown.place_of(item, more.get("dir_fd") or more.get("src_dir_fd"))
        except (OSError, TypeError):
            place = None
        if countdown.reached(name, place):
            if name == "write":
                content = memoryview(rest[0]).cast("B")
                real(item, content[: len(content) // 2])
            countdown.strike()
        return real(item, *rest, **more)

    setattr(os, name, hooked)
