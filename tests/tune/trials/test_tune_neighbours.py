"""What other work takes from the processes of a trial."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest

from frameworm.hardware.core_wait import CoreWait, Waits
from frameworm.observe.system import host_sources
from frameworm.tune.processes.neighbours import Neighbours
from frameworm.tune.trials.live import Stand
from frameworm.tune.trials.windows import CalmWindow, Size, measure_calm


@pytest.mark.parametrize(
    ("cores", "own", "waiting", "disturbed"),
    [
        ([1.0, 1.0], 1.0, 0.4, 0.4),  # others have one core of two; it waited less than that
        ([1.0, 0.6], 1.0, 0.9, 0.3),
        ([1.0, 1.0], 2.0, 0.5, 0.0),  # what its own threads take from each other
        ([1.0, 1.0], 1.0, 0.0, 0.0),  # others work, and it never waits
        ([], 1.0, 0.5, 0.0),
    ],
)
def test_only_cores_that_others_had_and_it_wanted_count(
    cores: list[float], own: float, waiting: float, disturbed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = iter([0.0, 2.0 * own])
    monkeypatch.setattr(host_sources.HostSampler, "read", lambda self: SimpleNamespace(cores=cores))
    monkeypatch.setattr(host_sources.Family, "read", lambda self: SimpleNamespace(cpu_s=next(spent)))
    monkeypatch.setattr(CoreWait, "read", lambda self, clock_s: Waits(waiting))
    clock = iter([100.0, 102.0])
    monkeypatch.setattr("frameworm.tune.processes.neighbours.perf_counter", lambda: next(clock))
    assert Neighbours([os.getpid()]).disturbance() == pytest.approx(disturbed)


class Windows:
    """A live run whose windows were disturbed like that, one after the other."""

    def __init__(self, *disturbed: float) -> None:
        self._disturbed = iter(disturbed)
        self.made = 0

    def go(self, lead_in: int, steps: int) -> Stand:
        self.made += 1
        return Stand(float(self.made), 10, steps, 1.0, disturbed=next(self._disturbed))


def test_a_disturbed_window_is_repeated_and_the_calmest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frameworm.tune.trials.windows._FIRST_REST_S", 0.001)
    later = time.monotonic() + 60
    assert measure_calm(Windows(0.05), Size(1, 2), later) == CalmWindow(0.1, 0.05, False)
    assert measure_calm(Windows(0.5, 0.4, 0.02), Size(1, 2), later) == CalmWindow(0.3, 0.02, True)
    assert measure_calm(Windows(0.5), Size(1, 2), time.monotonic()) == CalmWindow(0.1, 0.5, False)
