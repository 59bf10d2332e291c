"""What the charts of a run show, as data; their drawings are looked at in a browser elsewhere."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from frameworm.records.observations import Bucket, RankSummary, SystemSample
from frameworm.records.schema import Batch, Communication, Phase, RunRecord, Statistics, StepRecord, Throughput
from frameworm.records.series import SeriesPoint
from frameworm.report.run import charts, charts_ranks, charts_system


def make_record() -> RunRecord:
    return RunRecord(
        "name",
        "completed",
        {},
        Batch(4, 1, 2, 8),
        throughput=Throughput(step_s=Statistics(0.01, 0.0, 0.01, 0.01, 0.01, 0.01, 0.01)),
        phases={"forward": Phase(0.004, 0.4), "backward": Phase(0.006, 0.6)},
    )


def slow_step(number: int, step_s: float, **phases: float) -> StepRecord:
    return StepRecord(number, 1, 0.0, step_s, None, None, 4, 4.0, phases=phases)


def test_thinning_keeps_the_means() -> None:
    series = [SeriesPoint(step, 1, float(step), 0.01 * step, 1) for step in range(1, 1402)]
    thin = charts.thinned(series)
    assert len(thin) <= charts.MOST_POINTS
    assert thin[0] == SeriesPoint(3, 1, 2.0, pytest.approx(0.02), 3)
    assert thin[-1].step == 1401
    assert sum(point.steps for point in thin) == 1401
    assert sum(point.step_s * point.steps for point in thin) == pytest.approx(sum(point.step_s for point in series))
    assert charts.thinned(series[:600]) == series[:600]


def test_a_loss_that_is_missing_or_nan_does_not_spoil_its_neighbours() -> None:
    series = [SeriesPoint(1, 1, None, 1.0, 1), SeriesPoint(2, 1, math.nan, 1.0, 1), SeriesPoint(3, 1, 5.0, 1.0, 1)]
    assert charts.thinned(series, limit=1)[0].loss == 5.0
    assert charts.thinned(series[:2], limit=1)[0].loss is None


def test_outliers_name_the_phase_that_grew() -> None:
    record = make_record()
    record.slow_steps = [
        slow_step(9, 0.5, forward=0.0045, backward=0.006, checkpoint=0.4895),
        slow_step(3, 0.05, forward=0.025, backward=0.025),
        slow_step(5, 0.03),
    ]
    first, second, third = charts.outliers(record)
    assert (first.step, first.times_typical) == (3, pytest.approx(5.0))
    assert first.causes == "forward 25.0 ms, backward 25.0 ms"
    assert second.causes == "not divided into phases"
    assert third.causes == "checkpoint 490 ms"


def test_outliers_are_marked_on_the_timeline() -> None:
    record = make_record()
    record.slow_steps = [slow_step(7, 0.2, forward=0.2), slow_step(99, 0.2)]
    timeline = charts.step_timeline(record, [SeriesPoint(step, 1, None, 0.01, 2) for step in range(2, 42, 2)])
    assert timeline is not None
    assert [(mark.x, mark.y) for mark in timeline.marks] == [(7, pytest.approx(200))]
    assert "forward 200 ms" in timeline.marks[0].text
    assert timeline.limit is not None
    assert timeline.note == "The highest step shown took 200 ms."
    assert "forward 200 ms" in charts.timeline_chart(timeline)
    assert charts.step_timeline(record, []) is None


def test_ranks_are_stacked_in_the_order_of_a_step() -> None:
    record = make_record()
    record.ranks = [
        RankSummary(1, 0.012, {"other": 0.002, "forward": 0.01}, None, None, "b"),
        RankSummary(0, 0.012, {"communication_exposed": 0.005, "forward": 0.005, "validation": 0.0}, 0.006, 0.004, "a"),
        RankSummary(2),
    ]
    first, second = charts_ranks.rank_bars(record)
    assert (first.rank, first.host, first.wait_s) == (0, "a", 0.004)
    assert first.work_s == pytest.approx(0.005)
    assert [(part.name, part.start_s) for part in first.parts] == [("forward", 0.0), ("communication_exposed", 0.005)]
    assert [part.name for part in second.parts] == ["forward", "other"]
    assert second.wait_s is None
    boxes = list(ElementTree.fromstring(charts_ranks.rank_chart([first, second])).iter("rect"))
    assert [box.attrib["class"] for box in boxes].count("hatched") == 1
    assert charts_ranks.rank_chart([first]) == ""


def test_of_many_ranks_the_slowest_and_the_fastest_are_shown() -> None:
    record = make_record()
    record.ranks = [RankSummary(rank, 0.1, {"forward": 0.01 + 0.001 * rank}) for rank in range(100)]
    assert [bar.rank for bar in charts_ranks.rank_bars(record)] == [0, 1, 2, 3, *range(88, 100)]


def test_the_overlap_shows_what_backward_does_not_hide() -> None:
    record = make_record()
    record.communication = Communication(
        0.006, 0.002, 3, buckets=[Bucket(1, 0.001, 0.002, 0.004), Bucket(2, 0.005, 0.005, 0.008)]
    )
    data = charts_ranks.overlap(record)
    assert data is not None
    assert data.backward_s == 0.006
    assert data.end_s == 0.008
    boxes = [
        (box.attrib["class"], float(box.attrib["x"]), float(box.attrib["width"]))
        for box in ElementTree.fromstring(charts_ranks.overlap_chart(data)).iter("rect")
    ]
    assert [name for name, _, _ in boxes] == [
        "phase-backward",
        "waiting",
        "hidden-part",
        "hidden-part",
        "phase-communication_exposed",
        "hatched",
    ]
    backward, exposed = boxes[0], boxes[-1]
    assert exposed[1] == pytest.approx(backward[1] + backward[2], abs=0.02)
    assert exposed[2] / backward[2] == pytest.approx(2 / 6, abs=0.01)


def test_the_overlap_takes_the_backward_that_sends() -> None:
    record = make_record()
    record.batch.accumulation = 3
    record.communication.buckets = [Bucket(1, 0.001, 0.001, 0.0015)]
    data = charts_ranks.overlap(record)
    assert data is not None
    assert data.backward_s == pytest.approx(0.002)
    assert "hatched" not in charts_ranks.overlap_chart(data)


def test_an_overlap_that_was_not_seen_is_not_drawn() -> None:
    record = make_record()
    assert charts_ranks.overlap(record) is None
    record.communication.buckets = [Bucket(1, 0.001, 0.001, 0.002)]
    record.phases = {}
    assert charts_ranks.overlap(record) is None
    record.phases = {"backward": Phase(0.1, 1.0)}
    record.communication.buckets = [Bucket(1, 0.001, math.nan, 0.002)]
    assert charts_ranks.overlap(record) is None


def test_many_buckets_are_drawn_together() -> None:
    record = make_record()
    record.communication.buckets = [Bucket(10, 0.0001 * n, 0.0001 * n, 0.0001 * n + 0.0001) for n in range(40)]
    data = charts_ranks.overlap(record)
    assert data is not None
    assert len(data.bars) <= charts_ranks.MOST_BUCKETS
    assert (data.bars[0].label, data.bars[0].bytes, data.bars[0].end_s) == ("1-3", 30, pytest.approx(0.0003))
    assert (data.bars[-1].label, data.bars[-1].buckets) == ("40", 1)


def samples(count: int, began: float = 1000.0, **values: object) -> list[SystemSample]:
    return [SystemSample(began + index, **values) for index in range(count)]  # type: ignore[arg-type]


def test_only_what_was_sampled_is_drawn() -> None:
    found = charts_system.system_charts({0: samples(5, cpu_cores=[0.5, 1.0], rss_bytes=3 * 2**30)})
    assert [chart.title for chart in found] == ["CPU", "process memory"]
    cpu, memory = found
    assert [(curve.label, curve.points[0]) for curve in cpu.curves] == [
        ("all cores", (0.0, 75.0)),
        ("busiest core", (0.0, 100.0)),
    ]
    assert (memory.y_label, memory.curves[0].points[-1]) == ("GiB", (4.0, 3.0))
    assert charts_system.system_charts({}) == []
    assert charts_system.system_charts({0: [], 1: samples(3)}) == []


def test_each_rank_has_its_curve() -> None:
    found = charts_system.system_charts({1: samples(3, gpu_busy=0.25), 0: samples(3, gpu_busy=1.0)})
    assert [(curve.label, curve.points[0][1]) for curve in found[0].curves] == [("rank 0", 100.0), ("rank 1", 25.0)]
    assert len({curve.css_class for curve in found[0].curves}) == 2


def test_many_ranks_share_three_curves() -> None:
    found = charts_system.system_charts({rank: samples(9, gpu_power_w=100.0 + rank) for rank in range(6)})
    curves = {curve.label: {y for _, y in curve.points} for curve in found[0].curves}
    assert curves == {"mean of 6 ranks": {102.5}, "highest": {105.0}, "lowest": {100.0}}


def test_a_curve_has_few_points_however_long_the_run() -> None:
    found = charts_system.system_charts({0: samples(9_000, gpu_busy=0.5)})
    assert 250 <= len(found[0].curves[0].points) <= charts.MOST_POINTS
    assert found[0].x_unit == "min"


def test_the_pause_before_a_resume_is_left_out() -> None:
    found = charts_system.system_charts(
        {
            0: samples(10, gpu_busy=0.5) + samples(10, 90_000.0, gpu_busy=0.5),
            1: samples(10, 1000.001, gpu_busy=0.5) + samples(10, 90_000.001, gpu_busy=0.5),
        }
    )
    curve = found[0].curves[0]
    assert curve.points[-1][0] == pytest.approx(18.0, abs=0.01)
    assert [y for _, y in curve.points].count(None) == 1
    assert "Pauses of the run, 1 in number, are left out." in found[0].note


def test_long_intervals_are_no_pauses() -> None:
    sparse = [SystemSample(300.0 * index, gpu_busy=0.5) for index in range(20)]
    near = [SystemSample(300.0 * index + 0.01, gpu_busy=0.5) for index in range(20)]
    found = charts_system.system_charts({0: sparse, 1: near})
    assert found[0].note == ""
    assert found[0].curves[0].points[-1][0] == pytest.approx(95.0, abs=0.01)  # minutes
