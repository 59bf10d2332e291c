"""Scopes nest, close, add up and never wait; windows become traces that can be read."""

from __future__ import annotations

import gzip
import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from frameworm.distributed import PerformanceProfiler
from frameworm.errors import DeviceError, StateError
from frameworm.observe import profiler as profiler_module


class Clock:
    """A clock that only a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(profiler_module, "time", SimpleNamespace(perf_counter=lambda: made.now_s, time=time.time))
    return made


def scope(summary: dict[str, Any], *path: str) -> dict[str, Any]:
    """The scope at a path of names."""
    found: dict[str, Any] = {"children": summary["scopes"]}
    for name in path:
        found = next(child for child in found["children"] if child["name"] == name)
    return found


def test_scopes_nest_and_injected_delays_are_found(clock: Clock) -> None:
    profiler = PerformanceProfiler(device="cpu")
    for number in range(5):
        with profiler.profile("step"):
            with profiler.profile("forward"):
                clock.sleep(0.03 + 0.001 * number)
            with profiler.profile("backward"):
                clock.sleep(0.02)
            clock.sleep(0.04)
    summary = profiler.summary()
    step, forward = scope(summary, "step"), scope(summary, "step", "forward")
    backward = scope(summary, "step", "backward")
    assert (step["count"], forward["count"], backward["count"]) == (5, 5, 5)
    assert (forward["min_s"], forward["max_s"]) == pytest.approx((0.03, 0.034))
    assert (forward["total_s"], backward["total_s"]) == pytest.approx((0.16, 0.1))
    assert step["self_s"] == pytest.approx(5 * 0.04)
    assert step["total_s"] == pytest.approx(0.16 + 0.1 + 5 * 0.04)
    assert forward["self_s"] == forward["total_s"]
    assert forward["mean_s"] == pytest.approx(forward["total_s"] / 5)
    assert forward["device_s"] is None
    assert json.loads(json.dumps(summary)) == summary


def test_one_name_in_two_places_is_two_scopes_and_recursion_is_a_path() -> None:
    profiler = PerformanceProfiler(device="cpu")

    @profiler.profile("call")
    def call(depth: int) -> int:
        """Goes deep."""
        return 0 if depth == 0 else 1 + call(depth - 1)

    assert call(2) == 2
    with profiler.profile("other"):
        assert call(0) == 0
    assert call.__doc__ == "Goes deep."
    summary = profiler.summary()
    assert scope(summary, "call", "call", "call")["count"] == 1
    assert scope(summary, "other", "call")["count"] == 1
    assert scope(summary, "call")["count"] == 1


def test_an_exception_closes_every_scope_and_passes_through() -> None:
    profiler = PerformanceProfiler(device="cpu")
    with pytest.raises(KeyError), profiler.profile("step"), profiler.profile("forward"):
        raise KeyError("x")
    with profiler.profile("after"):
        pass
    summary = profiler.summary()
    assert scope(summary, "step", "forward")["failed"] == 1
    assert scope(summary, "step")["failed"] == 1
    assert scope(summary, "after")["failed"] == 0


def test_a_generator_that_is_left_open_does_not_swallow_what_follows() -> None:
    profiler = PerformanceProfiler(device="cpu")

    def numbers() -> Iterator[int]:
        with profiler.profile("inside"):
            yield 1

    with profiler.profile("outer"):
        left_open = numbers()
        next(left_open)
    with profiler.profile("after"):
        pass
    left_open.close()
    summary = profiler.summary()
    assert [item["name"] for item in summary["scopes"]] == ["outer", "after"]
    assert scope(summary, "outer", "inside")["count"] == 1


def test_threads_have_their_own_nesting_and_one_tree() -> None:
    profiler = PerformanceProfiler(device="cpu")
    together = threading.Barrier(3)

    def work() -> None:
        for _ in range(20):
            with profiler.profile("load"):
                together.wait(60)
                with profiler.profile("decode"):
                    pass

    threads = [threading.Thread(target=work) for _ in range(3)]
    with profiler.profile("main"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    summary = profiler.summary()
    load, decode = scope(summary, "load"), scope(summary, "load", "decode")
    assert (load["count"], decode["count"], load["threads"]) == (60, 60, 3)
    assert scope(summary, "main")["children"] == []


def test_an_open_scope_counts_for_what_it_holds() -> None:
    profiler = PerformanceProfiler(device="cpu")
    with profiler.profile("step"):
        with profiler.profile("forward"):
            time.sleep(0.02)
        step = scope(profiler.summary(), "step")
        assert (step["count"], step["mean_s"]) == (0, None)
        assert step["total_s"] >= 0.02
    profiler.reset()
    assert profiler.summary()["scopes"] == []


def test_memory_without_a_gpu_is_none() -> None:
    profiler = PerformanceProfiler(device="cpu")
    with profiler.profile("step"), profiler.profile("forward"):
        look = profiler.record_gpu_memory()
    assert look["label"] == "step/forward"
    assert (look["allocated_bytes"], look["peak_bytes"]) == (None, None)
    assert profiler.record_gpu_memory("end")["label"] == "end"
    summary = profiler.summary()
    assert (summary["memory"]["looks"], summary["memory"]["peak_bytes"]) == (2, None)


def test_looks_at_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler_module, "MOST_LOOKS", 10)
    profiler = PerformanceProfiler(device="cpu")
    for number in range(100):
        profiler.record_gpu_memory(str(number))
    memory = profiler.summary()["memory"]
    assert memory["looks"] == 100
    assert len(memory["series"]) <= 10
    assert memory["series"][0]["label"] == "0"


def test_the_table_shows_the_tree(clock: Clock) -> None:
    profiler = PerformanceProfiler(device="cpu")
    out = io.StringIO()
    profiler.print_summary(out)
    assert "no scope was closed yet" in out.getvalue()
    with profiler.profile("step"):
        with profiler.profile("small"):
            clock.sleep(0.01)
        with profiler.profile("large"):
            clock.sleep(0.02)
    out = io.StringIO()
    profiler.print_summary(out)
    lines = out.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["scope", "step", "large", "small"]
    assert lines[2].startswith("  large")
    assert "100.0%" in lines[1]


def test_windows_become_traces_with_the_scopes_in_them(tmp_path: Path) -> None:
    profiler = PerformanceProfiler(device="cpu")
    with profiler.window(tmp_path / "traces", wait=1, warmup=1, active=2, repeat=2, memory=True):
        for _ in range(9):
            with profiler.profile("forward"):
                torch.ones(64, 64) @ torch.ones(64, 64)
            profiler.step()
    profiler.step()  # no window: nothing to move
    files = profiler.summary()["traces"]
    assert [Path(file).name for file in files] == ["trace.1.pt.trace.json.gz", "trace.2.pt.trace.json.gz"]
    for file in files:
        with gzip.open(file) as stream:
            events = json.load(stream)["traceEvents"]
        names = [event.get("name") for event in events if event.get("ph") == "X"]
        assert names.count("forward") == 2, "one for each active step"
        assert "aten::matmul" in names


def test_a_second_window_gets_a_number_and_two_at_once_are_refused(tmp_path: Path) -> None:
    profiler = PerformanceProfiler(device="cpu")
    with profiler.window(tmp_path / "trace.json", wait=0, warmup=1, active=1, repeat=2):
        for _ in range(4):
            torch.ones(2).sum()
            profiler.step()
        with pytest.raises(StateError, match="open already"), profiler.window(tmp_path / "x.json"):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace-2.json", "trace.json"]
    json.loads((tmp_path / "trace-2.json").read_text())


def test_a_trace_that_cannot_be_written_is_noted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    profiler = PerformanceProfiler(device="cpu")
    with profiler.window(tmp_path / "file" / "trace.json", wait=0, warmup=1, active=1):
        for _ in range(3):
            profiler.step()
    summary = profiler.summary()
    assert summary["traces"] == []
    assert len(summary["notes"]) == 1
    assert "was lost" in summary["notes"][0]


def test_an_error_inside_a_window_passes_through_and_closes_it(tmp_path: Path) -> None:
    profiler = PerformanceProfiler(device="cpu")

    @profiler.profile("forward")
    def fails() -> None:
        profiler.step()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), profiler.window(tmp_path / "trace.json", wait=0, warmup=1, active=5):
        fails()
    with profiler.window(tmp_path / "next.json", wait=0, warmup=1, active=1):
        for _ in range(2):
            profiler.step()
    assert (tmp_path / "next.json").exists()


def test_ranges_for_nsight_are_pushed_and_popped_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    ranges = SimpleNamespace(range_push=calls.append, range_pop=lambda: calls.append("pop"))
    monkeypatch.setattr(torch.cuda, "nvtx", ranges)
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="nvtx"):
            PerformanceProfiler(nvtx=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    profiler = PerformanceProfiler(device="cpu", nvtx=True)
    with pytest.raises(KeyError), profiler.profile("step"), profiler.profile("forward"):
        raise KeyError
    with profiler.profile("after"):
        pass
    assert calls == ["step", "forward", "pop", "pop", "after", "pop"]


class Device:
    """A device that is always a little behind the host."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.recorded = 0
        self.passed = 0
        self.waits = 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self, stream: Any = None) -> None:
            made.recorded += 1
            self.at, self.number = made.now_s, made.recorded

        def elapsed_time(self, other: Event) -> float:
            assert max(self.number, other.number) <= made.passed
            return (other.at - self.at) * 1e3

        def query(self) -> bool:
            return self.number <= made.passed

        def synchronize(self) -> None:
            made.waits += 1
            made.passed = max(made.passed, self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return made


def test_device_time_is_read_late_and_no_scope_waits(device: Device) -> None:
    profiler = PerformanceProfiler(device="cuda")
    for _ in range(200):
        with profiler.profile("step"):
            device.now_s += 0.001
            with profiler.profile("forward"):
                device.now_s += 0.004
        device.passed = max(0, device.recorded - 10)
    assert device.waits == 0
    assert len(profiler._in_flight) < 2 * profiler_module.READ_AT
    summary = profiler.summary()
    assert device.waits > 0
    assert scope(summary, "step")["device_s"] == pytest.approx(200 * 0.005)
    assert scope(summary, "step")["device_self_s"] == pytest.approx(200 * 0.001)
    assert scope(summary, "step", "forward")["device_s"] == pytest.approx(200 * 0.004)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_real_device_scopes_do_not_wait_and_memory_is_seen() -> None:
    profiler = PerformanceProfiler(nvtx=True)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    for _ in range(5):
        with profiler.profile("kernel"):
            torch.cuda._sleep(40_000_000)
    assert profiler._root.children["kernel"].total_s < 0.05, "the host waited for the device"
    held = torch.zeros(2**20, device="cuda")
    with profiler.profile("memory"):
        assert profiler.record_gpu_memory()["allocated_bytes"] >= held.numel() * 4
    summary = profiler.summary()
    assert scope(summary, "kernel")["device_s"] >= 5 * 0.015
    assert scope(summary, "memory")["peak_bytes"] >= held.numel() * 4
