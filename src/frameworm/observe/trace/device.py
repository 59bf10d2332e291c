"""The device's side of a trace: what ran, and why the device was idle."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from frameworm.observe.trace.events import COPY, KERNEL, MEMSET, RUNTIME, TraceEvents
from frameworm.observe.trace.intervals import Intervals, Times
from frameworm.records.trace import WAIT_CAUSES, CopyMetrics, DeviceTime, KernelMetrics, LaunchMetrics

TINY_KERNEL_S = 5e-6  # about the host's cost of a launch: shorter kernels cannot keep the device busy
MICROSECOND = 1e-6
LATENCY_QUANTILE = 0.05
MOST_LATENCY_US = 20.0  # an upper bound, for traces in which every launch waits in a full queue

_COMMUNICATION = re.compile(r"nccl|rccl|(multimem|one_shot|two_shot)_all_(reduce|gather)|all_reduce_kernel", re.I)
_COPY_NAME = re.compile(r"Memcpy\s*(\w+)\s*\(([^)]*?)\s*->\s*([^)]*?)\)")
_MATMUL = re.compile(
    r"gemm|matmul|nvjet|cublas|cutlass|wgrad|dgrad|conv(?!ert)|triton_tem|fmha|flash|attention|sdpa", re.I
)
_TF32 = re.compile(r"tf32|(?<!fp16_)s1688(?!.*(bf16|f16))", re.I)
_TENSOR_CORE = re.compile(
    r"16816|1688|884|hmma|wgmma|gmma|tensorop|nvjet|bf16|f16|half|fp8|e4m3|e5m2|_h?mma_|flash|imma", re.I
)
_FP32 = re.compile(r"sgemm|simt|f32f32_f32f32|fp32|float", re.I)
_SYNCHRONISES = re.compile(r"(cuda|hip|cu)(Device|Stream|Event|Ctx)Synchronize|(cuda|hip)Memcpy$|(cuda|hip)Free$")


class DeviceTrace:
    """Device events, the calls that launched them, and the calls that waited for them. Times in microseconds."""

    def __init__(self, events: TraceEvents) -> None:
        self.events = events
        device = events.device
        self.start, self.end = device["start"], device["end"]
        self.kind = device["kind"].astype(np.int64)
        self.name = device["name"].astype(np.int64)
        self.number = device["device"].astype(np.int64)
        matches = np.array([bool(_COMMUNICATION.search(name)) for name in events.names], dtype=bool)
        self.communication = (self.kind == KERNEL) & (matches[self.name] if len(self.name) else False)
        to_host = np.array([_leaves_device(name) for name in events.names], dtype=bool)
        self.transfer = (self.kind == COPY) & (to_host[self.name] if len(self.name) else False)
        self.launch = _launches(events)

    @property
    def launch_start(self) -> Times:
        """When each event was launched; NaN if the trace does not tell."""
        return _taken(self.events.host["start"], self.launch)

    @property
    def launch_end(self) -> Times:
        """When the launching call returned."""
        return _taken(self.events.host["end"], self.launch)

    def waiting_calls(self) -> Intervals:
        """When the host was in a call that returns only once the device is done."""
        host = self.events.host
        names = np.array([bool(_SYNCHRONISES.match(name)) for name in self.events.names], dtype=bool)
        chosen = host["kind"] == RUNTIME
        if len(chosen):
            chosen &= names[host["name"].astype(np.int64)]
        # An asynchronous copy from or to pageable memory returns when the copy is done, so it waits too.
        blocking = (self.kind == COPY) & (self.launch >= 0) & (self.launch_end >= self.end)
        calls = self.launch[blocking]
        return Intervals.covering(
            np.concatenate((host["start"][chosen], host["start"][calls])),
            np.concatenate((host["end"][chosen], host["end"][calls])),
        )

    def span(self, chosen: npt.NDArray[np.bool_]) -> Intervals:
        """When at least one of these events ran."""
        return Intervals.covering(self.start[chosen], self.end[chosen])


def _taken(values: Times, index: npt.NDArray[np.int64]) -> Times:
    if not len(values):
        return np.full(len(index), np.nan)
    return np.where(index >= 0, values[np.maximum(index, 0)], np.nan)


def _leaves_device(name: str) -> bool:
    """Whether a copy crosses a link, as opposed to one within the device's memory."""
    match = _COPY_NAME.match(name)
    return match is not None and match[1] not in ("DtoD", "AtoD", "DtoA", "AtoA")


