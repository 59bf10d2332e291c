"""Samples of the machine: on disk and back, thinned, summed up; and steps that stand out."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

import pytest

from frameworm.errors import RunFolderError
from frameworm.records.observations import SystemSample
from frameworm.records.outliers import SlowSteps
from frameworm.records.samples import SampleSeries, read_samples, sample_line
from frameworm.records.schema import Batch, RunRecord, StepRecord
from frameworm.records.statistics import StepAggregate
from frameworm.records.system_metrics import SystemMetrics, robust_slope
from frameworm.records.writer import JsonLinesWriter


def make_sample(number: int, rss_bytes: int | None = None) -> SystemSample:
    return SystemSample(
        time=1.0e9 + number,
        gpu_busy=0.5,
        throttle_reasons=["power cap"] if number % 4 == 0 else [],
        cpu_cores=[0.25, 0.75],
        gpu_clock_mhz=1500.0,
        gpu_clock_max_mhz=2000.0,
        rss_bytes=1000 + number if rss_bytes is None else rss_bytes,
        network_sent_bytes=100 * number,
        threads=4 + number % 3,
    )


def make_step(number: int, step_s: float, **phases: float) -> StepRecord:
    return StepRecord(number, 1, 0.0, step_s, None, None, 1, 1.0, phases=dict(phases))


def test_samples_come_back_equal_and_broken_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "system.jsonl"
    writer = JsonLinesWriter(path, encode=sample_line)
    samples = [make_sample(number) for number in range(20)]
    for sample in samples:
        writer.write(sample)
    assert writer.close()
    with path.open("a") as file:
        file.write('[1]\n{"time": "soon"}\n{"time": 5.0, "later_key": 1}\n{"time": 1.0, "gpu_b')
    assert list(read_samples(path)) == [*samples, SystemSample(time=5.0)]
    assert json.loads(path.read_text().splitlines()[0])["gpu_power_w"] is None


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"absent\.jsonl"):
        list(read_samples(tmp_path / "absent.jsonl"))


@pytest.mark.parametrize("count", [1, 9, 10, 11, 20, 21, 47, 1000])
def test_a_series_is_bounded_and_keeps_means_and_last_counters(count: int) -> None:
    series = SampleSeries(limit=10)
    samples = [make_sample(number) for number in range(count)]
    for sample in samples:
        series.add(sample)
    points = series.points()
    assert len(points) <= 10
    assert points[-1].time == samples[-1].time
    assert points[-1].network_sent_bytes == samples[-1].network_sent_bytes
    times = [point.time for point in points]
    assert times == sorted(times)
    assert all(point.cpu_cores == [0.25, 0.75] for point in points)
    # Each point is the mean of the samples since the one before.
    begin = 0
    for point in points:
        end = int(point.time - 1.0e9) + 1
        expected = statistics.mean(1000 + number for number in range(begin, end))
        assert point.rss_bytes == pytest.approx(expected, abs=1.5)
        begin = end
    assert "power cap" in {reason for point in points for reason in point.throttle_reasons}


def test_figures_of_the_machine() -> None:
    figures = SystemMetrics()
    assert figures.summary() is None
    for number in range(40):
        figures.add(make_sample(number), now=float(number))
    summary = figures.summary()
    assert summary is not None
    assert (summary.samples, summary.interval_s) == (40, 1.0)
    assert summary.gpu_busy is not None
    assert summary.gpu_busy.mean == 0.5
    assert summary.gpu_clock_share is not None
    assert summary.gpu_clock_share.p50 == 0.75
    assert summary.throttled_share == 0.25
    assert summary.throttle_reasons == ["power cap"]
    assert summary.cpu_busy is not None
    assert summary.cpu_busy.mean == 0.5
    assert summary.cpu_busiest_core is not None
    assert summary.cpu_busiest_core.mean == 0.75
    assert summary.threads_max == 6
    assert summary.network_sent_bytes_per_s == pytest.approx(100.0)
    assert summary.rss_growth_bytes_per_s == pytest.approx(1.0)
    assert (summary.gpu_power_w, summary.io_wait, summary.disk_read_bytes_per_s) == (None, None, None)
    assert summary.gpu_memory_growth_bytes_per_s is None


def test_a_summary_survives_the_run_record() -> None:
    figures = SystemMetrics()
    for number in range(8):
        figures.add(make_sample(number), now=float(number))
    record = RunRecord("r", "completed", {}, Batch(1, 1, 1, 1), system=figures.summary())
    record.slow_steps = [make_step(7, 0.5, data_wait=0.4)]
    assert RunRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_what_is_built_up_at_the_start_is_no_growth() -> None:
    figures = SystemMetrics()
    for number in range(40):
        figures.add(make_sample(number, rss_bytes=min(number, 10) * 1_000_000), now=float(number))
    summary = figures.summary()
    assert summary is not None
    assert summary.rss_growth_bytes_per_s == 0.0


def test_growth_is_not_moved_by_wild_values() -> None:
    generator = random.Random(0)
    points = [(float(t), 5.0 * t + generator.gauss(0, 3)) for t in range(100)]
    for index in range(0, 100, 5):
        points[index] = (points[index][0], 1e6)
    assert robust_slope(points) == pytest.approx(5.0, rel=0.1)
    many = [(float(t), -2.0 * t) for t in range(5_000)]
    assert robust_slope(many) == pytest.approx(-2.0)
    assert robust_slope(points[:5]) is None
    assert robust_slope([(1.0, float(n)) for n in range(9)]) is None


def test_slow_steps_are_found_kept_and_bounded() -> None:
    generator = random.Random(1)
    slow = SlowSteps(limit=3)
    wild = {5: 0.08, 100: 0.5, 150: 0.4, 151: 0.3, 222: 0.2}
    for number in range(300):
        slow.add(make_step(number, wild.get(number, 0.010 + generator.gauss(0, 0.0005)), forward=0.005))
    assert [(step.step, step.step_s) for step in slow.steps()] == [(100, 0.5), (150, 0.4), (151, 0.3)]
    assert slow.steps()[0].phases == {"forward": 0.005}


def test_the_first_steps_are_judged_once_there_are_neighbours() -> None:
    slow = SlowSteps()
    slow.add(make_step(1, 2.0))
    assert slow.steps() == []
    for number in range(2, 40):
        slow.add(make_step(number, 0.01))
    assert [step.step for step in slow.steps()] == [1]


def test_equal_steps_and_small_hiccups_do_not_stand_out() -> None:
    slow = SlowSteps()
    for number in range(200):
        slow.add(make_step(number, 0.0101 if number % 50 == 49 else 0.010))
    assert slow.steps() == []


def test_validation_makes_no_step_slow() -> None:
    slow = SlowSteps()
    for number in range(100):
        slow.add(make_step(number, 5.01, validation=5.0) if number == 60 else make_step(number, 0.01))
    assert slow.steps() == []


def test_an_aggregate_leaves_out_its_warm_up() -> None:
    aggregate = StepAggregate(warmup=5)
    for number in range(1, 101):
        aggregate.add(make_step(number, {1: 3.0, 50: 0.9}.get(number, 0.01)))
    assert [step.step for step in aggregate.slow_steps()] == [50]
