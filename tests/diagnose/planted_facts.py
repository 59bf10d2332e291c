"""Runs with a known fault, made of records alone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from frameworm.records.observations import RankSummary, SystemSummary
from frameworm.records.schema import Batch, Memory, RunRecord, Statistics, StepRecord
from frameworm.records.statistics import summarise_steps
from frameworm.records.trace import DeviceTime, HostTime, TraceSummary

GIB = 2**30
COMPUTE = {"data_wait": 0.0002, "forward": 0.008, "backward": 0.010, "optimizer": 0.001, "other": 0.0002}


def around(value: float, std: float = 0.0) -> Statistics:
    return Statistics(value, std, value - std, value + std, value, value + std, value + std)


def make_steps(
    phases: Mapping[str, float] = COMPUTE,
    count: int = 100,
    noise: float = 0.02,
    every: Mapping[str, tuple[int, float]] | None = None,
    seed: int = 0,
    **fields: Any,
) -> list[StepRecord]:
    """Steps whose phases vary independently by `noise` of themselves; `every` adds a phase once in so many steps."""
    draw = random.Random(seed)
    steps = []
    for number in range(1, count + 1):
        parts = {name: max(seconds * (1 + noise * draw.gauss(0, 1)), 0.0) for name, seconds in phases.items()}
        for name, (period, seconds) in (every or {}).items():
            if number % period == 0:
                parts[name] = seconds
        values: dict[str, Any] = {"samples": 128, "count": 128.0, "loss": 1.0, "lr": 0.1, **fields}
        steps.append(
            StepRecord(step=number, epoch=1, time=float(number), step_s=sum(parts.values()), phases=parts, **values)
        )
    return steps


def make_record(steps: list[StepRecord], device: str = "cpu", world_size: int = 1, **fields: Any) -> RunRecord:
    """The record that belongs to the steps, on a machine with 8 cores."""
    summary = summarise_steps(steps, world_size=world_size)
    environment = {"device": device, "cpus_usable": 8, "torch_threads": 8, "memory_bytes": 64 * GIB}
    environment.update(fields.pop("environment", {}))
    values: dict[str, Any] = {
        "batch": Batch(128, 1, world_size, 128 * world_size),
        "steps": len(steps),
        "wall_s": sum(step.step_s for step in steps) + 1.0,
        "device": "CPU" if device == "cpu" else device,
        "precision": "fp32" if device == "cpu" else "bf16",
        "throughput": summary.throughput,
        "phases": summary.phases,
        "padding_waste": summary.padding_waste,
        "memory": Memory(1 * GIB, None, 64 * GIB) if device == "cpu" else Memory(60 * GIB, 62 * GIB, 80 * GIB),
        **fields,
    }
    return RunRecord(name="planted", status="completed", environment=environment, **values)


def gpu_system(busy: float = 0.96, std: float = 0.01, **fields: Any) -> SystemSummary:
    return SystemSummary(samples=50, interval_s=1.0, gpu_busy=around(busy, std), **fields)


def cpu_system(busy: float = 0.5, **fields: Any) -> SystemSummary:
    return SystemSummary(samples=50, interval_s=1.0, cpu_busy=around(busy, 0.01), **fields)


def climbing(start: float, end: float) -> Statistics:
    """The spread of a figure that grows evenly."""
    middle = (start + end) / 2
    return Statistics(middle, (end - start) / 3.46, start, end, middle, end, end)


def make_trace(**waits: float) -> TraceSummary:
    """One second of a device, with seconds of wait by cause."""
    waited = sum(waits.values())
    device = DeviceTime(0, 1.0, 1 - waited, waited, 1 - waited, 0.0, 0.0, dict(waits), 1)
    return TraceSummary("trace.json", 1.0, 1000, HostTime(0.5, 0.0, 0.0), devices=[device])


def rank(number: int, wait_s: float | None, host: str = "a", **phases: float) -> RankSummary:
    return RankSummary(number, 0.03, {**COMPUTE, **phases}, None, wait_s, host)
