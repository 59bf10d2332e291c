"""Build an attached run's record from its step files; imports no torch, so stored runs can be read anywhere."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from frameworm.errors import FramewormError, RunFolderError
from frameworm.records.account import StepAccount
from frameworm.records.atomic import write_atomic
from frameworm.records.observations import Flops, Framework, OtherTime, RankSummary, SystemSummary
from frameworm.records.reading import read_json
from frameworm.records.schema import (
    COMPUTE_PHASES,
    Batch,
    CheckpointStatistics,
    Communication,
    Compilation,
    Memory,
    RunRecord,
    StepRecord,
    compute_ratio_of,
    json_ready,
)
from frameworm.records.series import SeriesPoint
from frameworm.records.statistics import StepAggregate
from frameworm.records.store import SAMPLE_BYTES, RunFolder
from frameworm.records.trace import TraceSummary
from frameworm.records.typed import read_record

if TYPE_CHECKING:
    from frameworm.diagnose.rules.accounting import StepsOfRanks

EXPOSED, REPLAY = "communication_exposed", "graph_replay"
# Every training step has these phases; if one never shows up, it could not be observed.
EXPECTED = ("data_wait", "forward", "backward", "optimizer")
BATCHES_KEPT = 10_000


@dataclass
class Surroundings:
    """What is known about an attached run besides its steps."""

    name: str
    status: str
    world_size: int = 1
    started: str | None = None
    wall_s: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    system: SystemSummary | None = None
    compilation: Compilation | None = None
    other_time: OtherTime | None = None
    notes: list[str] = field(default_factory=list)


def leave_surroundings(folder: RunFolder, rank: int, around: Surroundings) -> None:
    """Store what a child process knows about its run besides its steps."""
    write_atomic(folder.path / f".rank{rank}-end", json.dumps(json_ready(dataclasses.asdict(around))))


def take_surroundings(folder: RunFolder) -> Surroundings | None:
    """Read and remove what child processes have stored; the lowest rank's counts."""
    around = None
    for rank in folder.step_files():
        path = folder.path / f".rank{rank}-end"
        with contextlib.suppress(OSError, ValueError, TypeError):
            around = around or read_record(Surroundings, read_json(path))
        path.unlink(missing_ok=True)
    return around


class RankSums:
    """Sums over the steps of one rank in bounded memory; batch sizes are those of the latest steps."""

    def __init__(self, share: float = 1.0) -> None:
        self.aggregate = StepAggregate()
        self.fetched: deque[float] = deque(maxlen=BATCHES_KEPT)
        self.accumulated: deque[float] = deque(maxlen=BATCHES_KEPT)
        self.samples = 0
        self.checkpoints = 0
        self.checkpoint_s = 0.0
        self.share = share  # fraction of all steps that is added, if only a sample is read

    def add(self, step: StepRecord) -> None:
        """Add one step."""
        self.aggregate.add(step)
        self.samples += step.samples
        metrics = step.metrics
        fetches = metrics.get("fetches", 0.0)
        if fetches:
            self.fetched.append(step.samples / fetches)
            self.accumulated.append(fetches)
        else:
            updates = max(1.0, metrics.get("optimizer_steps", 1.0))
            accumulated = max(1.0, metrics.get("batches", metrics.get("backwards", 1.0) / updates))
            self.fetched.append(step.samples / accumulated)
            self.accumulated.append(accumulated)
        # Separate files for model, optimizer and so on count as one checkpoint.
        self.checkpoints += metrics.get("checkpoints", 0) > 0
        self.checkpoint_s += step.phases.get("checkpoint", 0.0)

    def summary(self, rank: int) -> RankSummary:
        """Summarise the rank's mean step, without warm-up."""
        spread = self.aggregate.throughput().step_s
        phases = {name: phase.mean_s for name, phase in self.aggregate.phases().items()}
        return RankSummary(
            rank=rank,
            step_s=None if spread is None else spread.mean,
            phases=phases,
            communication_s=self.aggregate.communication_s(),
        )


