"""The result of an analysis, as an object and as plain data for the caller."""

from __future__ import annotations

import dataclasses
from typing import Any

import psutil
import torch
from torch import nn

from frameworm.records.estimate import Interval
from frameworm.records.schema import RunRecord, json_ready
from frameworm.report.kit.printed import Printed
from frameworm.report.tune.analysis import UNITS, render_analysis
from frameworm.tune.analyzer.experiments import AS_IS, NO_SYNC, SAME_BATCH, WAIT, Measured
from frameworm.tune.analyzer.settle import ExperimentResult


@dataclasses.dataclass
class Analysis:
    """The results of the experiments on this rank."""

    record: RunRecord
    measured: Measured
    gains: dict[str, ExperimentResult]
    samples: int  # per step, on all ranks
    workers: int | None
    other_workers: int | None
    wall_s: float
    steps_per_epoch: int | None = None
    sync_every: int = 1  # steps between two communications


def describe(analysis: Analysis, model: nn.Module, device: torch.device) -> Printed:
    """The analysis as plain data; see `BottleneckAnalyzer.analyze`."""
    measured, record = analysis.measured, analysis.record
    compute, as_is = measured.step_s(SAME_BATCH), measured.step_s(AS_IS)
    no_sync = measured.step_s(NO_SYNC)
    wait = record.phases.get("data_wait")
    total_s, sent = record.communication.total_s, record.communication.bytes_per_step
    exposed_s = 0.0 if record.batch.world_size == 1 else None
    if compute is not None and no_sync is not None:
        exposed_s = max(0.0, compute.value - no_sync.value)
    size = sum(item.numel() * item.element_size() for item in model.parameters())
    variants = dict.fromkeys(name for item in measured.rounds for name in item if name != WAIT)
    data: dict[str, Any] = json_ready(
        {
            "compute": {
                "time_ms": _ms(compute),
                "throughput": None if compute is None else analysis.samples / compute.value,
            },
            "communication": {
                "time_ms": None if exposed_s is None else exposed_s * 1e3,
                "bandwidth_gbps": sent * 8 / total_s / 1e9 if sent and total_s else None,
                "param_size_mb": size / 2**20,
            },
            "data_loading": {
                "time_ms": None if compute is None or as_is is None else max(0.0, as_is.value - compute.value) * 1e3,
                "throughput": measured.loader_samples_per_s,
                "wait_ms": None if wait is None else wait.mean_s * 1e3,
                "num_workers": analysis.workers,
                "tried_workers": analysis.other_workers,
            },
            "memory": _memory(device, record),
            "per_epoch": _per_epoch(analysis),
            "batch": record.to_dict()["batch"],
            "verdict": record.verdict,
            "findings": [dataclasses.asdict(item) for item in record.findings],
            "experiments": {
                "step_ms": {name: _interval_ms(measured.step_s(name)) for name in variants},
                "rounds": len(measured.rounds),
                "skipped": measured.skipped,
                "wall_s": analysis.wall_s,
            },
            "notes": record.notes,
            "units": UNITS,
        }
    )
    return Printed(data, render_analysis)


def _per_epoch(analysis: Analysis) -> dict[str, float | None]:
    """Steps, how often gradients are averaged over the ranks, and how much a rank sends for that."""
    steps, communication = analysis.steps_per_epoch, analysis.record.communication
    sent = communication.bytes_per_step
    met = None if steps is None else steps // analysis.sync_every
    return {
        "steps": steps,
        "communications": met if analysis.record.batch.world_size > 1 else 0,
        "sent_gb": None if steps is None or sent is None else _gb(steps * sent),
    }


def _memory(device: torch.device, record: RunRecord) -> dict[str, float | None]:
    peak, total = record.memory.peak_bytes, record.memory.total_bytes
    allocated: int | None
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    else:
        allocated, reserved = int(psutil.Process().memory_info().rss), None
    return {
        "allocated_gb": _gb(allocated),
        "reserved_gb": _gb(reserved),
        "peak_gb": _gb(peak),
        "total_gb": _gb(total),
        "usage_pct": None if peak is None or not total else 100 * peak / total,
    }


def _gb(size: int | None) -> float | None:
    return None if size is None else size / 2**30


def _ms(interval: Interval[float] | None) -> float | None:
    return None if interval is None else interval.value * 1e3


def _interval_ms(interval: Interval[float] | None) -> dict[str, float] | None:
    return None if interval is None else dataclasses.asdict(interval.scaled(1e3))
