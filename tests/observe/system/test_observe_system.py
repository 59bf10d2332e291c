"""The sampler sees what is there, says None of what is not, costs little and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from frameworm.hardware.nvml import GpuState
from frameworm.observe.system import host_sources
from frameworm.observe.system import sampler as system
from frameworm.observe.system.host_sources import SETTLED_SAMPLES, Family, HostSampler
from frameworm.observe.system.sampler import NoSampler, SystemSampler, make_sampler
from frameworm.records.samples import read_samples


def descriptors() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


@pytest.fixture(autouse=True)
def _nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # A thread that gets no core for two seconds is none that hangs.
    monkeypatch.setattr(SystemSampler.stop, "__defaults__", (60.0,))
    before = descriptors()
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("frameworm-")]
    assert descriptors() <= before


def wait_until(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


@pytest.mark.slow
def test_the_process_is_seen_and_written_down(tmp_path: Path) -> None:
    path = tmp_path / "system-rank0.jsonl"
    sampler = SystemSampler("cpu", interval_s=0.05, path=path)
    with sampler:
        wait_until(lambda: len(sampler.samples()) >= 5)
    summary = sampler.summary()
    assert summary is not None
    assert summary.rss_bytes is not None
    assert summary.rss_bytes.max >= psutil.Process().memory_info().rss * 0.5
    assert summary.threads_max is not None
    assert summary.threads_max >= 2
    assert summary.cpu_process is not None
    assert summary.gpu_busy is None
    assert summary.throttled_share is None
    written = list(read_samples(path))
    assert len(written) == summary.samples
    assert all(sample.gpu_memory_bytes is None for sample in written)
    assert sampler.cost_s > 0
    assert not any("lost" in note for note in sampler.notes)


@pytest.mark.timing
def test_growing_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # In a large process on a busy machine a look takes long: without this there may be too few of them to judge by.
    monkeypatch.setattr(system, "MOST_COST_SHARE", 1.0)
    sampler = SystemSampler("cpu", interval_s=0.1)
    held: list[mmap.mmap] = []
    began = time.monotonic()
    with sampler:
        while (elapsed_s := time.monotonic() - began) < 3:
            # By the clock, so that a busy machine changes nothing; mapped, so that it is none that other tests freed.
            for _ in range(int(elapsed_s * 100) - len(held)):
                held.append(mmap.mmap(-1, 1_000_000))
                held[-1].write(b"x" * 1_000_000)
            time.sleep(0.01)
    summary = sampler.summary()
    assert summary is not None
    assert summary.rss_growth_bytes_per_s == pytest.approx(100e6, rel=0.3)
    assert summary.cpu_process is not None
    assert summary.cpu_process.max > 0


def test_helpers_that_start_in_mid_run_are_no_growth() -> None:
    """Compilers and loaders start processes that take much memory at once, and leak nothing."""
    code = "import sys\nheld = []\nfor line in sys.stdin: held.append(b'x' * 20_000_000); print(1, flush=True)"
    family = Family()
    assert family.read().rss_grown_bytes == 0
    with subprocess.Popen([sys.executable, "-uc", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        grown = []
        for _ in range(SETTLED_SAMPLES + 4):
            child.stdin.write(b"more\n")
            child.stdin.flush()
            child.stdout.readline()
            family._looks = 5  # look for children now instead of a few looks later
            grown.append(family.read().rss_grown_bytes or 0)
        child.stdin.close()
    assert abs(grown[SETTLED_SAMPLES - 1]) < 15_000_000, grown
    assert grown[-1] - grown[SETTLED_SAMPLES - 1] == pytest.approx(4 * 20e6, abs=15e6), "it goes on: that is growth"
    assert abs((family.read().rss_grown_bytes or 0) - grown[-1]) < 15_000_000, "its end is no gain"


def test_time_on_cores_is_the_systems_own_count() -> None:
    family = Family()
    before_s, own_before_s = family.read().cpu_s, time.process_time()
    while time.process_time() - own_before_s < 0.3:
        sum(range(20_000))
    after_s, own_s = family.read().cpu_s, time.process_time() - own_before_s
    assert before_s is not None
    assert after_s is not None
    assert after_s - before_s == pytest.approx(own_s, abs=0.05)


def test_children_count_and_what_they_did_stays_counted() -> None:
    family = Family()
    before = family.read()
    code = "import sys; data = bytearray(60_000_000); print(1, flush=True); sys.stdin.read(); sum(range(8_000_000))"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        family._looks = 0  # look for children now instead of a few looks later
        during = family.read()
        assert before.rss_bytes is not None
        assert during.rss_bytes is not None
        assert during.rss_bytes > before.rss_bytes + 50_000_000
        child.stdin.close()
        wait_until(lambda: family.read().cpu_s > during.cpu_s + 0.05)  # type: ignore[operator]
    after = family.read()
    assert after.rss_bytes is not None
    assert after.rss_bytes < during.rss_bytes - 40_000_000
    assert after.cpu_s is not None
    assert during.cpu_s is not None
    assert after.cpu_s >= during.cpu_s + 0.05


def test_children_that_come_and_go_between_two_looks_count_once() -> None:
    family = Family()
    before_s, own_s, children_s = family.read().cpu_s, time.process_time(), children_cpu_s()
    for number in range(8):  # some are seen while they run, most are not
        command = [sys.executable, "-c", "import time\nwhile time.process_time() < 0.15: pass"]
        with subprocess.Popen(command):
            if number % 3 == 0:
                time.sleep(0.1)
                family._looks = 5  # look for children now instead of a few looks later
                family.read()
        family.read()
    used_s = time.process_time() - own_s + children_cpu_s() - children_s
    after_s = family.read().cpu_s
    assert used_s > 8 * 0.15
    assert before_s is not None
    assert after_s is not None
    assert after_s - before_s == pytest.approx(used_s, abs=0.1)


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def times(**values: float) -> Any:
    """One core's times as psutil gives them: a tuple with names."""
    kind = type(psutil.cpu_times())
    return kind(*(values.get(name, 0.0) for name in kind._fields))