def record_of(
    folder: RunFolder, around: Surroundings, most_bytes: int | None = None
) -> tuple[RunRecord, list[SeriesPoint]]:
    """Build the record and curve of an attached run from what its ranks have written.

    Args:
        folder: The run folder.
        around: What is known about it besides its steps.
        most_bytes: Limit on step data to read, beyond which it is sampled; None to read everything.
    """
    sums, _ = _read_steps(folder, most_bytes)
    return record_of_sums(folder, around, sums)


def _read_steps(folder: RunFolder, most_bytes: int | None) -> tuple[dict[int, RankSums], dict[int, StepAccount]]:
    """Read the steps of all ranks once, for the record and for the rules."""
    sums: dict[int, RankSums] = {}
    accounts: dict[int, StepAccount] = {}
    for rank, reader in folder.step_readers(most_bytes).items():
        share = reader.share
        sums[rank], accounts[rank] = RankSums(share), StepAccount(share=share)
        with contextlib.suppress(RunFolderError):
            for step in reader:
                sums[rank].add(step)
                accounts[rank].add(step)
    return sums, accounts


def record_of_sums(
    folder: RunFolder, around: Surroundings, sums: Mapping[int, RankSums]
) -> tuple[RunRecord, list[SeriesPoint]]:
    """Like `record_of`, from steps already read."""
    ranks = {number: rank for number, rank in sums.items() if rank.aggregate.steps}
    facts = around.facts
    first = ranks[min(ranks)] if ranks else RankSums()
    world_size = max(around.world_size, len(ranks))
    record = RunRecord(
        name=around.name,
        status=around.status,
        environment=around.environment,
        batch=_batch(first, world_size),
        started=around.started,
        wall_s=around.wall_s,
        steps=max(round(first.aggregate.steps / first.share), int(facts.get("steps", 0))),
        device=facts.get("device_name"),
        strategy=facts.get("strategy") or ("single" if world_size == 1 else None),
        precision=facts.get("precision"),
        parameters=facts.get("parameters"),
        memory=around.memory,
        checkpoint=_checkpoints(first),
        system=around.system,
        compilation=around.compilation,
        captured_steps=facts.get("captured_steps"),
        other_time=around.other_time,
        source="attached",
        framework=_framework(facts),
        padding_waste=first.aggregate.padding_waste(),
        notes=list(around.notes),
        run_dir=str(folder.path),
    )
    # Throughput is over the first rank's steps, of which a different fraction may have been read than of the others.
    parts = [(rank.aggregate, first.share / rank.share) for rank in ranks.values()]
    samples = round(sum(rank.measured_samples * weight for rank, weight in parts))
    tokens = round(sum((rank.measured_tokens or 0) * weight for rank, weight in parts))
    record.throughput = first.aggregate.throughput(world_samples=samples, world_tokens=tokens)
    if not samples:
        record.throughput.samples_per_s = None
    record.flops = _flops(facts.get("flops"), ranks)
    record.mfu = None if record.flops is None else record.flops.mfu
    record.phases = first.aggregate.phases()
    other = record.phases.get("other")
    if record.other_time is not None and other is not None:
        for place in record.other_time.places:
            place.share = other.share * place.samples / record.other_time.samples
    record.ranks = [rank.summary(number) for number, rank in ranks.items()]
    record.communication = _communication(record.ranks, world_size, facts)
    record.communication.compute_ratio = compute_ratio_of(record.phases, record.communication.total_s)
    record.unseen = _unseen(record, facts) if first.aggregate.steps else []
    if not record.steps and not around.notes:
        record.notes.append("no training step was seen: none of torch's optimizers has stepped in this process")
    absent = [str(number) for number in range(world_size) if number not in ranks]
    if ranks and absent:
        record.notes.append(f"no steps of rank {', '.join(absent)} are in the folder")
    return record, first.aggregate.series()


