"""Turn what a run measured into its record."""

from __future__ import annotations

import logging
import platform
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frameworm.config.schema import Config
from frameworm.diagnose.rules.judge import apply_judgement, judge
from frameworm.diagnose.targets import grade_targets
from frameworm.engine.checkpoint.progress import Progress
from frameworm.engine.checkpoint.store import SAVE_FAILED
from frameworm.errors import MemoryLimitError, TrainingInterruptedError, TrainingPreemptedError
from frameworm.hardware.host import host_peak_bytes, memory_total_bytes
from frameworm.observe.clocks.phases import COMMUNICATION_EXPOSED
from frameworm.observe.clocks.ranks import RankWatch
from frameworm.records.account import StepAccount
from frameworm.records.events import Listener
from frameworm.records.observations import RankSummary
from frameworm.records.reading import read_json
from frameworm.records.schema import (
    CheckpointStatistics,
    Communication,
    Memory,
    Quality,
    RunRecord,
    StepRecord,
    compute_ratio_of,
)
from frameworm.records.statistics import StepAggregate
from frameworm.records.trace import TraceSummary

log = logging.getLogger("frameworm")
GROUP_STEPS = 64


class Tally(Listener):
    """Listens to every step of this rank and aggregates the run's metrics.

    Steps are summed many at a time: by the end of each model step, code and data for it have left the processor's
    caches, and summing would take several times as long.
    """

    def __init__(self) -> None:
        self._waiting: list[StepRecord] = []
        self.reset()

    def reset(self) -> None:
        """Discard the steps so far."""
        self._aggregate = StepAggregate()
        self._account = StepAccount()
        self._waiting.clear()

    @property
    def aggregate(self) -> StepAggregate:
        """Aggregated metrics of all steps so far."""
        self._sum_up()
        return self._aggregate

    @property
    def account(self) -> StepAccount:
        """Where the time of all steps so far went, for the rules."""
        self._sum_up()
        return self._account

    def on_step(self, step: StepRecord) -> None:
        self._waiting.append(step)
        if len(self._waiting) >= GROUP_STEPS:
            self._sum_up()

    def _sum_up(self) -> None:
        for step in self._waiting:
            self._aggregate.add(step)
            self._account.add(step)
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
    ranks: RankWatch | None = None,
) -> None:
    """Put the run's metrics into its record; what was not measured stays None.

    Args:
        record: The record to fill.
        status: How the run ended.
        progress: The run's position and epochs.
        aggregate: Metrics of this rank's steps.
        world_sums: Measured samples and tokens summed over the ranks; None if the other ranks are not available.
        communicated_bytes: Bytes that a rank sends per step.
        device: The training device.
        checkpoint: Statistics of the checkpoints.
        wall_s: Duration of the run.
        ranks: Measurements of the communication between ranks, if any.
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
    if world_size > 1 and ranks is None:
        record.unseen = [COMMUNICATION_EXPOSED]
    record.communication = summarise_communication(aggregate, world_size, communicated_bytes, ranks)
    record.memory = measure_memory(device)
    record.checkpoint = checkpoint
    if progress.epochs:
        last = progress.epochs[-1]
        record.quality = Quality(last.train_loss, last.val_loss, last.val_accuracy, dict(last.metrics))


def summarise_communication(
    aggregate: StepAggregate, world_size: int, communicated_bytes: int | None, ranks: RankWatch | None
) -> Communication:
    """Summarise the communication of this rank's mean step; a single rank has none."""
    if world_size == 1:
        return Communication(total_s=0.0, exposed_s=0.0, bytes_per_step=communicated_bytes)
    total_s, phases = aggregate.communication_s(), aggregate.phases()
    exposed = phases.get(COMMUNICATION_EXPOSED)
    return Communication(
        total_s=total_s,
        exposed_s=None if exposed is None or total_s is None else exposed.mean_s,
        bytes_per_step=communicated_bytes,
        rank_wait_s=aggregate.rank_wait_s(),
        slowest_rank=None if ranks is None else ranks.slowest_rank,
        compute_ratio=compute_ratio_of(phases, total_s),
        buckets=[] if ranks is None else ranks.buckets(),
    )


