"""A thread that looks at the machine now and then, and at no more cost than half a percent of one core."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from frameworm.hardware.core_wait import CoreWait
from frameworm.hardware.nvml import GpuState, open_gpu
from frameworm.observe.system.host_sources import Family, FamilyState, Machine, MachineState
from frameworm.records.observations import SystemSample, SystemSummary
from frameworm.records.samples import sample_line
from frameworm.records.system_figures import SystemFigures
from frameworm.records.writer import JsonLinesWriter

# After each look the sampler rests until the look is no more than this share of the time since it began.
MOST_COST_SHARE = 0.005
# Short runs should be seen too: the first looks come sooner.
FIRST_INTERVAL_SHARE = 0.2
EARLY_SAMPLES = 10
# A rate over less time than this says more about the clock ticks than about the machine.
SHORTEST_INTERVAL_S = 0.05
# Rates need two.
FEWEST_LOOKS = 2
# Looks that are kept during one step; of longer ones the first are left out.
MOST_PENDING = 10_000


class SystemSampler:
    """Looks at the GPU, this process and the machine from a thread of its own.

    Nothing here reaches into training: no call waits for the device, and whatever fails or is absent is None in the
    samples. Each rank looks at its own process and GPU; cores and network belong to all of a machine's ranks and are
    looked at by one of them.

    Args:
        device: The device trained on.
        interval_s: Time between two looks; more where a look takes long.
        path: File for one line per look, or None.
        whole_machine: Whether to look at cores and network too.
        steps_done: How many steps have ended. Looks before the first one's end (compiling, allocating) and after the
            last one's (the last checkpoint) are written down but not in the summary.

    Attributes:
        cost_s: Processor time that the looks have taken so far.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        interval_s: float = 1.0,
        path: str | os.PathLike[str] | None = None,
        *,
        whole_machine: bool = True,
        steps_done: Callable[[], int] | None = None,
    ) -> None:
        assert interval_s > 0, "time goes forward"
        self.cost_s = 0.0
        self._device = torch.device(device)
        self._interval_s = interval_s
        self._path = path
        self._whole_machine = whole_machine
        self._writer: JsonLinesWriter | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._figures = SystemFigures()
        self._steps_done = steps_done
        self._amid_steps = _AmidSteps(self._figures, None)
        self._problem: str | None = None

    def __enter__(self) -> SystemSampler:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to look; the first look is taken by the thread."""
        if self._thread is not None:
            return
        self._stopping.clear()
        self._amid_steps = _AmidSteps(self._figures, self._steps_done)
        if self._path is not None:
            self._writer = JsonLinesWriter(self._path, max_pending=1_000, encode=sample_line)
        self._thread = threading.Thread(target=self._run, name="frameworm-system", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> SystemSummary | None:
        """Take a last look and end; a source that hangs is left to itself after `timeout_s`."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopping.set()
            thread.join(timeout_s)
            if self._writer is not None:
                self._writer.close(timeout_s)
            with self._lock:
                self._amid_steps.end()
        return self.summary()

    def summary(self) -> SystemSummary | None:
        """The machine so far, or None before the first look."""
        with self._lock:
            return self._figures.summary()

    def samples(self) -> list[SystemSample]:
        """The looks so far, thinned to a bounded number."""
        with self._lock:
            return self._figures.series.points()

    @property
    def notes(self) -> list[str]:
        """What the run's summary should say about the sampling."""
        found = []
        if self._problem is not None:
            found.append(f"the machine was not watched to the end: {self._problem}")
        with self._lock:
            interval_s = self._figures.interval_s
            count = self._figures.count
        if count > EARLY_SAMPLES and interval_s is not None and interval_s > 2 * self._interval_s:
            found.append(
                f"the machine was looked at every {interval_s:.1f} s instead of {self._interval_s:g} s: a look took "
                f"{self.cost_s / count * 1e3:.0f} ms"
            )
        writer = self._writer
        if writer is not None and writer.lost:
            found.append(f"{writer.lost} samples of the machine were lost: {writer.problem or 'queue full'}")
        return found

    def _run(self) -> None:
        try:
            sources = _Sources(self._device, self._whole_machine)
            try:
                self._look_until_stopped(sources)
            finally:
                sources.close()
        except Exception as error:  # whatever a source can do, training never hears of it
            self._problem = f"{type(error).__name__}: {error}"

    def _look_until_stopped(self, sources: _Sources) -> None:
        interval_s = self._interval_s * FIRST_INTERVAL_SHARE
        looks = 0
        last = False
        while True:
            began, cost_began_s = time.perf_counter(), time.thread_time()
            sample = sources.read()
            with self._lock:
                self._amid_steps.add(sample, began)
            if self._writer is not None:
                self._writer.write(sample)
            cost_s = time.thread_time() - cost_began_s
            self.cost_s += cost_s
            if last:
                return
            looks += 1
            if looks % EARLY_SAMPLES == 0:
                interval_s = min(self._interval_s, 2 * interval_s)
            rest_s = max(interval_s, cost_s / MOST_COST_SHARE) - (time.perf_counter() - began)
            if self._stopping.wait(max(0.0, rest_s)):
                if time.perf_counter() - began < SHORTEST_INTERVAL_S:
                    return
                last = True


