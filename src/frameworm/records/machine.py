"""Facts about a machine and the results of checking it: the types that inspection and checks share.

None means unknown. Nothing here is ever guessed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["ok", "advice", "problem", "unknown"]
State = Literal["done", "not done", "does not apply"]
Basis = Literal["measured", "modelled", "unknown"]


@dataclass(frozen=True)
class GpuFacts:
    """One GPU that torch can see; most fields come from NVML."""

    name: str
    memory_bytes: int | None = None
    capability: float | None = None  # compute capability, such as 9.0
    used_bytes: int | None = None  # by all programs; doctor itself uses none
    throttle_reasons: tuple[str, ...] | None = None
    temperature_c: float | None = None
    nvlinks: int | None = None  # links that are up
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_generation_max: int | None = None
    local_cpus: frozenset[int] | None = None  # cores of the same NUMA node


@dataclass(frozen=True)
class StorageFacts:
    """The folder that runs are written to."""

    path: str
    writable: bool | None = None
    error: str | None = None
    free_bytes: int | None = None
    write_bytes_per_s: float | None = None  # written and synced
    written_bytes: int | None = None
    filesystem: str | None = None


@dataclass(frozen=True)
class PortFacts:
    """The port where processes rendezvous."""

    port: int
    free: bool | None = None
    error: str | None = None
    own_address: bool | None = None  # whether MASTER_ADDR is this machine; None if it is not set
    asked: bool = False  # set by a variable, not the default


@dataclass(frozen=True)
class MachineFacts:
    """All facts that were found."""

    torch_version: str | None = None
    torch_cuda: str | None = None  # CUDA version that torch was built with
    gpus: tuple[GpuFacts, ...] = ()
    gpu_error: str | None = None
    nvidia_devices: int | None = None  # GPUs that the driver shows, visible to this process or not
    driver: str | None = None
    nvml: bool | None = None
    peer_access: bool | None = None  # whether every GPU can read every other's memory
    nccl: str | None = None
    triton: bool | None = None
    compiler: str | None = None
    cpus_total: int | None = None
    cpus_bound: frozenset[int] | None = None
    cpu_quota: float | None = None
    cpus_usable: int | None = None
    quota_throttled_share: float | None = None  # fraction of the periods in which the cgroup ran
    governor: str | None = None
    load: float | None = None  # mean number of runnable programs over the last minute
    torch_threads: int | None = None
    torch_interop_threads: int | None = None
    memory_bytes: int | None = None
    memory_available_bytes: int | None = None
    shared_memory_bytes: int | None = None
    shared_memory_free_bytes: int | None = None
    open_files: tuple[int, int] | None = None  # soft and hard limit; -1 means no limit
    locked_memory_bytes: int | None = None  # -1 means no limit
    infiniband: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()  # interfaces that are up, including loopback
    host_resolves: bool | None = None
    host_is_loopback: bool | None = None  # the host name resolves to 127.x
    storage: StorageFacts | None = None
    port: PortFacts | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data; sets become sorted lists."""
        return {name: _plain(value) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Intent:
    """What is about to run here, as far as it is known; the default is one process with nothing special."""

    processes: int = 1  # on this machine
    nodes: int = 1
    on_gpu: bool | None = None  # None: use what is there
    compiles: bool = False
    workers: int = 0  # loader workers per process
    checkpoint_bytes: int | None = None
    keep: int = 1

    @property
    def world_size(self) -> int:
        """Number of processes on all machines."""
        return self.processes * self.nodes


@dataclass(frozen=True)
class Check:
    """The result of checking one thing.

    Attributes:
        name: Unique among checks.
        group: Heading under which it is shown.
        found: The value, in words.
        verdict: ok, advice, problem, or unknown.
        remedy: What to do; empty if nothing needs doing.
        why: Why it matters.
    """

    name: str
    group: str
    found: str
    verdict: Verdict
    remedy: str = ""
    why: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return JSON-ready data."""
        return asdict(self)


@dataclass(frozen=True)
class KnownGain:
    """The expected gain of a change, and how it is known.

    Attributes:
        text: In words, including what it was measured on.
        basis: measured, modelled, or unknown.
        source: File or page of this repository that documents it.
        value: Speedup factor, if it is one number.
        low: Lower end.
        high: Upper end.
    """

    text: str
    basis: Basis
    source: str
    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class ChecklistItem:
    """One optimisation, checked against a config.

    Attributes:
        name: Unique among items.
        state: done, not done, or does not apply.
        reason: Why it is in that state.
        settings: What to set, in the form `--set` accepts.
        gain: Expected gain; None if there is nothing to gain.
        knob: The tuner's knob that tries it.
        finding: Code of the finding that shows its absence in a run.
    """

    name: str
    state: State
    reason: str
    settings: tuple[str, ...] = ()
    gain: KnownGain | None = None
    knob: str | None = None
    finding: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return {**asdict(self), "settings": list(self.settings)}


@dataclass(frozen=True)
class PlanFacts:
    """What the memory plan of a config says; None means it could not be planned."""

    parameters: int | None = None
    parameter_bytes: int | None = None
    checkpoint_bytes: int | None = None
    total_bytes: int | None = None
    memory_bytes: int | None = None  # available for training
    fits: bool | None = None
    largest: dict[str, int] = field(default_factory=dict)  # micro-batch by checkpointing mode
    ddp_fits: bool | None = None


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