def count_per_epoch(communication: Communication, steps: int | None, world_size: int, sync_every: int) -> None:
    """Record how often the ranks communicate in an epoch of `steps`, and how much each sends."""
    if steps is None:
        return
    communication.times_per_epoch = steps // sync_every if world_size > 1 else 0
    if communication.bytes_per_step is not None:
        communication.bytes_per_epoch = steps * communication.bytes_per_step


def summarise_rank(rank: int, aggregate: StepAggregate) -> RankSummary:
    """Summarise this rank's mean step."""
    step_s = aggregate.throughput().step_s
    return RankSummary(
        rank=rank,
        step_s=None if step_s is None else step_s.mean,
        phases={name: phase.mean_s for name, phase in aggregate.phases().items()},
        communication_s=aggregate.communication_s(),
        rank_wait_s=aggregate.rank_wait_s(),
        host=platform.node() or None,
    )


def judge_run(record: RunRecord, tally: Tally, config: Config) -> None:
    """Put verdict and findings into the record; an error in judging must not fail the run."""
    record.targets = grade_targets(record, config.observe.targets)
    try:
        judgement = judge(record, steps=tally.account, config=config, trace=_trace_of(record))
        if record.status == "failed" and judgement.verdict == "inconclusive":
            return  # speed is not its problem
        apply_judgement(record, judgement)
    except Exception as error:
        log.warning("the run could not be judged", exc_info=True)
        record.notes.append(f"no verdict: judging failed with {type(error).__name__}: {error}")


def _trace_of(record: RunRecord) -> TraceSummary | None:
    """Read the summary of rank 0's trace window, if one was recorded."""
    path = None if record.run_dir is None else Path(record.run_dir) / "trace-rank0-summary.json"
    if path is None or not path.exists():
        return None
    return TraceSummary.from_dict(read_json(path))


def measure_memory(device: torch.device) -> Memory:
    """Measure this process's peak memory so far."""
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
    """Count parameters, tied ones once."""
    return sum(item.numel() for item in model.parameters())


def describe_device(device: torch.device) -> str:
    """Return the device's name for people."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def stop_error(record: RunRecord) -> TrainingInterruptedError | TrainingPreemptedError:
    """Build the error that says why a run ended early, and from where it can resume."""
    where = "nothing was saved (no run folder)"
    if record.run_dir is not None:
        where = f"saved after step {record.steps} in {record.run_dir}"
        if problem := _save_problem(record):
            where = f"in {record.run_dir} the {problem}"
    if record.stop_reason == "memory":
        reasons = [note for note in record.notes if "max_memory_percent" in note]
        return MemoryLimitError(f"{reasons[-1] if reasons else 'beyond memory.max_memory_percent'}; {where}", record)
    kind = TrainingInterruptedError if record.status == "interrupted" else TrainingPreemptedError
    return kind(f"{record.status}: {where}", record)


def why_failed(record: RunRecord) -> str:
    """Explain why a run that trained to its end still failed."""
    return (
        f"trained {record.steps} steps, but no checkpoint was written: the {_save_problem(record)}; give a folder that "
        f"can be written to (--out), or make room in {record.run_dir}"
    )


def _save_problem(record: RunRecord) -> str | None:
    """Return what kept the last checkpoint from being written, if the run has none."""
    problems = [note for note in record.notes if SAVE_FAILED in note]
    return problems[-1].removeprefix("the ") if problems and not record.checkpoint.count else None


def flatten_notes(*groups: Any) -> list[str]:
    """Return all notes in order, each once."""
    return list(dict.fromkeys(note for group in groups for note in (group or []) if note))