class _AmidSteps:
    """Adds looks to the figures once it is known that a step ended after them."""

    def __init__(self, figures: SystemFigures, steps_done: Callable[[], int] | None) -> None:
        self._figures = figures
        self._steps_done = steps_done
        self._first = self._seen = 0 if steps_done is None else steps_done()
        self._pending: deque[tuple[SystemSample, float]] = deque(maxlen=MOST_PENDING)

    def add(self, sample: SystemSample, began: float) -> None:
        if self._steps_done is None:
            self._figures.add(sample, began)
            return
        done = self._steps_done()
        if done != self._seen:
            if self._seen == self._first:
                self._pending.clear()
            self._seen = done
            self._flush()
        self._pending.append((sample, began))

    def end(self) -> None:
        """Where hardly a look lay between two steps, those after the last are better than none."""
        if self._figures.count < FEWEST_LOOKS:
            self._flush()
        self._pending.clear()

    def _flush(self) -> None:
        for sample, began in self._pending:
            self._figures.add(sample, began)
        self._pending.clear()


class NoSampler:
    """Stands in for a sampler that was not asked for."""

    notes: tuple[str, ...] = ()

    def start(self) -> None:
        """Nothing begins."""

    def stop(self, timeout_s: float = 2.0) -> SystemSummary | None:
        """Nothing was seen."""
        return None


def make_sampler(
    interval_s: float | None,
    device: torch.device,
    path: str | os.PathLike[str] | None,
    *,
    whole_machine: bool,
    steps_done: Callable[[], int],
) -> SystemSampler | NoSampler:
    """A sampler, or its stand-in where `interval_s` is None."""
    if interval_s is None:
        return NoSampler()
    return SystemSampler(device, interval_s, path, whole_machine=whole_machine, steps_done=steps_done)


class _Sources:
    """Everything that is looked at, and what it said first."""

    def __init__(self, device: torch.device, whole_machine: bool) -> None:
        self._gpu = open_gpu(device)
        self._allocator = _allocator(device) if self._gpu is None else None
        self._family = Family()
        self._machine = Machine() if whole_machine else None
        self._core_wait = CoreWait()
        self._energy_j: float | None = None
        self._before: tuple[float, float] | None = None  # clock, processor time of the family

    def read(self) -> SystemSample:
        gpu = self._gpu.read() if self._gpu is not None else GpuState()
        if self._allocator is not None:
            gpu.memory_bytes, gpu.memory_total_bytes = self._allocator()
        if self._energy_j is None:
            self._energy_j = gpu.energy_j
        family: FamilyState = self._family.read()
        machine = self._machine.read() if self._machine is not None else MachineState()
        now = time.perf_counter()
        cpu_process = None
        if family.cpu_s is not None:
            if self._before is not None and now > self._before[0]:
                cpu_process = (family.cpu_s - self._before[1]) / (now - self._before[0])
            self._before = (now, family.cpu_s)
        waits = self._core_wait.read(now)
        return SystemSample(
            time=time.time(),
            gpu_busy=gpu.busy,
            gpu_memory_bytes=gpu.memory_bytes,
            gpu_memory_total_bytes=gpu.memory_total_bytes,
            gpu_clock_mhz=gpu.clock_mhz,
            gpu_clock_max_mhz=gpu.clock_max_mhz,
            gpu_power_w=gpu.power_w,
            gpu_energy_j=None if gpu.energy_j is None or self._energy_j is None else gpu.energy_j - self._energy_j,
            gpu_temperature_c=gpu.temperature_c,
            throttle_reasons=gpu.throttle_reasons,
            cpu_cores=machine.cores,
            cpu_process=cpu_process,
            io_wait=machine.io_wait,
            cpu_waiting=waits.waiting,
            cpu_stolen=waits.stolen,
            host_memory=machine.memory,
            rss_bytes=family.rss_bytes,
            threads=family.threads,
            disk_read_bytes=family.disk_read_bytes,
            disk_write_bytes=family.disk_write_bytes,
            network_sent_bytes=machine.network_sent_bytes,
            network_received_bytes=machine.network_received_bytes,
        )

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.close()


def _allocator(device: torch.device) -> Callable[[], tuple[int, int]] | None:
    """Without NVML: what torch itself holds of the GPU; a look into its books, no call to the device."""
    if device.type != "cuda":
        return None
    total_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    return lambda: (int(torch.cuda.memory_reserved(device)), total_bytes)