@pytest.mark.skipif(not psutil.LINUX, reason="names of Linux's core times")
def test_cores_waiting_and_network(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(
        [
            [times(idle=10), times(idle=10), times(idle=10)],
            [times(user=0.8, idle=10.2), times(system=0.2, idle=10.3, iowait=0.5), times(user=1, idle=10)],
        ]
    )
    traffic = iter([(100, 200, 7), (1100, 2200, 10_000)])

    def interfaces(pernic: bool) -> dict[str, Any]:
        sent, received, loopback = next(traffic)
        return {
            "eth0": SimpleNamespace(bytes_sent=sent, bytes_recv=received),
            "lo": SimpleNamespace(bytes_sent=loopback, bytes_recv=loopback),
        }

    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: next(looks))
    monkeypatch.setattr(psutil, "net_io_counters", interfaces)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    machine = HostSampler()
    first = machine.read()
    assert (first.cores, first.io_wait, first.network_sent_bytes) == ([], None, 0)
    second = machine.read()
    assert second.cores == pytest.approx([0.8, 0.2])
    assert second.io_wait == pytest.approx(0.25)
    assert (second.network_sent_bytes, second.network_received_bytes) == (1000, 2000)


def test_absent_sources_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **keywords: Any) -> Any:
        raise psutil.AccessDenied

    for name in ("cpu_times", "net_io_counters", "Process"):
        monkeypatch.setattr(psutil, name, fails)
    with SystemSampler("cpu", interval_s=0.05) as sampler:
        wait_until(lambda: len(sampler.samples()) >= 2)
    summary = sampler.summary()
    assert summary is not None
    assert (summary.rss_bytes, summary.cpu_busy, summary.io_wait, summary.cpu_process) == (None, None, None, None)
    assert (summary.threads_max, summary.network_sent_bytes_per_s, summary.disk_read_bytes_per_s) == (None, None, None)


class FakeGpu:
    """A GPU whose memory and energy grow with each look."""

    def __init__(self) -> None:
        self.looks = 0
        self.closed = False

    def read(self) -> GpuState:
        self.looks += 1
        reasons = ["power cap"] if self.looks % 2 else []
        return GpuState(
            busy=0.9,
            memory_bytes=1000 * self.looks,
            memory_total_bytes=10**9,
            clock_mhz=1000.0,
            clock_max_mhz=2000.0,
            power_w=300.0,
            energy_j=5000.0 + self.looks,
            throttle_reasons=reasons,
        )

    def close(self) -> None:
        self.closed = True


@pytest.mark.slow
def test_the_gpu_is_read_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(system, "open_gpu", lambda device: gpu)
    with SystemSampler("cuda", interval_s=0.05, whole_machine=False) as sampler:
        wait_until(lambda: len(sampler.samples()) >= 14)
    summary = sampler.summary()
    assert gpu.closed
    assert summary is not None
    assert summary.gpu_busy is not None
    assert summary.gpu_busy.p50 == 0.9
    assert summary.gpu_energy_j == gpu.looks - 1
    assert summary.gpu_memory_total_bytes == 10**9
    assert summary.throttled_share == pytest.approx(0.5, abs=0.05)
    assert summary.gpu_clock_share is not None
    assert summary.gpu_clock_share.mean == 0.5
    assert summary.gpu_memory_growth_bytes_per_s is not None
    assert summary.gpu_memory_growth_bytes_per_s > 0
    assert summary.cpu_busy is None, "cores belong to the machine's first rank"


def test_without_nvml_torch_tells_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "open_gpu", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 250)
    with SystemSampler("cuda", interval_s=0.05, whole_machine=False) as sampler:
        wait_until(lambda: len(sampler.samples()) >= 2)
    sample = sampler.samples()[-1]
    assert (sample.gpu_memory_bytes, sample.gpu_memory_total_bytes, sample.gpu_busy) == (250, 1000, None)


