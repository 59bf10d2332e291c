"""Analyse a PyTorch trace file: device busy and idle time with causes, kernels, copies, overlap, operators.

Works on any file of torch.profiler's `export_chrome_trace`, on a machine without torch.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from frameworm.observe.trace.device import (
    MICROSECOND,
    DeviceSpans,
    DeviceTrace,
    copy_figures,
    device_time,
    kernel_figures,
    launch_figures,
    launch_latency,
)
from frameworm.observe.trace.events import KERNEL, OPERATOR, TraceEvents, read_events
from frameworm.observe.trace.host import TOP, HostSpans, kernels_by_time, nest, operators, ranges, threads
from frameworm.observe.trace.intervals import Intervals
from frameworm.observe.trace.kinds import kernel_kinds
from frameworm.records.trace import HostTime, TraceStep, TraceSummary

_CUDA, _CPU = 1, 0
_Window = tuple[float, float]


def read_trace(path: str | os.PathLike[str], most: int = TOP) -> TraceSummary:
    """Read a trace.

    Args:
        path: A Chrome trace of torch.profiler, .json or .json.gz. A truncated file is read as far as it goes.
        most: Length of each list of operators, kernels and ranges, largest first.

    Raises:
        DataError: The file does not exist or is not a trace.
    """
    events = read_events(Path(path))
    window = _window(events)
    trace, host = DeviceTrace(events), HostSpans(events)
    waiting = trace.waiting_calls()
    device_window, left_out = _device_window(events, trace, window)
    numbers = np.unique(trace.number[trace.kind == KERNEL]) if len(events.device) else np.empty(0, dtype=np.int64)
    spans = {int(number): DeviceSpans(trace, int(number), device_window) for number in numbers}
    nesting = nest(events)
    kinds = kernel_kinds(events, nesting, trace.launch)
    devices = [device_time(trace, spans[number], number, waiting, host.loading, kinds) for number in spans]
    devices.sort(key=lambda item: -item.busy_s)
    by_device, by_cpu, by_memory = operators(events, nesting, trace.launch, most)
    information = events.header.get("distributedInfo")
    information = information if isinstance(information, dict) else {}
    return TraceSummary(
        source=str(path),
        wall_s=(window[1] - window[0]) * MICROSECOND,
        events=events.count,
        host=_host_time(host, waiting, window),
        devices=devices,
        kernels=kernel_figures(trace),
        copies=copy_figures(trace),
        launches=launch_figures(trace, window),
        steps=_steps(events, trace, spans[devices[0].device] if devices else None, host),
        operators_by_device=by_device,
        operators_by_cpu=by_cpu,
        operators_by_memory=by_memory,
        kernels_by_time=kernels_by_time(events, most),
        ranges=ranges(events, window, most),
        threads=threads(events),
        peak_device_bytes=events.peak_bytes.get(_CUDA),
        peak_host_bytes=events.peak_bytes.get(_CPU),
        rank=_whole(information.get("rank")),
        world_size=_whole(information.get("world_size")),
        truncated=events.truncated,
        notes=[*_notes(events), *left_out],
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _window(events: TraceEvents) -> _Window:
    """From the first step to the end of the last, or of the device work that was then still pending."""
    device, host = events.device, events.host
    if events.steps:
        start = min(step[1] for step in events.steps)
        end = max(step[2] for step in events.steps)
    else:
        start = min(float(columns["start"].min()) for columns in (device, host) if len(columns))
        end = max(float(columns["end"].max()) for columns in (device, host) if len(columns))
    if len(device):
        end = max(end, float(device["end"].max()))
    return start, end


def _device_window(events: TraceEvents, trace: DeviceTrace, window: _Window) -> tuple[_Window, list[str]]:
    """The window in which the device is judged.

    If the host is ahead, the device is still busy with earlier work when recording begins, which the trace does not
    show: a first kernel that was launched long before it began did not find the device idle.
    """
    start, end = window
    if not (trace.launch >= 0).any() or trace.start.min() <= start:
        return window, []
    first = int(np.argmin(trace.start))
    begun = float(trace.start[first])
    launched = float(trace.launch_start[first])
    ready = max(launched, start) + launch_latency(trace)
    if begun - ready <= (begun - start) / 2:  # no sign of unrecorded earlier work
        return window, []
    step = min((span[0] for span in events.device_steps.values()), default=begun)
    begun = max(begun, step)
    note = (
        f"the device was still busy with earlier work when recording began: its figures leave out the first "
        f"{(begun - start) * 1e-3:.3g} ms"
    )
    return (begun, end), [note]


def _host_time(host: HostSpans, waiting: Intervals, window: _Window) -> HostTime:
    def seconds(span: Intervals) -> float:
        return span.within(*window).total * MICROSECOND

    return HostTime(
        operators_s=seconds(host.operators),
        data_loading_s=seconds(host.loading),
        synchronisation_s=seconds(waiting),
        communication_s=seconds(host.collectives),
        communication_exposed_s=seconds(host.collectives - host.operators),
    )


def _steps(events: TraceEvents, trace: DeviceTrace, spans: DeviceSpans | None, host: HostSpans) -> list[TraceStep]:
    operator_starts = np.sort(events.host["start"][events.host["kind"] == OPERATOR])
    kernel_starts = np.sort(trace.start[trace.kind == KERNEL])
    found = []
    for number, start, end in events.steps:
        step = TraceStep(
            step=number,
            wall_s=(end - start) * MICROSECOND,
            data_loading_s=host.loading.within(start, end).total * MICROSECOND,
            operators=_between(operator_starts, start, end),
        )
        if spans is not None:
            start, end = _device_step(events, number, start, end)
            step.device_wall_s = (end - start) * MICROSECOND
            step.busy_s = spans.busy.within(start, end).total * MICROSECOND
            step.compute_s = spans.compute.within(start, end).total * MICROSECOND
            step.communication_exposed_s = spans.only_communication.within(start, end).total * MICROSECOND
            step.transfer_exposed_s = spans.only_transfer.within(start, end).total * MICROSECOND
            step.idle_s = step.device_wall_s - step.busy_s
            step.kernels = _between(kernel_starts, start, end)
        found.append(step)
    return found


def _device_step(events: TraceEvents, number: int, start: float, end: float) -> _Window:
    """When the device worked on a step, up to the next one; the host's times if the trace does not tell."""
    if number not in events.device_steps:
        return start, end
    start, end = events.device_steps[number]
    following = events.device_steps.get(number + 1)
    return start, end if following is None else max(following[0], start)


def _between(moments: np.ndarray[tuple[int], np.dtype[np.float64]], start: float, end: float) -> int:
    first, last = np.searchsorted(moments, (start, end), side="left")
    return int(last - first)


def _notes(events: TraceEvents) -> list[str]:
    notes = []
    if events.truncated:
        notes.append(f"the file ends in the middle: figures are of the {events.count} events before that")
    if events.damaged:
        notes.append(f"{events.damaged} damaged events were left out")
    if events.kinds["malformed"]:
        notes.append(f"{events.kinds['malformed']} events without a time or with a wrong type were left out")
    if not events.steps:
        notes.append("no ProfilerStep ranges: figures are of the whole file, not of whole steps")
    if len(events.device) and not (events.host["correlation"] >= 0).any():
        notes.append("no launches in this trace: what the device waited for is not known")
    return notes
