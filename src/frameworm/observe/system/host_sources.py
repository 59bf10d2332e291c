"""Metrics of this process, its children and the machine from the operating system."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psutil

from frameworm.hardware.host import memory_limit_bytes, memory_used_bytes

# Looking for children reads an entry of every process on the machine, and children rarely change.
LOOK_FOR_CHILDREN_EVERY = 5
# A process that has just started grows by what it imports; growth counts after this many samples.
SETTLED_SAMPLES = 5
LOOPBACK = "lo"


@dataclass(slots=True)
class FamilyState:
    """This process and its children at one sample."""

    rss_bytes: int | None = None  # pages shared by several processes count for each
    rss_grown_bytes: int | None = None  # since the first sample, in processes that have settled
    threads: int | None = None
    cpu_s: float | None = None  # since the first sample
    disk_read_bytes: int | None = None
    disk_write_bytes: int | None = None


class _Counters(NamedTuple):
    """Resources that one process has used so far; identified also by start time, because pids are reused."""

    identity: tuple[int, float]
    rss_bytes: int
    cpu_s: float
    ended_s: float  # of its children that have ended and that it has waited for
    read_bytes: int | None
    write_bytes: int | None


class Family:
    """This process and its children: memory, threads, CPU time, and bytes read and written.

    Memory counts as grown if processes that were there for some samples hold more: helpers that a library starts in
    mid-run (to compile, to load) take much at once and leak nothing. A child's CPU time stays counted after it has
    ended, even if it started and ended between two samples; its bytes count from when it was first seen.
    """

    def __init__(self) -> None:
        self._self: Any = None
        with contextlib.suppress(Exception):
            self._self = psutil.Process()
        self._children: list[Any] = []
        self._looks = 0
        self._ended_s = 0.0  # CPU time of children that have ended since the last sample
        self._before: dict[tuple[int, float], _Counters] = {}
        self._ages: dict[tuple[int, float], int] = {}  # samples that each process was in, at most SETTLED_SAMPLES
        self._grown_bytes = 0
        self._cpu_s = 0.0
        self._seen_to_end_s = 0.0  # already counted for ended children, and reported once more by their parents
        self._read_bytes: int | None = None
        self._write_bytes: int | None = None

    def read(self) -> FamilyState:
        """Take one sample."""
        if self._self is None:
            return FamilyState()
        if self._looks % LOOK_FOR_CHILDREN_EVERY == 0:
            with contextlib.suppress(Exception):
                self._children = self._self.children(recursive=True)
        self._looks += 1
        state = FamilyState()
        seen: dict[tuple[int, float], _Counters] = {}
        alive = []
        self._ended_s = 0.0
        for process in (self._self, *self._children):
            found = _look(process, state)
            if found is None:
                continue
            if process is not self._self:
                alive.append(process)
            seen[found.identity] = found
            first = found if self._looks == 1 else found._replace(cpu_s=0.0, ended_s=0.0)  # a new process
            self._add(found, self._before.get(found.identity, first))
        # All that is there at the first sample counts from then on.
        ages = {one: self._ages.get(one, SETTLED_SAMPLES - 1 if self._looks == 1 else 0) for one in seen}
        settled = [one for one, age in ages.items() if age == SETTLED_SAMPLES]
        self._grown_bytes += sum(seen[one].rss_bytes - self._before[one].rss_bytes for one in settled)
        self._ages = {one: min(age + 1, SETTLED_SAMPLES) for one, age in ages.items()}
        gone = [item for identity, item in self._before.items() if identity not in seen]
        self._seen_to_end_s += sum(item.cpu_s + item.ended_s for item in gone)
        again_s = min(self._seen_to_end_s, self._ended_s)
        self._cpu_s += self._ended_s - again_s
        self._seen_to_end_s -= again_s
        self._children = alive
        self._before = seen
        state.cpu_s = self._cpu_s if seen else None
        state.rss_grown_bytes = self._grown_bytes if seen else None
        state.disk_read_bytes, state.disk_write_bytes = self._read_bytes, self._write_bytes
        return state

    def _add(self, now: _Counters, before: _Counters) -> None:
        self._cpu_s += max(0.0, now.cpu_s - before.cpu_s)
        self._ended_s += max(0.0, now.ended_s - before.ended_s)
        if now.read_bytes is not None and before.read_bytes is not None:
            self._read_bytes = (self._read_bytes or 0) + max(0, now.read_bytes - before.read_bytes)
        if now.write_bytes is not None and before.write_bytes is not None:
            self._write_bytes = (self._write_bytes or 0) + max(0, now.write_bytes - before.write_bytes)


def _look(process: Any, state: FamilyState) -> _Counters | None:
    """Add one process to the state; None if it is gone or cannot be read."""
    try:
        with process.oneshot():
            identity = (int(process.pid), float(process.create_time()))
            times = process.cpu_times()
            rss_bytes = int(process.memory_info().rss)
            threads = int(process.num_threads())
    except Exception:
        return None
    state.rss_bytes = (state.rss_bytes or 0) + rss_bytes
    state.threads = (state.threads or 0) + threads
    read_bytes = write_bytes = None
    with contextlib.suppress(Exception):  # not available on every system or in every container
        counters = process.io_counters()
        read_bytes, write_bytes = int(counters.read_bytes), int(counters.write_bytes)
    ended_s = times.children_user + times.children_system
    return _Counters(identity, rss_bytes, times.user + times.system, ended_s, read_bytes, write_bytes)


@dataclass(slots=True)
class HostState:
    """The machine since the last sample."""

    cores: list[float] = field(default_factory=list)  # busy fraction, 0 to 1
    io_wait: float | None = None
    memory: float | None = None  # fraction in use
    network_sent_bytes: int | None = None  # since the first sample
    network_received_bytes: int | None = None


class HostSampler:
    """The cores this process may use, and the network interfaces, without loopback traffic."""

    def __init__(self) -> None:
        self._usable: set[int] | None = None
        with contextlib.suppress(Exception):
            self._usable = set(os.sched_getaffinity(0))
        self._times: list[Any] | None = None
        self._network: tuple[int, int] | None = None

    def read(self) -> HostState:
        """Take one sample."""
        state = HostState()
        times = _answer(lambda: psutil.cpu_times(percpu=True))
        if times is not None and self._usable is not None:
            times = [time for core, time in enumerate(times) if core in self._usable]
        if times and self._times and len(times) == len(self._times):
            state.cores, state.io_wait = _core_shares(self._times, times)
        self._times = times
        state.memory = _answer(_memory_in_use)
        interfaces = _answer(lambda: psutil.net_io_counters(pernic=True))
        if interfaces:
            sent = sum(item.bytes_sent for name, item in interfaces.items() if name != LOOPBACK)
            received = sum(item.bytes_recv for name, item in interfaces.items() if name != LOOPBACK)
            if self._network is None:
                self._network = (sent, received)
            state.network_sent_bytes = max(0, sent - self._network[0])
            state.network_received_bytes = max(0, received - self._network[1])
        return state


def _memory_in_use() -> float:
    """Used fraction of the memory of this machine, or of this process's cgroup."""
    limit_bytes = memory_limit_bytes()
    if limit_bytes is None:
        return float(psutil.virtual_memory().percent) / 100
    return min(1.0, memory_used_bytes() / limit_bytes)


def _core_shares(before: list[Any], now: list[Any]) -> tuple[list[float], float | None]:
    """The busy fraction of each core, and the fraction of all cores' time spent waiting for disks."""
    cores: list[float] = []
    total_s = wait_s = 0.0
    knows_wait = hasattr(now[0], "iowait")
    for old, new in zip(before, now):
        elapsed_s = _whole(new) - _whole(old)
        if elapsed_s <= 0:
            continue
        waited_s = max(0.0, new.iowait - old.iowait) if knows_wait else 0.0
        idle_s = max(0.0, new.idle - old.idle) + waited_s
        cores.append(min(1.0, max(0.0, 1 - idle_s / elapsed_s)))
        total_s += elapsed_s
        wait_s += waited_s
    return cores, min(1.0, wait_s / total_s) if knows_wait and total_s > 0 else None


def _whole(times: Any) -> float:
    """Total time of a core; guest time is contained in user time."""
    return float(sum(times)) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)


def _answer(question: Callable[[], Any]) -> Any:
    """The result of a query, or None if it fails."""
    try:
        return question()
    except Exception:
        return None