def _flops(known: Flops | None, ranks: Mapping[int, RankSums]) -> Flops | None:
    """Compute the model's FLOPs over the available steps from what was counted early in the run."""
    if known is None or known.model is None or not ranks:
        return known
    first, share = ranks[min(ranks)].aggregate, ranks[min(ranks)].share
    steps, seconds = first.measured_steps, first.measured_training_s
    total = sum(rank.aggregate.measured_flops(known.model) * share / rank.share for rank in ranks.values())
    if not steps:
        return known
    return dataclasses.replace(known, per_step=total / steps, per_s=total / seconds if seconds > 0 else None)


def _framework(facts: Mapping[str, Any]) -> Framework | None:
    found = facts.get("framework")
    return None if found is None else read_record(Framework, found)


def _checkpoints(rank: RankSums) -> CheckpointStatistics:
    """Summarise checkpoints: a script saves between two steps, so training stalls for the whole save."""
    if not rank.checkpoints:
        return CheckpointStatistics()
    stall_s = rank.checkpoint_s / rank.share
    return CheckpointStatistics(round(rank.checkpoints / rank.share), stall_s, stall_s)


def judge_record(record: RunRecord, folder: RunFolder) -> None:
    """Put verdict and findings into a record, based on it and the rest of its folder."""
    from frameworm.diagnose.rules.judge import apply_judgement, judge
    from frameworm.diagnose.targets import grade_targets

    record.targets = grade_targets(record)
    steps = folder.step_readers(None)
    apply_judgement(record, judge(record, steps=steps, system=record.system, trace=stored_trace(folder)))


def stored_record(folder: RunFolder, most_bytes: int | None = SAMPLE_BYTES) -> RunRecord:
    """Return the summary of a run, or a record from the steps of a run that was cut short.

    Args:
        folder: The run folder.
        most_bytes: Limit on step data to read, beyond which it is sampled; None to read everything.
    """
    if folder.summary_json.exists():
        return _summed_up(folder)
    return _cut_short(folder, _read_steps(folder, most_bytes)[0])


def judged_run(folder: RunFolder, most_bytes: int | None = SAMPLE_BYTES) -> RunRecord:
    """Like `stored_record`, with the verdict of the current rules; steps are read once.

    Args:
        folder: The run folder.
        most_bytes: Limit on step data to read, beyond which it is sampled; None to read everything.
    """
    if folder.summary_json.exists():
        record = _summed_up(folder)
        judge_stored(record, folder, most_bytes)
        return record
    sums, accounts = _read_steps(folder, most_bytes)
    record = _cut_short(folder, sums)
    _judge_steps(record, folder, accounts, _share_of(item.share for item in sums.values()))
    return record


def _summed_up(folder: RunFolder) -> RunRecord:
    """Read the summary and set its folder."""
    record = folder.read_summary()
    record.run_dir = str(folder.path)
    return record


def _cut_short(folder: RunFolder, sums: Mapping[int, RankSums]) -> RunRecord:
    """Build the record of a run without a summary."""
    begun = read_begun(folder)
    around = Surroundings(
        name=folder.run_name() or folder.path.name,
        status="interrupted",
        started=None if begun is None else begun.started,
        facts=facts_of(begun),
        environment={} if begun is None else begun.environment,
    )
    around.notes.append("the run has no summary: it was cut short, or still runs; judged by the steps it has written")
    record, _ = record_of_sums(folder, around, sums)
    if folder.config.exists():
        record.source = "engine"
    if begun is not None:
        record.workload = begun.workload
    return record


def read_begun(folder: RunFolder) -> RunRecord | None:
    """Read what was known about a run when it began; None if nothing was stored."""
    with contextlib.suppress(RunFolderError):
        return folder.read_begun()
    return None


