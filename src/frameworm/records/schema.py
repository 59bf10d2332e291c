"""What happened in a run: the types that all floors share.

They are plain dataclasses, so that a record costs next to nothing in the training loop and can be read on a machine
without torch. A missing value is None, never zero.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frameworm.records.estimate import Interval
from frameworm.records.observations import (
    Bucket,
    Compression,
    Flops,
    Framework,
    OtherTime,
    RankSummary,
    Roofline,
    SystemSummary,
    Target,
)
from frameworm.records.observations import Statistics as Statistics
from frameworm.records.printable import Shown, number, speedup_in_words
from frameworm.records.typed import read_record

SCHEMA_VERSION = 1

PHASES = (
    "data_wait",
    "transfer",
    "forward",
    "backward",
    "communication_exposed",
    "optimizer",
    "checkpoint",
    "validation",
    "other",
)


@dataclass(slots=True)
class StepRecord:
    """One optimizer step on one rank. Times are in seconds; `phases` contains only phases that were seen."""

    step: int  # 1-based number of the step in the run
    epoch: int  # 1-based
    time: float  # Unix time in seconds, at the end of the step
    step_s: float
    loss: float | None  # mean over this rank's samples of the step
    lr: float | None
    samples: int  # on this rank
    count: float  # what this rank's loss was averaged over: samples unless the loss function says otherwise
    tokens: int | None = None  # real tokens, without padding
    padded_tokens: int | None = None  # tokens including padding
    grad_norm: float | None = None
    skipped: bool | None = None  # the update was skipped because gradients were not finite
    phases: dict[str, float] = field(default_factory=dict)
    communication_s: float | None = None  # time gradients were in flight, hidden behind backward or not
    rank_wait_s: float | None = None  # part of the exposed communication: waiting for later ranks
    metrics: dict[str, float] = field(default_factory=dict)  # seconds within the phases: sync_s, logging_s, ...

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepRecord:
        """Read one line of a steps file; unknown keys are ignored, missing or wrong values raise TypeError."""
        return read_record(cls, data)


@dataclass(slots=True)
class EpochRecord:
    """One pass over the training samples, on all ranks."""

    epoch: int
    epoch_time_s: float
    train_loss: float | None
    val_loss: float | None
    val_accuracy: float | None
    samples_per_s: float | None
    metrics: dict[str, float] = field(default_factory=dict)  # user metrics, also of extra validation sets: val_f1, ...

    def figure(self, name: str) -> float | None:
        """Return a loss, an accuracy or a metric by name; None if there is none."""
        if name in ("train_loss", "val_loss", "val_accuracy"):
            found: float | None = getattr(self, name)
            return found
        return self.metrics.get(name)


@dataclass(slots=True)
class Batch:
    """The four numbers of a batch: global = micro x accumulation x world_size."""

    micro: int | None
    accumulation: int
    world_size: int
    global_: int | None


@dataclass(slots=True)
class Throughput:
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    step_s: Statistics | None = None


@dataclass(slots=True)
class Phase:
    mean_s: float
    share: float


@dataclass(slots=True)
class Communication:
    total_s: float | None = None
    exposed_s: float | None = None
    bytes_per_step: int | None = None
    rank_wait_s: float | None = None  # part of exposed_s: waiting for the slowest rank
    slowest_rank: int | None = None
    buckets: list[Bucket] = field(default_factory=list)  # of the mean step on rank 0
    compression: Compression | None = None
    compute_ratio: float | None = None  # seconds of compute per second of communication
    times_per_epoch: int | None = None  # how often the ranks average their gradients, or their models
    bytes_per_epoch: int | None = None  # what one rank sends for that


COMPUTE_PHASES = ("forward", "backward", "optimizer")


def compute_ratio_of(phases: Mapping[str, Phase], communication_s: float | None) -> float | None:
    """Seconds of forward, backward and optimizer per second of communication; None if either is unknown."""
    computed_s = math.fsum(phases[name].mean_s for name in COMPUTE_PHASES if name in phases)
    return computed_s / communication_s if computed_s and communication_s else None


@dataclass(slots=True)
class Memory:
    peak_bytes: int | None = None  # device memory on a GPU, resident memory of the process on CPU
    reserved_bytes: int | None = None
    total_bytes: int | None = None
    host_peak_bytes: int | None = None


@dataclass(slots=True)
class Quality:
    train_loss: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # from the last validation, as in its epoch


@dataclass(slots=True)
class CheckpointStatistics:
    count: int = 0
    stall_s: float | None = None  # total time in which training stood still
    save_s: float | None = None  # total time from requesting checkpoints until they were durable
    largest_gap_steps: int | None = None  # between two checkpoints, or from the start to the first
    largest_gap_s: float | None = None


@dataclass(slots=True)
class StorageCopy:
    """The copy of the run in object storage."""

    url: str
    uploaded: bool  # everything, including this record
    checkpoint: str | None = None  # name of the newest one there
    problem: str | None = None  # why the copy is incomplete


@dataclass(slots=True)
class Compilation:
    """What torch.compile did in a run."""

    time_s: float
    graphs: int
    recompilations: int
    reasons: list[str] = field(default_factory=list)  # of the first few recompilations


@dataclass(slots=True)
class Remedy:
    knob: str
    value: Any
    text: str


@dataclass(frozen=True, slots=True)
class ExpectedSpeedup(Interval[float]):
    """The expected gain of a remedy."""

    low: float
    high: float
    basis: str  # measured | modelled


@dataclass(slots=True)
class Finding:
    """A cause with its evidence, its remedies and their expected gain."""

    code: str
    severity: str  # info | warning | critical
    share: float | None
    evidence: dict[str, Any]
    remedies: list[Remedy] = field(default_factory=list)
    expected_speedup: ExpectedSpeedup | None = None


@dataclass(slots=True, repr=False)
class RunRecord(Shown):
    """A whole run: what `summary.json` holds, and what `Trainer.train` returns."""

    name: str
    status: str
    environment: dict[str, Any]
    batch: Batch
    started: str | None = None  # ISO 8601, UTC
    wall_s: float | None = None
    steps: int = 0
    device: str | None = None
    strategy: str | None = None
    precision: str | None = None
    parameters: int | None = None
    throughput: Throughput = field(default_factory=Throughput)
    phases: dict[str, Phase] = field(default_factory=dict)
    communication: Communication = field(default_factory=Communication)
    memory: Memory = field(default_factory=Memory)
    mfu: float | None = None  # flops.per_s / flops.peak_per_s
    flops: Flops | None = None
    roofline: Roofline | None = None  # for a run on a GPU with a trace
    padding_waste: float | None = None
    quality: Quality = field(default_factory=Quality)
    checkpoint: CheckpointStatistics = field(default_factory=CheckpointStatistics)
    storage: StorageCopy | None = None
    skipped_steps: int | None = None
    skipped_samples: int | None = None  # unreadable samples, if data.on_error is skip
    compilation: Compilation | None = None
    captured_steps: int | None = None  # steps replayed as CUDA graphs
    ranks: list[RankSummary] = field(default_factory=list)
    system: SystemSummary | None = None
    stop_reason: str | None = None  # completed, early_stop, interrupted, preempted, or memory (max_memory_percent)
    unseen: list[str] = field(default_factory=list)  # phases that could not be observed in this run
    other_time: OtherTime | None = None  # for an attached run
    workload: str | None = None  # as in the config; in the Python API, the script and the class of the model
    source: str = "engine"  # engine, or attached to a user's script
    framework: Framework | None = None  # for an attached run
    verdict: str = "inconclusive"
    findings: list[Finding] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)  # from observe.targets
    notes: list[str] = field(default_factory=list)  # remarks: fallbacks, lost records, host waits
    epochs: list[EpochRecord] = field(default_factory=list)
    slow_steps: list[StepRecord] = field(default_factory=list)  # outliers of rank 0, slowest first
    run_dir: str | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def losses(self) -> list[float | None]:
        """Training loss of each epoch."""
        return [epoch.train_loss for epoch in self.epochs]

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the last validation."""
        return self.quality.val_accuracy

    @property
    def report(self) -> Path | None:
        """The report of the run; None where none was written."""
        page = None if self.run_dir is None else Path(self.run_dir) / "report.html"
        return page if page is not None and page.exists() else None

    @property
    def why(self) -> str:
        """The verdict, and of an inconclusive one the reason."""
        reason = next((note for note in self.notes if note.startswith(f"{self.verdict}: ")), self.verdict)
        return reason if self.verdict == "inconclusive" else self.verdict

    def in_words(self) -> list[str]:
        """How it went, what costs most, what was learned and where the report lies."""
        rate = self.throughput.samples_per_s
        speed = "" if rate is None else f", {rate:,.{0 if rate >= 100 else 2}f} samples/s"
        lines = [
            f"RunRecord: {self.name} {self.status}, {number(self.steps, ',')} steps{speed}",
            f"verdict: {self.why}",
        ]
        worst = next((item for item in self.findings if item.code == self.verdict), None)
        if worst is not None and worst.remedies:
            lines[-1] += f"; {worst.remedies[0].text}"
        gain = None if worst is None else worst.expected_speedup
        if gain is not None:
            lines[-1] += f": {speedup_in_words(gain.value, gain.low, gain.high)}, {gain.basis}"
        quality = {name: getattr(self.quality, name) for name in ("train_loss", "val_loss", "val_accuracy")}
        known = [
            f"{name} {value:.4g}" for name, value in {**quality, **self.quality.metrics}.items() if value is not None
        ]
        lines += [", ".join(known)] if known else []
        place = self.report or self.run_dir
        return [*lines, f"report: {place}"] if place is not None else lines

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON-ready data, with `global_` renamed to `global`."""
        data: dict[str, Any] = json_ready(dataclasses.asdict(self))
        data["batch"]["global"] = data["batch"].pop("global_")
        if not data["quality"]["metrics"]:
            del data["quality"]["metrics"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunRecord:
        """Read what `to_dict` wrote; unknown keys of later versions are ignored, wrong types raise TypeError."""
        if isinstance(data, Mapping) and isinstance(batch := data.get("batch"), Mapping):
            data = {**data, "batch": {**batch, "global_": batch.get("global")}}
        return read_record(cls, data)


def json_ready(value: Any) -> Any:
    """Convert data so that every JSON reader accepts it: non-finite numbers become "nan", "inf" and "-inf".

    A loss that became NaN is not a missing loss, so null would be wrong, and a bare NaN is not JSON.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_ready(item) for item in value]
    return str(value)
