"""From what a run measured to its record."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from frameworm.engine.progress import Progress
from frameworm.hardware.host import host_peak_bytes, memory_total_bytes
from frameworm.records.events import Listener
from frameworm.records.schema import (
    CheckpointStatistics,
    Communication,
    Memory,
    Quality,
    RunRecord,
    StepRecord,
)
from frameworm.records.statistics import StepAggregate

GROUP_STEPS = 64


class Tally(Listener):
    """Listens to every step of this rank and keeps the figures of the run.

    Steps are summed up many at a time: after each step of a model, the code and data for it would have left the
    processor's caches, and summing would cost several times as much.
    """

    def __init__(self) -> None:
        self._aggregate = StepAggregate()
        self._waiting: list[StepRecord] = []

    @property
    def aggregate(self) -> StepAggregate:
        """The figures of all steps so far."""
        self._sum_up()
        return self._aggregate

    def on_step(self, step: StepRecord) -> None:
        self._waiting.append(step)
        if len(self._waiting) >= GROUP_STEPS:
            self._sum_up()

    def _sum_up(self) -> None:
        for step in self._waiting:
            self._aggregate.add(step)
        self._waiting.clear()


def fill_record(
    record: RunRecord,
    *,
    status: str,
    progress: Progress,
    aggregate: StepAggregate,
    world_sums: list[float] | None,
    communicated_bytes: int | None,
    device: torch.device,
    checkpoint: CheckpointStatistics,
    wall_s: float,
) -> None:
    """Put the run's figures into its record; what was not measured stays None.

    Args:
        world_sums: Measured samples and tokens summed over the ranks; None when the other ranks could not be asked.
    """
    record.status = status
    record.wall_s = wall_s
    record.steps = progress.step
    record.epochs = list(progress.epochs)
    world_size = record.batch.world_size
    if world_sums is None:
        record.throughput = aggregate.throughput(world_size)
    else:
        tokens = int(world_sums[1]) if aggregate.measured_tokens is not None else None
        record.throughput = aggregate.throughput(world_size, int(world_sums[0]), tokens)
    record.phases = aggregate.phases()
    record.padding_waste = aggregate.padding_waste()
    record.skipped_steps = aggregate.skipped
    alone = world_size == 1
    record.communication = Communication(
        total_s=0.0 if alone else None, exposed_s=0.0 if alone else None, bytes_per_step=communicated_bytes
    )
    record.memory = measure_memory(device)
    record.checkpoint = checkpoint
    if progress.epochs:
        last = progress.epochs[-1]
        record.quality = Quality(last.train_loss, last.val_loss, last.val_accuracy)


def measure_memory(device: torch.device) -> Memory:
    """The most memory this process has held so far."""
    host_bytes = host_peak_bytes()
    if device.type != "cuda":
        return Memory(peak_bytes=host_bytes, total_bytes=memory_total_bytes(), host_peak_bytes=host_bytes)
    return Memory(
        peak_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.max_memory_reserved(device),
        total_bytes=torch.cuda.get_device_properties(device).total_memory,
        host_peak_bytes=host_bytes,
    )


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, tied ones once."""
    return sum(item.numel() for item in model.parameters())


def describe_device(device: torch.device) -> str:
    """The device as a person would name it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def flatten_notes(*groups: Any) -> list[str]:
    """All notes in order, each once."""
    return list(dict.fromkeys(note for group in groups for note in (group or []) if note))
