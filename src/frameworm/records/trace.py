"""Summary of a profiler trace: where the device's time went and which operators took it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from frameworm.records.schema import json_ready

TRACE_SCHEMA_VERSION = 1

MATRIX_PRODUCTS, ATTENTION, OTHER_KERNELS = "matrix_products", "attention", "other_kernels"
WAIT_CAUSES = ("data_loading", "synchronisation", "host", "transfer", "communication", "queued", "unknown")


@dataclass(slots=True)
class DeviceTime:
    """One device over the traced time. wall = compute + all waits; wall = busy + idle.

    Attributes:
        busy_s: Time in which anything ran: a kernel, a copy or a memset.
        compute_s: Time in which a kernel other than communication, a memset or a copy within the device ran.
        communication_s: Time in which a communication kernel ran; `waits_s["communication"]` is its exposed part.
        transfer_s: Time in which a copy from or to the host or another device ran.
        waits_s: Time without compute, by cause. `data_loading`, `synchronisation`, `host`: nothing was launched,
            because the host was waiting for the loader, had waited for the device, or was otherwise busy. `transfer`,
            `communication`: only that ran. `queued`: launched but not started. `unknown`: the trace has no launches.
        kernels_s: Compute time by kind of kernel: `matrix_products` (including convolutions and recurrent layers),
            `attention` and `other_kernels`. Where two kinds overlap, the time counts for the first of them.
    """

    device: int
    wall_s: float
    busy_s: float
    idle_s: float
    compute_s: float
    communication_s: float
    transfer_s: float
    waits_s: dict[str, float]
    streams: int
    name: str | None = None
    kernels_s: dict[str, float] = field(default_factory=dict)

    @property
    def communication_hidden_share(self) -> float | None:
        """Fraction of the communication that overlaps compute; None without communication."""
        if not self.communication_s:
            return None
        return 1.0 - self.waits_s["communication"] / self.communication_s


@dataclass(slots=True)
class KernelMetrics:
    """All kernels of the trace."""

    count: int
    time_s: float  # summed, even where kernels overlap
    mean_s: float
    median_s: float
    tiny_count: int  # shorter than their launch takes
    communication_count: int
    matmul_s: dict[str, float] = field(default_factory=dict)  # guessed from names: tensor_core, tf32, fp32, unknown


@dataclass(slots=True)
class CopyMetrics:
    """Copies of one kind."""

    direction: str  # HtoD, DtoH, DtoD, PtoP; memset
    source: str | None  # Pageable, Pinned, Device, ...
    target: str | None
    count: int
    time_s: float
    bytes: int | None = None


@dataclass(slots=True)
class LaunchMetrics:
    """How far the host runs ahead of the device."""

    count: int
    call_mean_s: float  # of the runtime call itself
    lag_median_s: float  # from the launch call to the start of what it launched
    lag_p95_s: float
    queue_mean: float  # launched but not started, mean over time
    queue_empty_share: float  # fraction of the time


@dataclass(slots=True)
class OperatorTime:
    """One operator, kernel or range over the whole trace."""

    name: str
    count: int
    self_cpu_s: float | None = None
    device_s: float | None = None
    total_s: float | None = None
    allocated_bytes: int | None = None
    net_bytes: int | None = None  # allocated minus freed


@dataclass(slots=True)
class ThreadTime:
    """One host thread."""

    name: str
    busy_s: float  # inside an operator or a runtime call
    operators: int


@dataclass(slots=True)
class HostTime:
    """What the host did; overlapping times are counted once."""

    operators_s: float
    data_loading_s: float
    synchronisation_s: float
    communication_s: float = 0.0  # collectives seen on the host (gloo, or the host side of nccl)
    communication_exposed_s: float = 0.0  # while no operator computed on the host


@dataclass(slots=True)
class TraceStep:
    """One ProfilerStep range. Device metrics are None without a device.

    They refer to the device's own time for the step, `device_wall_s`: from its first kernel to the first kernel of the
    next step, which may be long after the host's `wall_s` if the host runs ahead.
    """

    step: int
    wall_s: float
    data_loading_s: float
    operators: int
    device_wall_s: float | None = None
    busy_s: float | None = None
    compute_s: float | None = None
    communication_exposed_s: float | None = None
    transfer_exposed_s: float | None = None
    idle_s: float | None = None
    kernels: int | None = None


@dataclass(slots=True)
class TraceSummary:
    """What `observe.trace.read_trace` returns for a trace file."""

    source: str
    wall_s: float
    events: int
    host: HostTime
    devices: list[DeviceTime] = field(default_factory=list)  # the busiest first
    kernels: KernelMetrics | None = None
    copies: list[CopyMetrics] = field(default_factory=list)
    launches: LaunchMetrics | None = None
    steps: list[TraceStep] = field(default_factory=list)
    operators_by_device: list[OperatorTime] = field(default_factory=list)
    operators_by_cpu: list[OperatorTime] = field(default_factory=list)
    operators_by_memory: list[OperatorTime] = field(default_factory=list)
    kernels_by_time: list[OperatorTime] = field(default_factory=list)
    ranges: list[OperatorTime] = field(default_factory=list)  # record_function and the like
    threads: list[ThreadTime] = field(default_factory=list)
    peak_device_bytes: int | None = None
    peak_host_bytes: int | None = None
    rank: int | None = None
    world_size: int | None = None
    truncated: bool = False
    notes: list[str] = field(default_factory=list)
    schema_version: int = TRACE_SCHEMA_VERSION

    @property
    def device(self) -> DeviceTime | None:
        """The busiest device; None for a trace of the host alone."""
        return self.devices[0] if self.devices else None

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON-ready data."""
        data: dict[str, Any] = json_ready(dataclasses.asdict(self))
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TraceSummary:
        """Read what `to_dict` wrote; unknown keys of later versions are ignored."""
        values = _known(cls, data)
        for name, kind in _LISTS.items():
            values[name] = [kind(**_known(kind, item)) for item in values.get(name) or []]
        for name, one in (("host", HostTime), ("kernels", KernelMetrics), ("launches", LaunchMetrics)):
            if values.get(name) is not None:
                values[name] = one(**_known(one, values[name]))
        return cls(**values)


_LISTS: dict[str, type] = {
    "devices": DeviceTime,
    "copies": CopyMetrics,
    "steps": TraceStep,
    "operators_by_device": OperatorTime,
    "operators_by_cpu": OperatorTime,
    "operators_by_memory": OperatorTime,
    "kernels_by_time": OperatorTime,
    "ranges": OperatorTime,
    "threads": ThreadTime,
}

_Kind = TypeVar("_Kind")


def _known(kind: type[_Kind], data: Mapping[str, Any]) -> dict[str, Any]:
    names = {item.name for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return {key: value for key, value in data.items() if key in names}
