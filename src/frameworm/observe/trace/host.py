"""The host's side of a trace: nested operators, threads, and allocations."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from frameworm.observe.trace.events import ASYNCHRONOUS, MEMORY, OPERATOR, RANGE, RUNTIME, TraceEvents
from frameworm.observe.trace.intervals import Intervals
from frameworm.records.trace import OperatorTime, ThreadTime

MICROSECOND = 1e-6
TOP = 10

_LOADING = re.compile(r"enumerate\(DataLoader\)#|frameworm:data_wait$|.*DataLoader\w*\.__next__$")
_COLLECTIVE_OPERATOR = re.compile(r"c10d::|_c10d_functional::|record_param_comms|nccl|gloo")


@dataclass(slots=True)
class _Row:
    count: int = 0
    self_us: float = 0.0
    device_us: float = 0.0
    allocated: float = 0.0
    net: float = 0.0


@dataclass(slots=True)
class Nesting:
    """For each host event, the operator or range around it (-1: none), and its time outside of nested events."""

    parent: npt.NDArray[np.int64]
    self_us: npt.NDArray[np.float64]


def nest(events: TraceEvents) -> Nesting:
    """Find the nesting of events, thread by thread."""
    host = events.host
    parent = np.full(len(host), -1, dtype=np.int64)
    self_us = host["end"] - host["start"]
    kinds = host["kind"]
    chosen = np.flatnonzero(kinds != ASYNCHRONOUS)
    # A point event lies inside what begins at the same moment, and a range encloses an operator of the same extent.
    depth = np.choose(kinds[chosen].astype(np.int64), [1, 0, 2, 3, 3])
    order = chosen[np.lexsort((depth, -host["end"][chosen], host["start"][chosen], host["thread"][chosen]))]
    starts, ends, threads = host["start"].tolist(), host["end"].tolist(), host["thread"].tolist()
    holds = ((kinds == OPERATOR) | (kinds == RANGE) | (kinds == RUNTIME)).tolist()
    open_events: list[int] = []
    current_thread: float | None = None
    for index in order.tolist():
        if threads[index] != current_thread:
            current_thread = threads[index]
            open_events.clear()
        start = starts[index]
        while (
            open_events
            and ends[open_events[-1]] <= start
            and not (ends[open_events[-1]] == start == ends[index] and starts[open_events[-1]] == start)
        ):
            open_events.pop()
        if open_events:
            above = open_events[-1]
            parent[index] = above
            self_us[above] -= min(ends[index], ends[above]) - start
        if holds[index]:
            open_events.append(index)
    return Nesting(parent, np.maximum(self_us, 0.0))


def _around(nesting: Nesting, kinds: npt.NDArray[np.float64], index: int) -> int:
    """The innermost operator or range at or around a host event, or -1."""
    at = index
    while at >= 0 and kinds[at] not in (OPERATOR, RANGE):
        at = int(nesting.parent[at])
    return at


def operators(
    events: TraceEvents, nesting: Nesting, launch: npt.NDArray[np.int64], most: int = TOP
) -> tuple[list[OperatorTime], list[OperatorTime], list[OperatorTime]]:
    """The top operators by their own device time, by their own host time and by memory.

    Args:
        events: The events.
        nesting: Their nesting.
        launch: For each device event the host event that launched it, or -1.
        most: Length of each list.
    """
    host, device = events.host, events.device
    kinds = host["kind"]
    names = host["name"].astype(np.int64)
    rows: dict[int, _Row] = {}
    counted = np.isin(kinds, (OPERATOR, RUNTIME))
    for name, count, time in by_name(names, nesting.self_us, counted):
        rows[name] = _Row(count, time)
    by_external = {}
    if (launch < 0).any():
        mine = kinds == OPERATOR
        by_external = dict(zip(host["external"][mine].tolist(), np.flatnonzero(mine).tolist()))
    owners: dict[int, int] = {}  # launching call -> name it counts for
    lengths = (device["end"] - device["start"]).tolist()
    for position, (call, external) in enumerate(zip(launch.tolist(), device["external"].tolist())):
        if call < 0:
            call = by_external.get(external, -1) if external >= 0 else -1
        if call < 0:
            continue
        if call not in owners:
            around = _around(nesting, kinds, call)
            owners[call] = int(names[around if around >= 0 else call])
        rows.setdefault(owners[call], _Row()).device_us += lengths[position]
    for index in np.flatnonzero(kinds == MEMORY).tolist():
        around = _around(nesting, kinds, index)
        if around < 0:
            continue
        row = rows.setdefault(int(names[around]), _Row())
        size = float(host["bytes"][index])
        row.allocated += max(size, 0.0)
        row.net += size
    memory = bool((kinds == MEMORY).any())
    found = [_operator(events.names[name], row, memory=memory, device=len(device) > 0) for name, row in rows.items()]
    return (
        _top([item for item in found if item.device_s], lambda item: item.device_s or 0.0, most),
        _top([item for item in found if item.self_cpu_s], lambda item: item.self_cpu_s or 0.0, most),
        _top([item for item in found if item.allocated_bytes], lambda item: item.allocated_bytes or 0.0, most),
    )


def _operator(name: str, row: _Row, *, memory: bool, device: bool) -> OperatorTime:
    return OperatorTime(
        name=name,
        count=row.count,
        self_cpu_s=row.self_us * MICROSECOND,
        device_s=row.device_us * MICROSECOND if device else None,
        allocated_bytes=int(row.allocated) if memory else None,
        net_bytes=int(row.net) if memory else None,
    )


def _top(items: list[OperatorTime], key: Callable[[OperatorTime], float], most: int) -> list[OperatorTime]:
    return sorted(items, key=lambda item: (-key(item), item.name))[:most]


def by_name(
    names: npt.NDArray[np.int64], values: npt.NDArray[np.float64], chosen: npt.NDArray[np.bool_]
) -> list[tuple[int, int, float]]:
    """For each name among the chosen events: the name, their number and the sum of their values."""
    counts = np.bincount(names[chosen])
    sums = np.bincount(names[chosen], weights=values[chosen])
    return [(int(name), int(counts[name]), float(sums[name])) for name in np.flatnonzero(counts)]


def ranges(events: TraceEvents, window: tuple[float, float], most: int = TOP) -> list[OperatorTime]:
    """Ranges of record_function and the like, by total time within the window.

    A collective that was in progress when the profiler stopped ends only there, long after the last step.
    """
    host = events.host
    chosen = np.isin(host["kind"], (RANGE, ASYNCHRONOUS))
    lengths = (np.clip(host["end"], *window) - np.clip(host["start"], *window)) * MICROSECOND
    found = [
        OperatorTime(events.names[name], count, total_s=time)
        for name, count, time in by_name(host["name"].astype(np.int64), lengths, chosen)
    ]
    return _top(found, lambda item: item.total_s or 0.0, most)


def kernels_by_time(events: TraceEvents, most: int = TOP) -> list[OperatorTime]:
    """Device events by name and total time."""
    device = events.device
    lengths = (device["end"] - device["start"]) * MICROSECOND
    found = [
        OperatorTime(events.names[name], count, device_s=time)
        for name, count, time in by_name(device["name"].astype(np.int64), lengths, np.ones(len(device), dtype=bool))
    ]
    return _top(found, lambda item: item.device_s or 0.0, most)


def threads(events: TraceEvents) -> list[ThreadTime]:
    """Time that each host thread spent in operators and runtime calls, busiest first."""
    host = events.host
    working = np.isin(host["kind"], (OPERATOR, RUNTIME))
    found = []
    for number, name in enumerate(events.threads):
        mine = working & (host["thread"] == number)
        if mine.any():
            busy = Intervals.covering(host["start"][mine], host["end"][mine])
            found.append(ThreadTime(name, busy.total * MICROSECOND, int((mine & (host["kind"] == OPERATOR)).sum())))
    return sorted(found, key=lambda item: -item.busy_s)


class HostSpans:
    """What the host did, as sets of intervals."""

    def __init__(self, events: TraceEvents) -> None:
        host = events.host
        kinds, names = host["kind"], host["name"].astype(np.int64)
        is_loading = np.array([bool(_LOADING.match(name)) for name in events.names], dtype=bool)
        is_collective = np.array([bool(_COLLECTIVE_OPERATOR.match(name)) for name in events.names], dtype=bool)

        def covering(chosen: npt.NDArray[np.bool_]) -> Intervals:
            return Intervals.covering(host["start"][chosen], host["end"][chosen])

        nothing = np.zeros(len(host), dtype=bool)
        named = is_loading[names] if len(names) else nothing
        collective = is_collective[names] if len(names) else nothing
        self.loading = covering(named & np.isin(kinds, (OPERATOR, RANGE)))
        self.operators = covering((kinds == OPERATOR) & ~collective)
        self.collectives = covering(kinds == ASYNCHRONOUS)
