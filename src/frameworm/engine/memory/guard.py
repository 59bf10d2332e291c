"""The memory guard: samples memory between steps, frees it, warns in time, and requests a stop before it runs out.

Only growth counts. A run that fills its memory from the start and stays there uses its device well; stopping it would
not help, as it would be full again after resuming.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable
from time import monotonic
from types import TracebackType

import psutil
import torch
from torch import nn

from frameworm.config.schema import Config, MemoryConfig
from frameworm.engine.memory.garbage import Collector
from frameworm.engine.memory.holdings import mebibytes, snapshot
from frameworm.hardware.host import memory_total_bytes, memory_used_bytes
from frameworm.launch.process_group import is_distributed, setup_ddp
from frameworm.launch.stopping import StopRequest
from frameworm.parallel.strategy import Strategy

log = logging.getLogger("frameworm")

# By then the optimizer has its state, and the loader its workers.
SETTLED_STEPS = 3
# A change below this fraction of the memory is not growth.
GROWTH = 0.01
LONGEST_PAUSE_LOOKS = 64


class Gauge:
    """Measures how much of a memory is used; this class measures the host's.

    Args:
        processes: Ranks on this machine.
    """

    name = "host memory"

    def __init__(self, processes: int = 1) -> None:
        self._processes = processes
        self._process = psutil.Process()
        self.total_bytes = memory_total_bytes()

    def held_bytes(self) -> int:
        """Bytes held between steps."""
        return memory_used_bytes(self._processes)

    def own_bytes(self) -> int:
        """Bytes that this process alone holds; cheap to read."""
        return int(self._process.memory_info().rss)

    def used_bytes(self, held_bytes: int) -> int:
        """Bytes that steps need at their peak; `held_bytes` if the peak is unknown."""
        return held_bytes

    def unused_bytes(self) -> int:
        """Bytes of cache that no step has used so far."""
        return 0

    def trim(self) -> None:
        """Release cached memory."""


class DeviceGauge(Gauge):
    """Measures a GPU's memory by the counters of torch's allocator, without waiting for the device."""

    def __init__(self, device: torch.device, memory_fraction: float = 1.0) -> None:
        self._device = device
        self.name = f"memory of {device}"
        self.total_bytes = int(torch.cuda.get_device_properties(device).total_memory * memory_fraction)

    def held_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def own_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def used_bytes(self, held_bytes: int) -> int:
        return max(held_bytes, torch.cuda.max_memory_allocated(self._device))

    def unused_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device) - torch.cuda.max_memory_allocated(self._device)

    def trim(self) -> None:
        torch.cuda.empty_cache()


class _Watched:
    """A gauge and its history."""

    def __init__(self, gauge: Gauge) -> None:
        self.gauge = gauge
        self.settled_bytes: int | None = None
        self.last_bytes = 0
        self.tidied_bytes = 0
        self.warned_bytes: int | None = None
        self.trim_in = 0
        self.pause = 1

    def grown(self, held_bytes: int, since: int | None) -> bool:
        return since is None or held_bytes - since >= self.gauge.total_bytes * GROWTH


class MemoryGuard:
    """Guards the memory of a run; a context manager around its steps.

    Args:
        settings: Limits and intervals.
        gauges: The memories to watch, scarcest first.
        request: Receives the request to stop.
        describe: Describes what holds memory.
        rank: This rank, for messages.
        waited_for: Whether a pause of this process holds up others: the other ranks, or a GPU.
    """

    def __init__(
        self,
        settings: MemoryConfig,
        gauges: list[Gauge],
        request: StopRequest,
        describe: Callable[[], str],
        rank: int = 0,
        waited_for: bool = False,
    ) -> None:
        self._settings = settings
        self._watched = [_Watched(gauge) for gauge in gauges]
        self._request = request
        self._describe = describe
        self._rank = rank
        self._notes: list[str] = []
        self._steps = 0
        self._next_look = 0.0
        scarcest = gauges[0]
        enabled = settings.enable_automatic_gc
        self._collector = Collector(enabled, waited_for, scarcest.own_bytes, scarcest.total_bytes)

    @property
    def notes(self) -> list[str]:
        """Notes for the summary."""
        return self._notes + [note for note in [self._collector.note] if note]

    def __enter__(self) -> MemoryGuard:
        """Begin guarding."""
        self._collector.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop guarding."""
        self._collector.__exit__(kind, error, trace)

    def at_leisure(self) -> contextlib.AbstractContextManager[None]:
        """Let Python collect garbage as usual during something long that has no steps."""
        return self._collector.at_leisure()

    def before_step(self, number: int) -> None:
        """Collect garbage and sample memory if due; call between two steps."""
        self._collector.before_step(number)
        self._steps += 1
        now = monotonic()
        if now >= self._next_look and self._steps > SETTLED_STEPS:
            self._next_look = now + self._settings.monitoring_interval
            for watched in self._watched:
                self._look(watched, number)

    def _look(self, watched: _Watched, number: int) -> None:
        gauge, settings = watched.gauge, self._settings
        total = gauge.total_bytes
        held = gauge.held_bytes()
        if watched.settled_bytes is None:
            watched.settled_bytes = watched.last_bytes = held
        threshold = total * settings.gc_threshold / 100
        fresh = watched.grown(held, watched.settled_bytes) and watched.grown(held, watched.tidied_bytes)
        if fresh and gauge.used_bytes(held) > threshold:
            gc.collect()
            gauge.trim()
            held = watched.tidied_bytes = gauge.held_bytes()
        elif gauge.unused_bytes() > settings.cache_size_limit:
            self._trim(watched)
        used = gauge.used_bytes(held)
        growth, watched.last_bytes = held - watched.last_bytes, held
        limit = total * settings.max_memory_percent / 100
        has_grown = watched.grown(held, watched.settled_bytes)
        if used > limit and has_grown:
            self._stop(watched, number, used)
        elif used > limit:
            if watched.warned_bytes is None:
                watched.warned_bytes = held
                self._say(
                    f"{self._state(watched, used)} from the beginning, beyond memory.max_memory_percent "
                    f"({settings.max_memory_percent:g}%); it does not grow, so the run continues"
                )
        elif has_grown and (used > threshold or used + 2 * growth > limit):
            self._warn(watched, number, used, limit)

    def _trim(self, watched: _Watched) -> None:
        """Trim the cache, at growing intervals: trimming stalls the device, and the cache may fill up again at once."""
        watched.trim_in -= 1
        if watched.trim_in > 0:
            return
        watched.gauge.trim()
        watched.trim_in = watched.pause
        watched.pause = min(watched.pause * 2, LONGEST_PAUSE_LOOKS)

    def _state(self, watched: _Watched, used: int) -> str:
        total = watched.gauge.total_bytes
        return (
            f"rank {self._rank}: {used / total:.0%} of the {watched.gauge.name} is taken "
            f"({mebibytes(used)} of {mebibytes(total)})"
        )

    def _growth(self, watched: _Watched, number: int) -> str:
        assert watched.settled_bytes is not None
        growth = watched.last_bytes - watched.settled_bytes
        return f"{mebibytes(growth)} more than in the beginning, before step {number}"

    def _warn(self, watched: _Watched, number: int, used: int, limit: float) -> None:
        """Warn once, and again when half of what was left then is used."""
        held, before = watched.last_bytes, watched.warned_bytes
        if before is not None and held - before <= max(limit - used, watched.gauge.total_bytes * GROWTH):
            return
        watched.warned_bytes = held
        self._say(
            f"{self._state(watched, used)}, {self._growth(watched, number)}; beyond "
            f"{self._settings.max_memory_percent:g}% (memory.max_memory_percent) the run saves its state and stops",
            detailed=True,
        )

    def _stop(self, watched: _Watched, number: int, used: int) -> None:
        if self._request.reason is not None:
            return
        text = (
            f"{self._state(watched, used)}, {self._growth(watched, number)}: beyond memory.max_memory_percent "
            f"({self._settings.max_memory_percent:g}%)"
        )
        self._say(f"{text}; the run saves its state and stops", detailed=True, keep=False)
        self._request.ask("memory", text)

    def _say(self, text: str, *, detailed: bool = False, keep: bool = True) -> None:
        """Log a warning; on ranks other than the first as an error, because their warnings are not shown."""
        if keep:
            self._notes.append(text)
        if detailed:
            with contextlib.suppress(Exception):  # the guard must not break the run
                text = f"{text}\n{self._describe()}"
        log.log(logging.WARNING if self._rank == 0 else logging.ERROR, "%s", text)


def make_guard(
    config: Config, strategy: Strategy, request: StopRequest, model: nn.Module, optimizer: torch.optim.Optimizer
) -> MemoryGuard:
    """Create the guard of a rank's memories: the host's, and the GPU's if it has one."""
    device = strategy.device
    gauges = [Gauge(setup_ddp().local_world_size if is_distributed() else 1)]
    if device.type == "cuda":
        gauges.insert(0, DeviceGauge(device, config.gpu.memory_fraction))
    waited_for = strategy.world_size > 1 or device.type == "cuda"
    describe = functools.partial(snapshot, model, optimizer, device)
    return MemoryGuard(config.memory, gauges, request, describe, strategy.rank, waited_for)
