"""A thread that samples the machine at intervals, at a cost of at most half a percent of one core."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from frameworm.hardware.core_wait import CoreWait
from frameworm.hardware.nvml import GpuState, open_gpu
from frameworm.observe.system.host_sources import Family, FamilyState, HostSampler, HostState
from frameworm.records.observations import SystemSample, SystemSummary
from frameworm.records.samples import sample_line
from frameworm.records.system_metrics import SystemMetrics
from frameworm.records.writer import JsonLinesWriter

# After each sample the thread rests until the sample's cost is at most this fraction of the time since it began.
MOST_COST_SHARE = 0.005
# The first samples come sooner, so that short runs are covered too.
FIRST_INTERVAL_SHARE = 0.2
EARLY_SAMPLES = 10
# Rates over shorter times are dominated by the resolution of the clocks.
SHORTEST_INTERVAL_S = 0.05
# A rate needs two samples.
FEWEST_LOOKS = 2
# Samples kept during one step; if there are more, the oldest are dropped.
MOST_PENDING = 10_000


class SystemSampler:
    """Samples the GPU, this process and the machine in its own thread.

    It cannot affect training: no call waits for the device, and anything that fails or is missing is None in the
    samples. Each rank samples its own process and GPU; cores and network are shared by all ranks of a machine and
    sampled by one of them.

    Args:
        device: The device trained on.
        interval_s: Seconds between two samples; more if a sample takes long.
        path: File for one line per sample, or None.
        whole_machine: Whether to sample cores and network too.
        steps_done: Returns how many steps have ended. Samples before the end of the first step (compiling, allocating)
            and after the last (the final checkpoint) are written to the file but left out of the summary.

    Attributes:
        cost_s: Processor time that the samples have taken so far.
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
        self._figures = SystemMetrics()
        self._steps_done = steps_done
        self._amid_steps = _AmidSteps(self._figures, None)
        self._problem: str | None = None

    def __enter__(self) -> SystemSampler:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start sampling; the thread takes the first sample."""
        if self._thread is not None:
            return
        self._stopping.clear()
        self._amid_steps = _AmidSteps(self._figures, self._steps_done)
        if self._path is not None:
            self._writer = JsonLinesWriter(self._path, max_pending=1_000, encode=sample_line)
        self._thread = threading.Thread(target=self._run, name="frameworm-system", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> SystemSummary | None:
        """Take a last sample and stop; a source that hangs is abandoned after `timeout_s`."""
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
        """The summary so far, or None before the first sample."""
        with self._lock:
            return self._figures.summary()

    def samples(self) -> list[SystemSample]:
        """The samples so far, thinned to a bounded number."""
        with self._lock:
            return self._figures.series.points()

    @property
    def notes(self) -> list[str]:
        """Remarks on the sampling for the run's summary."""
        found = []
        if self._problem is not None:
            found.append(f"the machine was not watched to the end: {self._problem}")
        with self._lock:
            interval_s = self._figures.interval_s
            count = self._figures.count
        if count > EARLY_SAMPLES and interval_s is not None and interval_s > 2 * self._interval_s:
            found.append(
                f"the machine was sampled every {interval_s:.1f} s instead of {self._interval_s:g} s: a sample took "
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
        except Exception as error:  # whatever fails in a source must not reach the training
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
    """Adds samples to the summary only once a step has ended after them."""

    def __init__(self, figures: SystemMetrics, steps_done: Callable[[], int] | None) -> None:
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
        """Use the samples after the last step only if there are hardly any between steps."""
        if self._figures.count < FEWEST_LOOKS:
            self._flush()
        self._pending.clear()

    def _flush(self) -> None:
        for sample, began in self._pending:
            self._figures.add(sample, began)
        self._pending.clear()


class NoSampler:
    """Stands in for a sampler that was not requested."""

    notes: tuple[str, ...] = ()

    def start(self) -> None:
        """Return without starting a sampler."""

    def stop(self, timeout_s: float = 2.0) -> SystemSummary | None:
        """Return None: nothing was sampled."""
        return None


def make_sampler(
    interval_s: float | None,
    device: torch.device,
    path: str | os.PathLike[str] | None,
    *,
    whole_machine: bool,
    steps_done: Callable[[], int],
) -> SystemSampler | NoSampler:
    """A sampler, or a stand-in if `interval_s` is None."""
    if interval_s is None:
        return NoSampler()
    return SystemSampler(device, interval_s, path, whole_machine=whole_machine, steps_done=steps_done)


class _Sources:
    """All sources that are sampled, and their first values."""

    def __init__(self, device: torch.device, whole_machine: bool) -> None:
        self._gpu = open_gpu(device)
        self._allocator = _allocator(device) if self._gpu is None else None
        self._family = Family()
        self._machine = HostSampler() if whole_machine else None
        self._core_wait = CoreWait()
        self._energy_j: float | None = None
        self._before: tuple[float, float] | None = None  # clock, and CPU time of the processes

    def read(self) -> SystemSample:
        gpu = self._gpu.read() if self._gpu is not None else GpuState()
        if self._allocator is not None:
            gpu.memory_bytes, gpu.memory_total_bytes = self._allocator()
        if self._energy_j is None:
            self._energy_j = gpu.energy_j
        family: FamilyState = self._family.read()
        machine = self._machine.read() if self._machine is not None else HostState()
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
            rss_grown_bytes=family.rss_grown_bytes,
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
    """Without NVML: the memory held by torch's allocator; reads its counters without a call to the device."""
    if device.type != "cuda":
        return None
    total_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    return lambda: (int(torch.cuda.memory_reserved(device)), total_bytes)
