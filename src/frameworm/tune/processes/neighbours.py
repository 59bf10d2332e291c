"""How much other work on the machine takes from the processes of a trial while they are timed."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from time import perf_counter

from frameworm.hardware.core_wait import CoreWait
from frameworm.observe.system.host_sources import Family, HostSampler


class Neighbours:
    """Watches one window of a trial from outside, starting at construction.

    Processes of this search do not count as other work: what a candidate's own threads and loader workers take from
    each other is the candidate's fault.

    Args:
        processes: Ids of the processes that are timed.
    """

    def __init__(self, processes: Iterable[int]) -> None:
        self._waits = [CoreWait(process) for process in processes]
        self._family, self._machine = Family(), HostSampler()
        self._began_s = self._look()[0]

    def disturbance(self) -> float:
        """Fraction of the time so far in which other processes used cores that a process of the trial was waiting for.

        0 if the system does not tell.
        """
        now_s, cores, own_s, lost = self._look()
        elapsed_s = now_s - self._began_s
        if not cores or own_s is None or elapsed_s <= 0:
            return 0.0
        others = fmean(cores) - own_s / elapsed_s / len(cores)
        return max(0.0, min(others, lost))

    def _look(self) -> tuple[float, list[float], float | None, float]:
        now_s = perf_counter()
        cores, own_s = self._machine.read().cores, self._family.read().cpu_s
        return now_s, cores, own_s, max((wait.read(now_s).lost for wait in self._waits), default=0.0)