def _launches(events: TraceEvents) -> npt.NDArray[np.int64]:
    """For each device event, the host event with the same correlation that launched it, or -1."""
    host, wanted = events.host, events.device["correlation"]
    calls = np.flatnonzero((host["kind"] == RUNTIME) & (host["correlation"] >= 0))
    found = np.full(len(wanted), -1, dtype=np.int64)
    if not len(calls) or not len(wanted):
        return found
    # If a runtime call and the driver call below it share a number, the outer one started first.
    calls = calls[np.lexsort((host["start"][calls], host["correlation"][calls]))]
    numbers = host["correlation"][calls]
    index = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    same = numbers[index] == wanted
    found[same] = calls[index[same]]
    return found


def launch_latency(trace: DeviceTrace) -> float:
    """Time from a launch to its start on an otherwise idle device, in microseconds."""
    delays = _first_delays(trace)
    fastest = float(np.quantile(delays, LATENCY_QUANTILE)) if len(delays) else 0.0
    return min(max(fastest, 0.0), MOST_LATENCY_US)


def _first_delays(trace: DeviceTrace) -> Times:
    """Delay from each launch to its first event: a captured graph is one launch of many events."""
    known = trace.launch >= 0
    order = np.argsort(trace.start[known], kind="stable")
    _, first = np.unique(trace.launch[known][order], return_index=True)
    return (trace.start - trace.launch_start)[known][order][first]


class DeviceSpans:
    """What one device did within a window, as sets of intervals."""

    def __init__(self, trace: DeviceTrace, number: int, window: tuple[float, float]) -> None:
        here = trace.number == number
        self.window = window
        self.communication = trace.span(here & trace.communication).within(*window)
        self.transfer = trace.span(here & trace.transfer).within(*window)
        self.compute = trace.span(here & ~trace.communication & ~trace.transfer).within(*window)
        self.busy = self.compute | self.communication | self.transfer
        self.only_communication = self.communication - self.compute
        self.only_transfer = self.transfer - (self.compute | self.communication)


def device_time(
    trace: DeviceTrace,
    spans: DeviceSpans,
    number: int,
    waiting: Intervals,
    loading: Intervals,
    kinds: Mapping[str, npt.NDArray[np.bool_]],
) -> DeviceTime:
    """The time accounting of one device; `kinds` has a mask of the events for each kind of kernel."""
    start, end = spans.window
    waits = dict.fromkeys(WAIT_CAUSES, 0.0)
    waits["communication"] = spans.only_communication.total
    waits["transfer"] = spans.only_transfer.total
    for cause, time in _idle_causes(trace, spans, number, waiting, loading).items():
        waits[cause] += time
    here = trace.number == number
    return DeviceTime(
        device=number,
        wall_s=(end - start) * MICROSECOND,
        busy_s=spans.busy.total * MICROSECOND,
        idle_s=(end - start - spans.busy.total) * MICROSECOND,
        compute_s=spans.compute.total * MICROSECOND,
        communication_s=spans.communication.total * MICROSECOND,
        transfer_s=spans.transfer.total * MICROSECOND,
        waits_s={cause: time * MICROSECOND for cause, time in waits.items()},
        streams=len(np.unique(trace.events.device["stream"][here])),
        name=_device_name(trace.events.header, number),
        kernels_s=_kernel_times(trace, spans, here, kinds),
    )


def _kernel_times(
    trace: DeviceTrace,
    spans: DeviceSpans,
    here: npt.NDArray[np.bool_],
    kinds: Mapping[str, npt.NDArray[np.bool_]],
) -> dict[str, float]:
    """Seconds of compute by kind; if several kinds run at once, the first counts."""
    found, seen = {}, Intervals.covering(np.empty(0), np.empty(0))
    for kind, chosen in kinds.items():
        span = trace.span(here & chosen & ~trace.communication & ~trace.transfer).within(*spans.window) - seen
        found[kind] = span.total * MICROSECOND
        seen = seen | span
    return found


def _idle_causes(
    trace: DeviceTrace, spans: DeviceSpans, number: int, waiting: Intervals, loading: Intervals
) -> dict[str, float]:
    """Why the device was idle: each gap is attributed by the event that ended it.

    Until that event's launch, plus the latency of any launch, the host was late; after that the event was queued. Of
    the host's part, the time inside the loader is data loading; as much of the rest as the host had lost before in
    calls that waited for the device is synchronisation, because without those calls it would have been ahead by that
    time.
    """
    start, end = spans.window
    gaps = spans.busy.gaps(start, end)
    if not len(gaps):
        return {}
    here = np.flatnonzero(trace.number == number)
    here = here[np.argsort(trace.start[here], kind="stable")]
    index = np.searchsorted(trace.start[here], gaps.ends, side="left")
    ended = index < len(here)
    launched = np.where(ended, trace.launch_start[here[np.minimum(index, len(here) - 1)]], np.inf)
    known = ~np.isnan(launched)
    ready = np.clip(np.where(known, launched + launch_latency(trace), gaps.starts), gaps.starts, gaps.ends)
    late = ready - gaps.starts
    loaded = loading.time_between(gaps.starts, ready)
    waited = _paid_by_waits(waiting, ready, late - loaded)
    rest = gaps.ends - ready
    return {
        "data_loading": float(loaded.sum()),
        "synchronisation": float(waited.sum()),
        "host": float((late - loaded - waited).sum()),
        "queued": float(rest[known].sum()),
        "unknown": float(rest[~known].sum()),
    }


