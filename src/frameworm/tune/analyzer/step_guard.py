"""Measure a user's own training step for the guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import torch

from frameworm.guard.measure import MEASURED_S, WARMUP_CALLS, measure_calls
from frameworm.guard.run_metrics import RunMetrics, crowding
from frameworm.hardware.fingerprint import environment_fingerprint


def measure_step(
    function: Callable[[], Any], name: str, *, warmup: int = WARMUP_CALLS, measured_s: float = MEASURED_S
) -> RunMetrics:
    """Time a callable, including device memory and disturbance by other programs.

    Args:
        function: One step, without arguments.
        name: Name of the run; only runs of the same name can be compared.
        warmup: Calls before the measured ones.
        measured_s: How long to measure.

    Returns:
        The measurements, with the environment.
    """
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    process = psutil.Process()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    machine, own_s = psutil.cpu_times(), _cpu_s(process)
    synchronize = torch.cuda.synchronize if on_gpu else None
    run = measure_calls(function, name, warmup=warmup, measured_s=measured_s, synchronize=synchronize)
    machine_after = psutil.cpu_times()
    whole_s = sum(machine_after) - sum(machine)
    if whole_s > 0:
        busy = 1 - (machine_after.idle - machine.idle) / whole_s
        run.crowding = crowding(busy, (_cpu_s(process) - own_s) / whole_s)
    if on_gpu:
        run.memory["device_bytes"] = torch.cuda.max_memory_allocated()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    run.environment = environment_fingerprint(device)
    run.work.workload = name
    return run


def _cpu_s(process: psutil.Process) -> float:
    """Processor time of a process and its children."""
    total_s = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.Error:
            continue
        total_s += times.user + times.system
    return total_s
