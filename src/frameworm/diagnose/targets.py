"""The usual targets of a training, graded: met, missed, or unknown where nobody measured."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

from frameworm.records.estimate import known
from frameworm.records.schema import RunRecord, Statistics

MET, MISSED, UNKNOWN = "met", "missed", "unknown"


@dataclass(frozen=True, slots=True)
class Target:
    """One target: a share (`unit` %) or a time (`unit` s), its limit, and how the run did."""

    name: str
    goal: str
    value: float | None
    grade: str
    unit: str = "%"
    on_gpu: bool = False  # means nothing on a CPU


def grade_targets(record: RunRecord) -> list[Target]:
    """All targets, in a fixed order."""
    system = record.system
    checkpoint = record.checkpoint
    stall_s, count = known(checkpoint.stall_s), known(checkpoint.count)
    return [
        _graded("GPU busy", ">", 0.85, _mean(system.gpu_busy) if system else None, on_gpu=True),
        _graded("GPU memory", ">", 0.7, _gpu_memory(record), on_gpu=True),
        _graded("CPU", "<", 0.8, _mean(system.cpu_busy) if system else None),
        _graded("I/O wait", "<", 0.1, _mean(system.io_wait) if system else None),
        _graded("checkpoint", "<", 1.0, stall_s / count if stall_s is not None and count else None, unit="s"),
    ]


_COMPARE: dict[str, Callable[[float, float], bool]] = {">": operator.gt, "<": operator.lt}


def _graded(
    name: str, sign: str, limit: float, value: float | None, *, unit: str = "%", on_gpu: bool = False
) -> Target:
    goal = f"{sign} {limit:.0%}" if unit == "%" else f"{sign} {limit:g} {unit}"
    grade = UNKNOWN if value is None else MET if _COMPARE[sign](value, limit) else MISSED
    return Target(name, goal, value, grade, unit, on_gpu)


def _mean(spread: Statistics | None) -> float | None:
    return None if spread is None else known(spread.mean)


def _gpu_memory(record: RunRecord) -> float | None:
    """Most of the GPU's memory in use at once: by this process, or by all where only the driver knows."""
    environment = record.environment or {}
    if environment.get("device") == "cpu" or record.device == "CPU":
        return None
    system = record.system
    peak, total = known(record.memory.peak_bytes), known(record.memory.total_bytes)
    if (environment.get("device") or record.device) and peak is not None and total:
        return peak / total
    if system is None or system.gpu_memory_bytes is None:
        return None
    peak, total = known(system.gpu_memory_bytes.max), known(system.gpu_memory_total_bytes)
    return peak / total if peak is not None and total else None
