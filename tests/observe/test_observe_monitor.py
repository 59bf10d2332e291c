"""The monitor's figures against numpy, its steps against injected delays, and its manners in a loop."""

from __future__ import annotations

import gc
import io
import statistics
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from frameworm.distributed import PerformanceMonitor
from frameworm.errors import DeviceError
from frameworm.observe import monitor as monitor_module
from frameworm.observe.clocks import device_timer
from frameworm.records.events import Events
from frameworm.records.schema import Batch, Finding, Remedy, RunRecord, StepRecord
from frameworm.records.writer import read_steps

KNOWN = ("data_loading_time", "forward_time", "backward_time", "optimizer_time", "communication_time", "total_time")


def test_statistics_are_numpys() -> None:
    generator = numpy.random.default_rng(0)
    values = {name: generator.lognormal(-4, 1, 500) for name in (*KNOWN, "tokenize")}
    monitor = PerformanceMonitor()
    for index in range(500):
        monitor.start_step()
        for name, column in values.items():
            monitor.record_metric(name, column[index])
        monitor.end_step()
    found = monitor.get_statistics()
    assert set(found) == set(values)
    for name, column in values.items():
        expected = {
            "mean": column.mean(),
            "std": column.std(),
            "min": column.min(),
            "max": column.max(),
            "p50": numpy.percentile(column, 50),
            "p95": numpy.percentile(column, 95),
            "p99": numpy.percentile(column, 99),
        }
        assert found[name] == pytest.approx(expected, rel=1e-9)


def test_times_of_one_name_add_up_within_a_step_only() -> None:
    monitor = PerformanceMonitor()
    monitor.record_metric("forward_time", 1.0)
    monitor.record_metric("forward_time", 3.0)
    assert monitor.get_statistics()["forward_time"]["mean"] == 2.0
    monitor.start_step()
    monitor.record_metric("forward_time", 4.0)
    monitor.record_metric("forward_time", 4.0)
    found = monitor.get_statistics()["forward_time"]
    assert (found["max"], found["mean"]) == (8.0, 4.0), "a step that is still open counts"
    monitor.start_step()
    assert monitor.get_statistics()["forward_time"]["mean"] == 4.0


def test_a_step_without_total_is_timed_by_the_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    for module in (monitor_module, device_timer):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now_s, time=time.time))
    monitor = PerformanceMonitor()
    for number in range(1, 6):
        monitor.start_step()
        now_s += 0.01
        with monitor.measure("forward_time"):
            now_s += 0.02 * number
        now_s += 0.01
    monitor.end_step()
    now_s += 0.05  # belongs to no step
    monitor.end_step()
    found = monitor.get_statistics()
    assert found["forward_time"]["p50"] == pytest.approx(0.06)
    assert found["total_time"]["mean"] == pytest.approx(0.08)
    assert found["total_time"]["min"] == pytest.approx(0.04)
    assert found["total_time"]["max"] == pytest.approx(0.12)


def test_a_measured_block_counts_even_if_it_raises() -> None:
    monitor = PerformanceMonitor()

    def fails() -> None:
        time.sleep(0.02)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), monitor.measure("forward_time"):
        fails()
    assert monitor.get_statistics()["forward_time"]["mean"] >= 0.02


def test_steps_that_stand_out_are_kept_with_their_metrics() -> None:
    monitor = PerformanceMonitor(outliers=2)
    for number in range(1, 201):
        monitor.start_step()
        slow = {50: 0.3, 120: 0.5, 180: 0.4}.get(number, 0.0)
        monitor.record_metric("data_loading_time", 0.001 + slow)
        monitor.record_metric("augment", slow / 2)
        monitor.record_metric("total_time", 0.01 + slow)
        monitor.end_step()
    found = monitor.outlier_steps()
    assert [step.step for step in found] == [120, 180]
    assert found[0].phases == {"data_wait": pytest.approx(0.501)}
    assert found[0].metrics == {"augment": 0.25}


def test_steps_are_written_per_rank_and_read_back(tmp_path: Path) -> None:
    monitor = PerformanceMonitor(tmp_path / "run", rank=3)
    for _ in range(4):
        monitor.start_step()
        monitor.record_metric("forward_time", 0.25)
        monitor.record_metric("tokenize", 0.125)
        monitor.record_metric("total_time", 0.5)
        monitor.end_step(samples=8, tokens=100, loss=1.5)
    monitor.close()
    steps = read_steps(tmp_path / "run" / "steps-rank3.jsonl")
    assert [step.step for step in steps] == [1, 2, 3, 4]
    last = steps[-1]
    assert (last.step_s, last.samples, last.tokens, last.loss) == (0.5, 8, 100, 1.5)
    assert (last.phases, last.metrics) == ({"forward": 0.25}, {"tokenize": 0.125})
    monitor.start_step()
    monitor.close()
    assert len(read_steps(tmp_path / "run" / "steps-rank3.jsonl")) == 5, "it can go on after close"
    assert monitor.lost == 0


