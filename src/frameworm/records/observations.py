"""What is seen beside the steps: buckets on the wire, ranks beside each other, and the machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Statistics:
    """Spread of one quantity over the steps of a run."""

    mean: float
    std: float
    min: float
    max: float
    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of forward and backward by what a batch holds, padding left out.

    Attributes:
        per_sample: Where nobody knows tokens.
        per_token: Of everything that grows with the tokens; None: tokens are not known.
        per_squared_token: Of attention. A step with `t` tokens in `n` samples has `t * t / n` squared tokens.
    """

    per_sample: float
    per_token: float | None = None
    per_squared_token: float | None = None

    def of(self, samples: float, tokens: float | None, squared_tokens: float | None) -> float:
        """FLOPs of steps that hold so much together."""
        if self.per_token is None or tokens is None:
            return self.per_sample * samples
        return self.per_token * tokens + (self.per_squared_token or 0.0) * (squared_tokens or 0.0)


@dataclass(slots=True)
class MatrixProduct:
    """Matrix products of one shape in a step: `batch` times [rows, inner] @ [inner, columns]."""

    batch: int
    rows: int
    inner: int
    columns: int
    precision: str
    share: float  # of the model's FLOPs


@dataclass(slots=True)
class Framework:
    """Whose training loop a script runs, so that remedies can be said in its terms.

    Attributes:
        name: Package of the loop: transformers, trl, lightning, fabric, accelerate, another one, or torch for a loop
            that the script writes itself.
        version: Of that package.
        loop: Class whose method runs the loop; None where it is the script's own.
        arguments: Class that takes the loop's options.
        options: Those of its options in the installed version that a remedy may name, with the values they have.
        unfused_optimizer: Class of the optimizer where torch has a fused one of it that the script does not use.
    """

    name: str
    version: str | None = None
    loop: str | None = None
    arguments: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    unfused_optimizer: str | None = None


@dataclass(slots=True)
class Flops:
    """The model's own arithmetic in the mean step: forward and backward on all ranks, without padding.

    Attributes:
        per_step: FLOPs of a step.
        per_s: FLOP/s over the measured steps.
        attention_share: Part of it in attention kernels.
        precision: What most of it is computed in: fp32, tf32, bf16 or fp16.
        peak_per_s: Dense peak of all devices in that precision; None: not known.
        achievable_per_s: What these devices reach in the model's own matrix products; None: not measured.
        products: The largest matrix products of the model.
        model: What other steps are counted by.
    """

    per_step: float
    per_s: float | None = None
    attention_share: float | None = None
    precision: str | None = None
    peak_per_s: float | None = None
    achievable_per_s: float | None = None
    products: list[MatrixProduct] = field(default_factory=list)
    model: ModelFlops | None = None

    @property
    def mfu(self) -> float | None:
        """Share of the peak that the model's arithmetic reaches."""
        return self.per_s / self.peak_per_s if self.per_s and self.peak_per_s else None


@dataclass(slots=True)
class Ceiling:
    """What a part of the step can gain at most."""

    part: str  # as in `Roofline.shares`
    share: float  # of the step that could vanish
    speedup: float  # if all of it did
    knobs: list[str] = field(default_factory=list)  # settings that work on this part; none: only the script can


@dataclass(slots=True)
class Roofline:
    """Where the step goes on the busiest GPU of a trace; see `diagnose.roofline`.

    Attributes:
        shares: Of the traced time: matrix_products, attention, other_kernels, communication, transfer, data_wait,
            synchronisation, launch_gaps. They add up to 1.
        products_of_peak: How near the matrix products run to the achievable rate, or the peak where that is unknown.
        ceilings: What each part can gain at most, the largest first.
    """

    shares: dict[str, float]
    products_of_peak: float | None = None
    ceilings: list[Ceiling] = field(default_factory=list)


@dataclass(slots=True)
class Bucket:
    """One gradient bucket of DDP in the mean step; times from the beginning of the backward that sends it."""

    bytes: int
    ready_s: float  # all its gradients are there on this rank
    start_s: float  # all ranks have brought theirs, as far as can be told; ready_s where it cannot
    end_s: float
    parameters: int | None = None