def test_costly_looks_are_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Family):
        def read(self) -> host_sources.FamilyState:
            began = time.thread_time()
            while time.thread_time() - began < 0.005:
                pass
            return super().read()

    monkeypatch.setattr(system, "Family", Slow)
    monkeypatch.setattr(system, "MOST_COST_SHARE", 0.05)
    monkeypatch.setattr(system, "EARLY_SAMPLES", 2)
    began = time.monotonic()
    with SystemSampler("cpu", interval_s=0.01, whole_machine=False) as sampler:
        wait_until(lambda: len(sampler.samples()) >= 8)
    elapsed_s = time.monotonic() - began
    assert sampler.cost_s >= 8 * 0.005
    # The last look may follow at once; all before have paid for themselves.
    assert sampler.cost_s <= 0.05 * elapsed_s + 0.03
    assert any("a sample took" in note for note in sampler.notes)


@pytest.mark.parametrize("place", ["/dev/full", "/proc/nowhere/system.jsonl"])
def test_a_disk_that_refuses_is_noted(place: str) -> None:
    if place == "/dev/full" and not Path(place).exists():
        pytest.skip("no /dev/full on this system")
    with SystemSampler("cpu", interval_s=0.05, path=place) as sampler:
        wait_until(lambda: len(sampler.samples()) >= 2)
    summary = sampler.summary()
    assert summary is not None
    assert any(f"{summary.samples} samples of the machine were lost: {place}" in note for note in sampler.notes)


def test_a_source_that_breaks_ends_the_sampler_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(HostSampler):
        def read(self) -> host_sources.HostState:
            raise ZeroDivisionError("a source gone mad")

    monkeypatch.setattr(system, "HostSampler", Broken)
    sampler = SystemSampler("cpu", interval_s=0.05)
    sampler.start()
    assert sampler.stop() is None
    assert sampler.notes == ["the machine was not watched to the end: ZeroDivisionError: a source gone mad"]


def test_a_source_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    class Hanging(HostSampler):
        def read(self) -> host_sources.HostState:
            release.wait(60)
            return super().read()

    monkeypatch.setattr(system, "HostSampler", Hanging)
    sampler = SystemSampler("cpu", interval_s=0.05)
    sampler.start()
    thread = sampler._thread
    began = time.monotonic()
    assert sampler.stop(timeout_s=0.1) is None
    assert time.monotonic() - began < 30
    release.set()
    assert thread is not None
    thread.join(60)


def test_a_short_run_has_two_looks_and_can_be_watched_again() -> None:
    sampler = SystemSampler("cpu", interval_s=60)
    for runs in (1, 2):
        sampler.start()
        sampler.start()  # once is enough
        wait_until(lambda: len(sampler.samples()) >= 2 * runs - 1)  # noqa: B023
        time.sleep(0.06)
        summary = sampler.stop()
        assert summary is not None
        assert summary.samples == 2 * runs
    assert sampler.stop() == summary


@pytest.mark.parametrize("ended", [True, False])
def test_looks_before_the_first_and_after_the_last_step_do_not_count(
    monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """Compiling and a last checkpoint take longer than many a run: the GPU's idle time in them is not the steps'."""
    done = [7]  # of the run that is resumed

    class Gpu(FakeGpu):
        def read(self) -> GpuState:
            amid = ended and 20 <= self.looks < 40
            if amid or (ended and self.looks == 40):
                done[0] += 1
            return dataclasses.replace(super().read(), busy=0.9 if amid else 0.0)

    gpu = Gpu()
    monkeypatch.setattr(system, "open_gpu", lambda device: gpu)
    monkeypatch.setattr(system, "MOST_COST_SHARE", 1.0)
    with SystemSampler("cuda", interval_s=0.002, whole_machine=False, steps_done=lambda: done[0]) as sampler:
        wait_until(lambda: gpu.looks >= 60)
    summary = sampler.summary()
    assert summary is not None
    assert summary.gpu_busy is not None
    if ended:
        assert (summary.gpu_busy.min, summary.samples) == (0.9, 20)
    else:
        assert (summary.gpu_busy.max, summary.samples) == (0.0, gpu.looks), "all are better than none"


def test_off_is_a_stand_in() -> None:
    sampler = make_sampler(None, torch.device("cpu"), None, whole_machine=True, steps_done=lambda: 0)
    assert isinstance(sampler, NoSampler)
    sampler.start()
    assert sampler.stop() is None
    assert not sampler.notes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_working_gpu_is_busy() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with SystemSampler(device, interval_s=0.2) as sampler:
        left = torch.randn(4096, 4096, device=device)
        began = time.monotonic()
        while time.monotonic() - began < 3:
            for _ in range(20):
                left = torch.nn.functional.normalize(left @ left)
            torch.cuda.synchronize()
    summary = sampler.summary()
    assert summary is not None
    assert summary.gpu_memory_bytes is not None
    try:
        import pynvml  # noqa: F401
    except ImportError:
        return
    assert summary.gpu_busy is not None
    assert summary.gpu_busy.max > 0.5
    assert summary.gpu_energy_j is None or summary.gpu_energy_j > 0