def test_a_monitor_that_is_dropped_still_writes_its_steps(tmp_path: Path) -> None:
    monitor = PerformanceMonitor(tmp_path / "steps.jsonl")
    monitor.start_step()
    monitor.end_step()
    del monitor
    gc.collect()
    assert len(read_steps(tmp_path / "steps.jsonl")) == 1


def test_a_refusing_disk_is_noted_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "judged", lambda record: record)
    (tmp_path / "file").write_text("in the way")
    monitor = PerformanceMonitor(tmp_path / "file" / "run")
    for _ in range(3):
        monitor.start_step()
    monitor.close()
    assert monitor.lost == 3
    assert monitor.get_statistics()["total_time"]["min"] >= 0
    out = io.StringIO()
    monitor.print_summary(out)
    assert "3 step records were lost" in out.getvalue()
    assert str(tmp_path / "file" / "run") in out.getvalue()


def test_threads_can_record_at_once() -> None:
    monitor = PerformanceMonitor()
    monitor.start_step()

    def record() -> None:
        for _ in range(1000):
            monitor.record_metric("loading", 0.001)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monitor.end_step()
    assert monitor.get_statistics()["loading"]["mean"] == pytest.approx(4.0)


def test_as_a_listener_phases_become_metrics() -> None:
    monitor = PerformanceMonitor()
    events = Events([monitor])
    for number in range(1, 41):
        phases = {"data_wait": 0.1, "communication_exposed": 0.2, "validation": 0.3, "other": 0.4}
        step = StepRecord(number, 1, 0.0, 1.0, 0.5, 0.1, 8, 8.0, phases=phases, metrics={"sync_s": 0.05})
        events.on_step(step)
    run = RunRecord("run", "completed", {}, Batch(8, 1, 1, 8), verdict="healthy")
    events.on_run_end(run)
    assert events.notes == []
    means = {name: figures["mean"] for name, figures in monitor.get_statistics().items()}
    assert means == pytest.approx(
        {
            "data_loading_time": 0.1,
            "communication_time": 0.2,
            "validation_time": 0.3,
            "other_time": 0.4,
            "sync_s": 0.05,
            "total_time": 1.0,
        }
    )
    assert monitor.record() is run


def test_the_summary_shows_shares_outliers_and_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunRecord] = []

    def judge(record: RunRecord) -> RunRecord:
        seen.append(record)
        record.verdict = "input_bound"
        remedy = Remedy("data.num_workers", 4, "read with more workers")
        record.findings = [Finding("input_bound", "warning", 0.6, {"data_wait_s": 0.06}, [remedy])]
        return record

    monkeypatch.setattr(monitor_module, "judged", judge)
    monitor = PerformanceMonitor()
    for number in range(100):
        monitor.start_step()
        monitor.record_metric("data_loading_time", 0.06)
        monitor.record_metric("forward_time", 0.02)
        monitor.record_metric("total_time", 0.9 if number == 70 else 0.1)
        monitor.end_step(samples=32)
    out = io.StringIO()
    monitor.print_summary(out)
    text = out.getvalue()
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert "55.6%" in lines["data_loading_time"]
    assert "18.5%" in lines["forward_time"]
    assert "100.0%" in lines["total_time"]
    assert "step 71: 900 ms" in text
    assert "verdict: input bound" in text
    assert "read with more workers" in text
    assert "data.num_workers" not in text, "a loop of the user's own has no such setting"
    record = seen[0]
    assert record.source == "attached"
    assert record.phases["data_wait"].share == pytest.approx(0.06 / 0.108, rel=0.01)
    assert record.throughput.samples_per_s == pytest.approx(32 / 0.108, rel=0.02)
    assert "forward" not in record.unseen
    assert "backward" in record.unseen


def test_the_rules_judge_what_was_measured() -> None:
    generator = numpy.random.default_rng(0)
    monitor = PerformanceMonitor()
    for _ in range(200):
        monitor.start_step()
        parts = {"data_loading_time": 0.060, "forward_time": 0.010, "backward_time": 0.020, "optimizer_time": 0.005}
        drawn = {name: seconds * generator.normal(1, 0.02) for name, seconds in parts.items()}
        for name, seconds in drawn.items():
            monitor.record_metric(name, seconds)
        monitor.record_metric("total_time", sum(drawn.values()) + 0.001)
        monitor.end_step(samples=32)
    record = monitor.record()
    assert record.verdict == "input_bound"
    out = io.StringIO()
    monitor.print_summary(out)
    assert "verdict: input bound" in out.getvalue()
    assert "try:" in out.getvalue()


