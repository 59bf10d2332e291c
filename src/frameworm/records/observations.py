"""What is observed besides the steps: buckets on the wire, ranks side by side, and the machine."""

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
    """FLOPs of forward and backward as a function of what a batch contains, without padding.

    Attributes:
        per_sample: Used when token counts are unknown.
        per_token: For everything that scales with tokens; None if token counts are unknown.
        per_squared_token: For attention. A step with `t` tokens in `n` samples has `t * t / n` squared tokens.
    """

    per_sample: float
    per_token: float | None = None
    per_squared_token: float | None = None

    def of(self, samples: float, tokens: float | None, squared_tokens: float | None) -> float:
        """Return the FLOPs of steps with these totals."""
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
    share: float  # fraction of the model's FLOPs


@dataclass(slots=True)
class Framework:
    """The library whose training loop a script uses, so that remedies can use its terms.

    Attributes:
        name: Package of the loop: transformers, trl, lightning, fabric, accelerate or another, or torch if the script
            has its own loop.
        version: Version of that package.
        loop: Class whose method runs the loop; None if it is the script's own.
        arguments: Class that takes the loop's options.
        options: Options of the installed version that a remedy may name, with their values.
        unfused_optimizer: Class of the optimizer, if torch has a fused version that the script does not use.
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
        attention_share: Fraction of the FLOPs in attention kernels.
        precision: Precision of most of it: fp32, tf32, bf16 or fp16.
        peak_per_s: Dense peak of all devices in that precision; None if unknown.
        achievable_per_s: Rate that these devices reach in the model's own matrix products; None if not measured.
        products: The largest matrix products of the model.
        model: Used to compute the FLOPs of other steps.
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
        """Model FLOPs utilisation: the fraction of the peak that `per_s` reaches."""
        return self.per_s / self.peak_per_s if self.per_s and self.peak_per_s else None


@dataclass(slots=True)
class Ceiling:
    """The most that improving one part of the step can gain."""

    part: str  # as in `Roofline.shares`
    share: float  # fraction of the step that could vanish
    speedup: float  # speedup if all of it did
    knobs: list[str] = field(default_factory=list)  # settings that affect this part; if none, only the script can


@dataclass(slots=True)
class Roofline:
    """Where the step time goes on the busiest GPU of a trace; see `diagnose.roofline`.

    Attributes:
        shares: Fractions of the traced time: matrix_products, attention, other_kernels, communication, transfer,
            data_wait, synchronisation, launch_gaps. They add up to 1.
        products_of_peak: How close matrix products come to the achievable rate, or to the peak if that is unknown.
        ceilings: The most that each part can gain, largest first.
    """

    shares: dict[str, float]
    products_of_peak: float | None = None
    ceilings: list[Ceiling] = field(default_factory=list)


@dataclass(slots=True)
class Bucket:
    """One gradient bucket of DDP in the mean step; times are from the start of the backward that sends it."""

    bytes: int
    ready_s: float  # all its gradients are ready on this rank
    start_s: float  # all ranks have contributed, as far as is known; otherwise ready_s
    end_s: float
    parameters: int | None = None


@dataclass(slots=True)
class Compression:
    """How gradients were compressed before they were sent."""

    method: str  # the one in use at the end; off if auto found none that helps
    chosen_by: str  # user or auto
    bytes_per_step: int | None = None  # gradient bytes that one rank hands to the network
    plain_bytes_per_step: int | None = None  # the same without compression
    candidates: list[CompressionCandidate] = field(default_factory=list)  # what auto considered
    bandwidth_gbps: float | None = None  # of the network between the ranks, as auto measured it
    latency_us: float | None = None


@dataclass(slots=True)
class CompressionCandidate:
    """A method that auto considered: the step time expected and measured with it."""

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
    """One of the targets in `observe.targets`, and how the run did."""

    name: str  # key of observe.targets
    label: str
    goal: str  # in words: "> 85%"
    limit: float | None
    value: float | None
    unit: str  # %: a fraction from 0 to 1, s: seconds, /s: per second
    grade: str  # met, missed, or unknown if it was not measured


@dataclass(slots=True)
class SystemSample:
    """The machine at one moment, as one process sees it. None means not available here."""

    time: float  # Unix time in seconds
    gpu_busy: float | None = None  # fraction of the last interval in which a kernel ran, 0 to 1
    gpu_memory_bytes: int | None = None
    gpu_memory_total_bytes: int | None = None
    gpu_clock_mhz: float | None = None
    gpu_clock_max_mhz: float | None = None
    gpu_power_w: float | None = None
    gpu_energy_j: float | None = None  # since the sampler started
    gpu_temperature_c: float | None = None
    throttle_reasons: list[str] = field(default_factory=list)
    cpu_cores: list[float] = field(default_factory=list)  # busy fraction per usable core, 0 to 1
    cpu_process: float | None = None  # number of cores that this process and its children kept busy
    io_wait: float | None = None  # fraction of the cores' time spent waiting for disks
    cpu_waiting: float | None = None  # fraction of the time a thread of this process was ready but had no core
    cpu_stolen: float | None = None  # fraction of the cores' busy time that the hypervisor gave to other machines
    host_memory: float | None = None  # fraction of the machine's memory in use, or of its cgroup's limit
    rss_bytes: int | None = None  # this process and its children
    rss_grown_bytes: int | None = None  # since the sampler started, without processes that have only just begun
    threads: int | None = None
    disk_read_bytes: int | None = None  # since the sampler started
    disk_write_bytes: int | None = None
    network_sent_bytes: int | None = None
    network_received_bytes: int | None = None


@dataclass(slots=True)
class SystemSummary:
    """The machine over the whole run: the spread of each metric, or None."""

    samples: int = 0
    interval_s: float | None = None
    gpu_busy: Statistics | None = None
    gpu_memory_bytes: Statistics | None = None
    gpu_memory_total_bytes: int | None = None
    gpu_power_w: Statistics | None = None
    gpu_energy_j: float | None = None
    gpu_clock_share: Statistics | None = None  # fraction of the highest clock
    throttled_share: float | None = None  # fraction of the samples
    throttle_reasons: list[str] = field(default_factory=list)
    cpu_busy: Statistics | None = None  # over all usable cores
    cpu_busiest_core: Statistics | None = None
    cpu_process: Statistics | None = None
    io_wait: Statistics | None = None
    cpu_waiting: Statistics | None = None
    cpu_stolen: Statistics | None = None
    host_memory: Statistics | None = None  # fraction of the machine's memory in use
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
    """A place in a script where it was sampled outside all phases."""

    file: str
    line: int
    function: str
    work: str  # writing, computing, preparing (a batch), waiting, library
    samples: int
    share: float | None = None  # fraction of the step


@dataclass(slots=True)
class OtherTime:
    """What a script did outside all phases, by samples of its main thread on rank 0."""

    samples: int = 0
    work: dict[str, int] = field(default_factory=dict)  # samples by kind of work
    places: list[Place] = field(default_factory=list)  # the few places with the most samples
