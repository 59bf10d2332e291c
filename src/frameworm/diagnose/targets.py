"""Grades the targets of a run: met, missed, or unknown if not measured."""

from __future__ import annotations

import operator
from collections.abc import Callable

from frameworm.config.observe_section import TargetsConfig
from frameworm.records.estimate import known
from frameworm.records.observations import SystemSummary, Target
from frameworm.records.schema import EpochRecord, RunRecord, Statistics

MET, MISSED, UNKNOWN = "met", "missed", "unknown"

_COMPARE: dict[str, Callable[[float, float], bool]] = {">": operator.gt, "<": operator.lt}
_LOWER_IS_BETTER = ("val_loss", "train_loss")


def grade_targets(record: RunRecord, limits: TargetsConfig | None = None) -> list[Target]:
    """Grade all targets that are set, in a fixed order; for a run on CPU, without those for a GPU.

    Args:
        record: The run.
        limits: The targets; default: `TargetsConfig()`.
    """
    limits = limits or TargetsConfig()
    system, checkpoint = record.system or SystemSummary(), record.checkpoint
    save_s, stall_s = (_each(total_s, checkpoint.count) for total_s in (checkpoint.save_s, checkpoint.stall_s))
    found = [
        _graded("samples_per_s", "samples/s", ">", limits.samples_per_s, record.throughput.samples_per_s, "/s"),
        _graded("cpu", "CPU", "<", limits.cpu, _mean(system.cpu_busy)),
        _graded("io_wait", "I/O wait", "<", limits.io_wait, _mean(system.io_wait)),
        _graded("host_memory", "system memory", "<", limits.host_memory, _most(system.host_memory)),
        _graded("checkpoint_save_s", "checkpoint save", "<", limits.checkpoint_save_s, save_s, "s"),
        _graded("checkpoint_stall_s", "checkpoint stall", "<", limits.checkpoint_stall_s, stall_s, "s"),
        _time_to_quality(record, limits),
    ]
    if _device_of(record).lower() != "cpu":
        found[:0] = [
            _graded("gpu_busy", "GPU busy", ">", limits.gpu_busy, _mean(system.gpu_busy)),
            _graded("gpu_memory", "GPU memory", ">", limits.gpu_memory, _gpu_memory(record)),
            _graded("mfu", "MFU", ">", limits.mfu, record.mfu),
        ]
    return [target for target in found if target is not None]


def _graded(
    name: str, label: str, sign: str, limit: float | None, value: float | None, unit: str = "%"
) -> Target | None:
    """Grade one target; None if it is off."""
    if limit is None:
        return None
    value = known(value)
    goal = {"%": f"{sign} {limit:.0%}", "s": f"{sign} {limit:g} s"}.get(unit, f"{sign} {limit:,g}")
    grade = UNKNOWN if value is None else MET if _COMPARE[sign](value, limit) else MISSED
    return Target(name, label, goal, limit, value, unit, grade)


def _time_to_quality(record: RunRecord, limits: TargetsConfig) -> Target | None:
    """Grade the time of the epochs up to the first that is good enough; a run that never gets there misses it."""
    if limits.quality is None:
        return None
    metric, within_s = limits.quality_metric, limits.time_to_quality_s
    time_s, seen = _reached_s(record.epochs, metric, limits.quality)
    sign = "<=" if metric in _LOWER_IS_BETTER else ">="
    goal = f"{metric} {sign} {limits.quality:g}" + ("" if within_s is None else f" in {within_s:g} s")
    grade = UNKNOWN if not seen else MISSED if time_s is None or (within_s and time_s > within_s) else MET
    return Target("time_to_quality_s", "time to quality", goal, within_s, time_s, "s", grade)


def _reached_s(epochs: list[EpochRecord], metric: str, quality: float) -> tuple[float | None, bool]:
    """Return when the metric was reached, if it was, and whether it was measured at all."""
    passed_s, seen = 0.0, False
    for epoch in epochs:
        passed_s += epoch.epoch_time_s
        value = known(getattr(epoch, metric))
        if value is not None:
            seen = True
            if value <= quality if metric in _LOWER_IS_BETTER else value >= quality:
                return passed_s, True
    return None, seen


def _each(total_s: float | None, count: int) -> float | None:
    total_s = known(total_s)
    return None if total_s is None or not known(count) else total_s / count


def _mean(spread: Statistics | None) -> float | None:
    return None if spread is None else known(spread.mean)


def _most(spread: Statistics | None) -> float | None:
    return None if spread is None else known(spread.max)


def _device_of(record: RunRecord) -> str:
    return str((record.environment or {}).get("device") or record.device or "")


def _gpu_memory(record: RunRecord) -> float | None:
    """Fraction of the GPU's memory in use at the peak: of this process, or of all if only the driver knows."""
    system = record.system
    peak, total = known(record.memory.peak_bytes), known(record.memory.total_bytes)
    if _device_of(record) and peak is not None and total:
        return peak / total
    if system is None or system.gpu_memory_bytes is None:
        return None
    peak, total = known(system.gpu_memory_bytes.max), known(system.gpu_memory_total_bytes)
    return peak / total if peak is not None and total else None