@dataclass(slots=True)
class Compression:
    """What was done to gradients before they were sent."""

    method: str  # the one in use at the end; off where auto found none that helps
    chosen_by: str  # user or auto
    bytes_per_step: int | None = None  # of gradients, what one rank hands to the network
    plain_bytes_per_step: int | None = None  # what it would have been without
    candidates: list[CompressionCandidate] = field(default_factory=list)  # what auto weighed
    bandwidth_gbps: float | None = None  # of the network between the ranks, as auto saw it
    latency_us: float | None = None


@dataclass(slots=True)
class CompressionCandidate:
    """A method auto weighed: the time of a step with it, as expected and as measured."""

    method: str
    expected_s: float | None = None
    measured_s: float | None = None


@dataclass(slots=True)
class RankSummary:
    """The mean step of one rank."""

    rank: int
    step_s: float | None = None
    phases: dict[str, float] = field(default_factory=dict)  # mean seconds
    communication_s: float | None = None
    rank_wait_s: float | None = None
    host: str | None = None


@dataclass(slots=True)
class Target:
    """One of the targets of `observe.targets`, and how the run did."""

    name: str  # key of observe.targets
    label: str
    goal: str  # in words: "> 85%"
    limit: float | None
    value: float | None
    unit: str  # %: a share from 0 to 1, s: seconds, /s: per second
    grade: str  # met, missed, or unknown where nobody measured


@dataclass(slots=True)
class SystemSample:
    """The machine at one moment, as one process sees it. What has no source here is None."""

    time: float  # seconds since the epoch of the clock
    gpu_busy: float | None = None  # share of the last interval in which a kernel ran, 0 to 1
    gpu_memory_bytes: int | None = None
    gpu_memory_total_bytes: int | None = None
    gpu_clock_mhz: float | None = None
    gpu_clock_max_mhz: float | None = None
    gpu_power_w: float | None = None
    gpu_energy_j: float | None = None  # since the sampler began
    gpu_temperature_c: float | None = None
    throttle_reasons: list[str] = field(default_factory=list)
    cpu_cores: list[float] = field(default_factory=list)  # share busy per usable core, 0 to 1
    cpu_process: float | None = None  # cores this process and its children kept busy
    io_wait: float | None = None  # share of the cores' time spent waiting for disks
    cpu_waiting: float | None = None  # share of the time a thread of this process was ready and had no core
    cpu_stolen: float | None = None  # share of the cores' working time that the hypervisor gave to other machines
    host_memory: float | None = None  # share of the machine's memory in use, or of what its cgroup grants
    rss_bytes: int | None = None  # this process and its children
    threads: int | None = None
    disk_read_bytes: int | None = None  # since the sampler began
    disk_write_bytes: int | None = None
    network_sent_bytes: int | None = None
    network_received_bytes: int | None = None


@dataclass(slots=True)
class SystemSummary:
    """The machine over the run; of each figure its spread, or None."""

    samples: int = 0
    interval_s: float | None = None
    gpu_busy: Statistics | None = None
    gpu_memory_bytes: Statistics | None = None
    gpu_memory_total_bytes: int | None = None
    gpu_power_w: Statistics | None = None
    gpu_energy_j: float | None = None
    gpu_clock_share: Statistics | None = None  # of the highest clock
    throttled_share: float | None = None  # of the samples
    throttle_reasons: list[str] = field(default_factory=list)
    cpu_busy: Statistics | None = None  # over all usable cores
    cpu_busiest_core: Statistics | None = None
    cpu_process: Statistics | None = None
    io_wait: Statistics | None = None
    cpu_waiting: Statistics | None = None
    cpu_stolen: Statistics | None = None
    host_memory: Statistics | None = None  # share of the machine's memory in use
    rss_bytes: Statistics | None = None
    rss_growth_bytes_per_s: float | None = None
    gpu_memory_growth_bytes_per_s: float | None = None
    threads_max: int | None = None
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    network_sent_bytes_per_s: float | None = None
    network_received_bytes_per_s: float | None = None


@dataclass(slots=True)
class Place:
    """A place of a script at which it was seen in no phase."""

    file: str
    line: int
    function: str
    work: str  # writing, computing, preparing (a batch), waiting, library
    samples: int
    share: float | None = None  # of the step


@dataclass(slots=True)
class OtherTime:
    """What a script did in the time that is in no phase, by samples of its main thread on rank 0."""

    samples: int = 0
    work: dict[str, int] = field(default_factory=dict)  # samples by kind of work
    places: list[Place] = field(default_factory=list)  # the few with most of them