def test_before_anything_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "judged", lambda record: record)
    monitor = PerformanceMonitor()
    assert monitor.get_statistics() == {}
    out = io.StringIO()
    monitor.print_summary(out)
    assert out.getvalue() == "nothing was measured yet\n"
    assert monitor.record().throughput.samples_per_s is None


def test_a_step_costs_little() -> None:
    """Not a speed test: the cost is a share of 5 ms steps that no machine comes near unless something is wrong."""
    monitor = PerformanceMonitor()
    rounds = []
    for _ in range(7):
        began = time.thread_time()
        for _ in range(100):
            monitor.start_step()
            for name in KNOWN[:-1]:
                monitor.record_metric(name, 0.001)
        rounds.append((time.thread_time() - began) / 100)
    assert statistics.median(rounds) < 0.0005


class Device:
    """A device behind the host: events are done when the test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.passed = 0
        self.recorded = 0
        self.waits = 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            assert enable_timing

        def record(self, stream: Any = None) -> None:
            self.at = made.now_s
            made.recorded += 1
            self.number = made.recorded

        def elapsed_time(self, other: Event) -> float:
            assert max(self.number, other.number) <= made.passed, "read before the device was there"
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


def test_on_a_device_times_are_read_late_and_never_waited_for(device: Device) -> None:
    monitor = PerformanceMonitor(device="cuda")
    for number in range(20):
        monitor.start_step()
        device.now_s += 0.010
        with monitor.measure("forward_time"):
            device.now_s += 0.030
        with monitor.measure("forward_time"):
            device.now_s += 0.010
        if number == 10:
            device.passed = device.recorded  # the device has caught up
    assert device.waits == 0
    assert len(monitor._waiting) == 10
    found = monitor.get_statistics()
    assert found["forward_time"]["mean"] == pytest.approx(0.040)
    assert found["total_time"]["mean"] == pytest.approx(0.050)
    assert device.waits > 0
    monitor.end_step()
    with monitor.measure("alone"):
        device.now_s += 0.020
    assert monitor.get_statistics()["alone"]["mean"] == pytest.approx(0.020)


def test_events_are_used_again(device: Device) -> None:
    monitor = PerformanceMonitor(device="cuda")
    made: set[int] = set()
    for _ in range(200):
        monitor.start_step()
        with monitor.measure("forward_time"):
            device.now_s += 0.001
        device.passed = device.recorded
        made.update(id(event) for event in monitor._timer._free)
    assert len(made) < 10


def test_a_device_that_is_not_there_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError, match="device='cpu'"):
        PerformanceMonitor(device="cuda")
    assert device_timer.choose_observed("auto").type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_device_is_timed_by_its_own_clock() -> None:
    monitor = PerformanceMonitor(device="cuda")
    torch.cuda._sleep(1)
    for _ in range(10):
        monitor.start_step()
        with monitor.measure("forward_time"):
            torch.cuda._sleep(40_000_000)  # 20 ms and more at any clock there is
        with monitor.measure("host"):
            pass
    monitor.end_step()
    found = monitor.get_statistics()
    assert found["forward_time"]["p50"] >= 0.015
    assert found["host"]["p50"] < 0.002
    assert found["total_time"]["p50"] == pytest.approx(found["forward_time"]["p50"], rel=0.1)


def test_a_copied_loop_reads_the_start_of_a_step_and_the_values_of_its_metrics() -> None:
    monitor = PerformanceMonitor()
    assert monitor.step_start_time is None
    assert set(KNOWN) <= set(monitor.metrics)
    assert not any(monitor.metrics.values())
    for _ in range(3):
        monitor.start_step()
        assert monitor.step_start_time is not None
        time.sleep(0.02)
        monitor.record_metric("forward_time", 0.5)
        monitor.record_metric("total_time", time.time() - monitor.step_start_time)
        assert monitor.metrics["forward_time"][-1] == 0.5
    assert monitor.metrics["forward_time"] == [0.5, 0.5, 0.5]
    assert len(monitor.metrics["total_time"]) == 3
    assert 0.018 < numpy.mean(monitor.metrics["total_time"][-2:]) < 5


def test_a_value_appended_to_a_metric_is_recorded() -> None:
    monitor = PerformanceMonitor()
    monitor.metrics["forward_time"].append(2.0)
    monitor.metrics["forward_time"].append(4.0)
    assert monitor.metrics["forward_time"] == [2.0, 4.0]
    assert monitor.get_statistics()["forward_time"]["mean"] == 3.0


def test_metrics_keep_a_bounded_number_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "RECENT_VALUES", 5)
    monitor = PerformanceMonitor()
    for number in range(9):
        monitor.record_metric("x", float(number))
    assert monitor.metrics["x"] == [4, 5, 6, 7, 8]
    assert monitor.get_statistics()["x"]["mean"] == 4
