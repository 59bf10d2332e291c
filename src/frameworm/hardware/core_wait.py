"""How long a process was ready to run but had no core, because others had them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/")
_NANOSECONDS = 1e9


class _Moment(NamedTuple):
    clock_s: float
    waited_s: dict[str, float]  # per thread
    stolen: float | None  # in ticks of all usable cores, like `busy`
    busy: float


class Waits(NamedTuple):
    """CPU time lost in one interval.

    Attributes:
        waiting: Fraction of the time in which the longest-waiting thread was ready but had no core, because another
            thread had it or because the quota was used up.
        stolen: Fraction of the cores' busy time that the hypervisor gave to other machines.
    """

    waiting: float | None = None
    stolen: float | None = None

    @property
    def lost(self) -> float:
        """Fraction of the time in which the process was ready but could not run; unknown parts count as 0."""
        return 1 - (1 - (self.waiting or 0.0)) * (1 - (self.stolen or 0.0))


class CoreWait:
    """Reads the kernel's accounting of waiting time, which exists on Linux only; elsewhere the result is unknown.

    Threads of one operation wait for each other at its end. So if one of them has no core, all are delayed, and the
    thread that waits longest determines the delay. Time stolen by other machines on the same hardware is not in a
    thread's account, but in that of the cores.

    Args:
        process: Process id; None: this process.
        root: Where /proc is mounted.
    """

    def __init__(self, process: int | None = None, root: Path = _ROOT) -> None:
        self._tasks = root / "proc" / ("self" if process is None else str(process)) / "task"
        self._stat = root / "proc/stat"
        self._before: _Moment | None = None

    def read(self, clock_s: float) -> Waits:
        """Return what was lost since the last call; unknown at the first call.

        Args:
            clock_s: The current time of a monotonic clock.
        """
        stolen, busy = self._cores()
        before, now = self._before, _Moment(clock_s, self._threads(), stolen, busy)
        self._before = now
        if before is None or now.clock_s <= before.clock_s:
            return Waits()
        elapsed_s = now.clock_s - before.clock_s
        grown = [waited_s - before.waited_s.get(thread, 0.0) for thread, waited_s in now.waited_s.items()]
        waiting = min(1.0, max(0.0, max(grown)) / elapsed_s) if grown else None
        if now.stolen is None or before.stolen is None:
            return Waits(waiting)
        taken, worked = max(0.0, now.stolen - before.stolen), max(0.0, now.busy - before.busy)
        return Waits(waiting, taken / (taken + worked) if taken + worked > 0 else 0.0)

    def _threads(self) -> dict[str, float]:
        """Seconds that each thread of the process has waited for a core so far."""
        found: dict[str, float] = {}
        try:
            threads = list(self._tasks.iterdir())
        except OSError:
            return found
        for thread in threads:
            try:
                words = (thread / "schedstat").read_text().split()
                found[thread.name] = int(words[1]) / _NANOSECONDS
            except (OSError, ValueError, IndexError):  # it has ended, or the kernel has no such accounting
                continue
        return found

    def _cores(self) -> tuple[float | None, float]:
        """Ticks stolen from the cores this process may use, and ticks in which they were busy."""
        try:
            lines = self._stat.read_text().splitlines()
            usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        except OSError:
            return None, 0.0
        stolen: float | None = None
        busy = 0.0
        for line in lines:
            name, *words = line.split() or [""]
            number = name.removeprefix("cpu")
            if not number.isdigit() or name == number or (usable is not None and int(number) not in usable):
                continue
            try:
                user, nice, system, _, _, interrupts, soft, steal = (float(word) for word in words[:8])
            except ValueError:
                return None, 0.0
            stolen = (stolen or 0.0) + steal
            busy += user + nice + system + interrupts + soft
        return stolen, busy