def _paid_by_waits(waiting: Intervals, moments: Times, late: Times) -> Times:
    """How much of each delay is covered by waits that ended before it and that no earlier delay has used up.

    A wait adds its length to how far the host could be ahead, a delay takes from it; the balance never falls below
    zero.
    """
    times = np.concatenate((waiting.ends, moments))
    changes = np.concatenate((waiting.ends - waiting.starts, -late))
    order = np.argsort(times, kind="stable")
    sums = np.cumsum(changes[order])
    uncovered = np.maximum.accumulate(np.maximum(-sums, 0.0))
    own = np.empty_like(sums)
    own[order] = np.diff(uncovered, prepend=0.0)
    paid: Times = late - own[len(waiting.ends) :]
    return paid


def _device_name(header: dict[str, Any], number: int) -> str | None:
    properties = header.get("deviceProperties")
    for item in properties if isinstance(properties, list) else []:
        if isinstance(item, dict) and item.get("id") == number and item.get("name"):
            return str(item["name"])
    return None


def kernel_figures(trace: DeviceTrace) -> KernelMetrics | None:
    """Number, duration and kinds of the kernels; None if there are none."""
    chosen = trace.kind == KERNEL
    lengths = (trace.end - trace.start)[chosen] * MICROSECOND
    if not len(lengths):
        return None
    matmul: dict[str, float] = defaultdict(float)
    kinds = [None if _COMMUNICATION.search(name) else matmul_kind(name) for name in trace.events.names]
    for name, time in enumerate(np.bincount(trace.name[chosen], weights=lengths)):
        kind = kinds[name] if time else None
        if kind is not None:
            matmul[kind] += float(time)
    return KernelMetrics(
        count=len(lengths),
        time_s=float(lengths.sum()),
        mean_s=float(lengths.mean()),
        median_s=float(np.median(lengths)),
        tiny_count=int((lengths < TINY_KERNEL_S).sum()),
        communication_count=int(trace.communication.sum()),
        matmul_s=dict(matmul),
    )


def matmul_kind(name: str) -> str | None:
    """The units used by a matrix kernel, from its name (tensor_core, tf32, fp32, unknown); None for other kernels."""
    if not _MATMUL.search(name):
        return None
    if _TF32.search(name):
        return "tf32"
    if _TENSOR_CORE.search(name):
        return "tensor_core"
    return "fp32" if _FP32.search(name) else "unknown"


def copy_figures(trace: DeviceTrace) -> list[CopyMetrics]:
    """Copies and memsets by kind, the longest first."""
    found: list[CopyMetrics] = []
    sizes = trace.events.device["bytes"]
    lengths = trace.end - trace.start
    chosen = (trace.kind == COPY) | (trace.kind == MEMSET)
    for name in np.unique(trace.name[chosen]):
        rows = chosen & (trace.name == name)
        match = _COPY_NAME.match(trace.events.names[name])
        known = bool((sizes[rows] >= 0).all())
        found.append(
            CopyMetrics(
                direction=match[1] if match else trace.events.names[name].split(" ")[0].lower(),
                source=match[2] if match else None,
                target=match[3] if match else None,
                count=int(rows.sum()),
                time_s=float(lengths[rows].sum()) * MICROSECOND,
                bytes=int(sizes[rows].sum()) if known else None,
            )
        )
    return sorted(found, key=lambda item: -item.time_s)


def launch_figures(trace: DeviceTrace, window: tuple[float, float]) -> LaunchMetrics | None:
    """How far the host was ahead; None if the trace holds no launches."""
    known = trace.launch >= 0
    if not known.any():
        return None
    host = trace.events.host
    calls = np.unique(trace.launch[known])
    lags = np.maximum(_first_delays(trace), 0.0)
    launched = trace.launch_start[known]
    begun = np.maximum(trace.start[known], launched)
    waiting = Intervals.covering(launched, begun).within(*window)
    length = window[1] - window[0]
    queued = np.clip(begun, *window) - np.clip(launched, *window)
    return LaunchMetrics(
        count=len(calls),
        call_mean_s=float((host["end"] - host["start"])[calls].mean()) * MICROSECOND,
        lag_median_s=float(np.median(lags)) * MICROSECOND,
        lag_p95_s=float(np.quantile(lags, 0.95)) * MICROSECOND,
        queue_mean=float(queued.sum()) / length if length else 0.0,
        queue_empty_share=1.0 - waiting.total / length if length else 1.0,
    )
