"""Times a callable as if its calls were the steps of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from frameworm.guard.run_metrics import FEWEST_STEPS, RunMetrics

WARMUP_CALLS = 5
MEASURED_S = 3.0
FEWEST_CALLS = 60
MOST_CALLS = 10_000
# Calls shorter than this are timed in groups; otherwise the clock and the synchronisation would count.
SHORTEST_S = 0.0005


def measure_calls(
    function: Callable[[], Any],
    name: str,
    *,
    warmup: int = WARMUP_CALLS,
    measured_s: float = MEASURED_S,
    fewest: int = FEWEST_CALLS,
    synchronize: Callable[[], Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> RunMetrics:
    """Call a function many times and record its times as the steps of a run.

    Args:
        function: One step; its result is discarded.
        name: Name of the run.
        warmup: Calls that are not measured: caches, compilation, clocks.
        measured_s: How long to measure.
        fewest: Least number of measurements, even if that takes longer.
        synchronize: Waits until a device has finished a call's work; included in the call's time.
        clock: Returns seconds from any starting point.
    """
    assert fewest >= FEWEST_STEPS, "too few calls to judge"
    wait = synchronize or _nothing
    for _ in range(max(warmup, 1)):
        function()
    wait()
    began = clock()
    function()
    wait()
    together = max(math.ceil(SHORTEST_S / max(clock() - began, 1e-9)), 1)
    times: list[float] = []
    end = clock() + measured_s
    while len(times) < fewest or (clock() < end and len(times) < MOST_CALLS):
        began = clock()
        for _ in range(together):
            function()
        wait()
        times.append(max((clock() - began) / together, 1e-9))
    run = RunMetrics(name=name, steps=len(times) * together, left_out=warmup)
    run.set_times(times)
    return run


def _nothing() -> None:
    """Do nothing, because there is no device to wait for."""