def facts_of(record: RunRecord | None) -> dict[str, Any]:
    """Extract from an earlier record what it knows besides steps, as `Surroundings.facts`."""
    if record is None:
        return {}
    return {
        "device_name": record.device,
        "strategy": record.strategy,
        "precision": record.precision,
        "parameters": record.parameters,
        "gradient_bytes": record.communication.bytes_per_step,
        "flops": record.flops,
    }


def judge_stored(record: RunRecord, folder: RunFolder, most_bytes: int | None = SAMPLE_BYTES) -> None:
    """Fill in verdict and findings by the current rules; a note says if they are based on a sample of the steps."""
    steps = folder.step_readers(most_bytes)
    _judge_steps(record, folder, steps, _share_of(reader.share for reader in steps.values()))


def _share_of(shares: Iterable[float]) -> float:
    """Average the ranks' fractions of steps read, as all ranks take the same number of steps."""
    each = list(shares)
    return sum(each) / len(each) if each else 1.0


def _judge_steps(record: RunRecord, folder: RunFolder, steps: StepsOfRanks, share: float) -> None:
    from frameworm.config.load import load_config_from_text, show_path
    from frameworm.diagnose.rules.judge import apply_judgement, judge, keep_shown, sample_note

    config = None
    if folder.config.exists():
        with contextlib.suppress(FramewormError):
            config = load_config_from_text(folder.read_config(), show_path(folder.config))
    judgement = judge(record, steps=steps, system=record.system, config=config, trace=stored_trace(folder))
    if share < 1:
        exact = "the other figures are of all steps" if folder.summary_json.exists() else "so are the other figures"
        judgement = replace(
            judgement, notes=[*judgement.notes, sample_note(share, f"{exact} (--exact reads them all)")]
        )
    apply_judgement(record, keep_shown(judgement, record.findings or []))


def stored_trace(folder: RunFolder) -> TraceSummary | None:
    """Read the summary of rank 0's trace, if one was recorded."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        return TraceSummary.from_dict(read_json(folder.path / "trace-rank0-summary.json"))
    return None


def _batch(rank: RankSums, world_size: int) -> Batch:
    accumulation = max(1, round(median(rank.accumulated))) if rank.accumulated else 1
    micro = round(median(rank.fetched)) if rank.samples else None
    return Batch(micro, accumulation, world_size, None if micro is None else micro * accumulation * world_size)


def _communication(ranks: list[RankSummary], world_size: int, facts: Mapping[str, Any]) -> Communication:
    """Summarise rank 0's communication; the rank that waits least is the one that the others wait for."""
    if world_size == 1:
        return Communication(total_s=0.0, exposed_s=0.0)
    result = Communication(bytes_per_step=facts.get("gradient_bytes"))
    exposed = {rank.rank: rank.phases[EXPOSED] for rank in ranks if EXPOSED in rank.phases}
    if len(exposed) == len(ranks) == world_size:
        least = min(exposed.values())
        for rank in ranks:
            rank.rank_wait_s = exposed[rank.rank] - least
        result.slowest_rank = min(exposed, key=lambda rank: (exposed[rank], rank))
        if math.isclose(max(exposed.values()), least):
            result.slowest_rank = None
    if ranks:
        first = ranks[0]
        result.total_s = first.communication_s
        result.exposed_s = first.phases.get(EXPOSED)
        result.rank_wait_s = first.rank_wait_s
    return result


def _unseen(record: RunRecord, facts: Mapping[str, Any]) -> list[str]:
    # Phases inside a replayed graph count as seen, if only as a whole.
    inside = COMPUTE_PHASES if REPLAY in record.phases else ()
    unseen = [name for name in EXPECTED if name not in record.phases and name not in inside]
    if str(facts.get("device", "")).startswith("cuda") and "transfer" not in record.phases:
        unseen.append("transfer")
    if record.batch.world_size > 1 and EXPOSED not in record.phases:
        unseen.append(EXPOSED)
    return unseen
