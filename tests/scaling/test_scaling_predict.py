"""Predictions: the published case, ends of intervals, break-even points, advice, and what is said not to be known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from frameworm.errors import ConfigError, NetworkModelError, RunFolderError
from frameworm.records.gradients import GradientTime, GradientTimes
from frameworm.records.observations import Bucket
from frameworm.records.schema import Batch, Communication, Phase, RunRecord
from frameworm.scaling.fabrics import FABRICS, GIGABIT, Link, LinkNetwork, find_fabric
from frameworm.scaling.predict import Change, Predictor, cheapest
from frameworm.scaling.profile import Source, from_figures, from_record, load_case, network_of
from frameworm.scaling.simulate import Setting
from frameworm.scaling.traffic import Codec

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "published"
CASE = {"compute_ms": 100, "gradient_mb": 100, "steps": 36_000, "samples": 32}


def exact(gbps: float, latency_us: float = 0.0) -> LinkNetwork:
    return LinkNetwork(Link("exact", gbps * GIGABIT, latency_us * 1e-6, (1.0, 1.0, 1.0)))


@pytest.mark.parametrize(("name", "low", "high"), [("small", 0.46, 0.46), ("optimized", 2.8, 3.2)])
def test_the_published_case_by_hand(name: str, low: float, high: float) -> None:
    source = load_case(PUBLISHED / f"ag_news_{name}.json")
    network = network_of(source)
    assert network is not None
    row = Predictor(source, network, scaling="strong").row(4)
    assert low * 0.85 <= row.speedup.value <= high * 1.15
    assert row.status == ("negative_scaling" if name == "small" else "good")
    assert row.communication_s == pytest.approx(0.045)


def test_one_rank_is_the_measured_step() -> None:
    row = Predictor(from_figures(CASE), exact(10)).row(1)
    assert row.step_s.value == pytest.approx(0.1)
    assert row.speedup.value == row.efficiency.value == 1
    assert row.exposed_s == row.straggler_s == row.sent_bytes == 0
    assert row.gpu_hours == pytest.approx(1.0)
    assert row.samples_per_s == pytest.approx(320)


def test_intervals_hold_what_they_are_of() -> None:
    source = replace(from_figures(CASE), uncertainty=0.1)
    predictor = Predictor(source, LinkNetwork(FABRICS["10gbe"]))
    for size in (2, 8, 64):
        row = predictor.row(size)
        for found in (row.step_s, row.speedup, row.efficiency):
            assert found.low < found.value < found.high
    # Where it was not seen when gradients come, the worse end hides nothing.
    sure = Predictor(replace(source, overlap_measured=True), LinkNetwork(FABRICS["10gbe"])).row(8)
    assert sure.step_s.high < predictor.row(8).step_s.high


def test_weak_scaling_adds_devices_and_strong_divides_the_batch() -> None:
    source = from_figures({**CASE, "accumulation": 4})
    fast = exact(1e6)
    assert Predictor(source, fast, scaling="weak").row(4).step_s.value == pytest.approx(0.1, rel=1e-3)
    assert Predictor(source, fast, scaling="weak").speedup(4) == pytest.approx(4, rel=1e-3)
    divided = Predictor(source, fast, scaling="strong").row(4)  # one micro-batch each
    assert divided.step_s.value == pytest.approx(0.025, rel=1e-3)
    assert divided.speedup.value == pytest.approx(4, rel=1e-3)
    half = Predictor(from_figures({**CASE, "part_of_batch": 0.5, "part_ms": 80}), fast, scaling="strong")
    assert half.row(2).step_s.value == pytest.approx(0.08, rel=1e-3)


def test_the_global_batch_of_a_run_on_several_ranks_stays() -> None:
    """Measured on 2 ranks with 16 samples each: 32 samples, which one device does as two micro-batches."""
    source = from_record(record(batch=Batch(16, 1, 2, 32), steps=100), None)
    found = Predictor(source, exact(1e6)).predict([1, 2, 4])
    assert found.scaling == "strong"
    assert [row.global_batch for row in found.rows] == [32, 32, 32]
    alone, same, _ = found.rows
    assert same.step_s.value == pytest.approx(source.profile.compute_s, rel=1e-3), "the run itself"
    assert alone.step_s.value > same.step_s.value
    weak = Predictor(source, exact(1e6), scaling="weak").predict([1, 2])
    assert [row.global_batch for row in weak.rows] == [16, 32]
    assert weak.rows[1].step_s.value == pytest.approx(same.step_s.value)
    # The run of two ranks cost that much, however it is looked at.
    assert weak.rows[1].gpu_hours == pytest.approx(same.gpu_hours) == pytest.approx(2 * 100 * 0.1 / 3600, rel=1e-3)


def test_break_even_is_where_the_efficiency_is_reached() -> None:
    source = from_figures(CASE)
    (found,) = Predictor(source, exact(1)).predict([8]).break_even
    assert found.bandwidth_factor is not None
    assert found.efficiency == 1 / 8  # eight are slower than one
    assert Predictor(source, exact(found.bandwidth_factor)).speedup(8) == pytest.approx(1, rel=1e-3)
    (fast,) = Predictor(source, exact(100)).predict([8]).break_even
    assert fast.efficiency == 0.85
    hopeless = Predictor(source, exact(10, latency_us=1e5)).predict([8]).break_even[0]
    assert hopeless.bandwidth_factor is None
    assert "no bandwidth" in hopeless.text


def test_reach_ends_where_the_efficiency_does() -> None:
    predictor = Predictor(from_figures(CASE), exact(25, latency_us=20), scaling="weak")
    found = predictor.predict([2, 4])
    for name, least in (("good", 0.7), ("fair", 0.5)):
        reached = found.reach[name]
        assert reached is not None
        assert predictor.speedup(reached) / reached >= least > predictor.speedup(2 * reached) / (2 * reached)


def test_the_cheapest_change_that_helps() -> None:
    codec = Codec(seconds_per_value={"bf16": 1e-12, "int8": 1e-12, "int4": 1e-12, "topk": 1e-12, "powersgd": 1e-12})
    slow = Predictor(from_figures(CASE), exact(1), Setting(codec=codec)).predict([8])
    assert slow.cheapest is not None
    assert slow.cheapest.knob == "parallel.compression"
    assert slow.cheapest.gain > 1.5
    assert {change.kind for change in slow.changes} == {"same", "rounds", "batch", "approximate", "money"}
    # Codecs that cost more than they save help nobody.
    dear = Codec(seconds_per_value=dict.fromkeys(("bf16", "int8", "int4", "topk", "powersgd"), 1e-6))
    found = Predictor(from_figures(CASE), exact(1), Setting(codec=dear)).predict([8]).cheapest
    assert found is not None
    assert found.kind == "batch"
    assert Predictor(from_figures(CASE), exact(1e5), scaling="weak").predict([8]).cheapest is None
    small, large = (Change("a", 1, "", gain, "same") for gain in (1.29, 1.30))
    assert cheapest([small, large]) is small


def test_cost_is_hours_of_all_devices() -> None:
    predictor = Predictor(from_figures(CASE), exact(10), price_per_hour=2.0)
    row = predictor.row(8)
    assert row.gpu_hours == pytest.approx(1 / row.efficiency.value)
    assert row.cost == pytest.approx(2 * row.gpu_hours)


def test_it_says_what_it_does_not_know() -> None:
    found = " ".join(Predictor(from_figures(CASE), exact(10), scaling="strong").predict([2]).unknown)
    for word in ("latency", "gradients are ready", "smaller batch", "memory", "compressing", "slowest rank"):
        assert word in found


def record(**more: object) -> RunRecord:
    phases = {"data_wait": 0.01, "forward": 0.03, "backward": 0.05, "optimizer": 0.01, "validation": 5.0}
    values: dict[str, object] = {
        "name": "run",
        "status": "completed",
        "environment": {},
        "batch": Batch(8, 1, 1, 8),
        "parameters": 1000,
        "device": "CPU",
        "phases": {name: Phase(mean_s, 0.1) for name, mean_s in phases.items()},
        **more,
    }
    return RunRecord(**values)  # type: ignore[arg-type]


def test_a_run_with_gradient_times() -> None:
    times = GradientTimes((GradientTime(4000, (10, 100), 0.02), GradientTime(400, (100,), 0.01)), 6, 0.025)
    source = from_record(record(), times)
    assert source.profile.compute_s == pytest.approx(0.1)
    # Twice as long as the steps that were looked at: times are stretched with it.
    assert [item.ready_s for item in source.profile.gradients] == pytest.approx([0.04, 0.02])
    assert [item.values for item in source.profile.gradients] == [1000, 100]
    assert source.overlap_measured
    assert source.on_cpu
    assert source.samples == 8


def test_runs_that_recorded_less() -> None:
    captured = GradientTimes((GradientTime(400, (100,), None), GradientTime(1200, (300,), None)), note="replayed")
    source = from_record(record(), captured)
    assert not source.overlap_measured
    assert any("replayed" in text for text in source.unknown)
    # The last layer comes first.
    assert [item.ready_s for item in source.profile.gradients] == pytest.approx([0.0375, 0.05])
    old = from_record(record(), None)
    assert old.profile.gradient_bytes == pytest.approx(4000, rel=0.05)
    assert any("older run" in text for text in old.unknown)
    buckets = Communication(buckets=[Bucket(4000, 0.02, 0.03, 0.04, 1000)])
    many = from_record(record(communication=buckets, batch=Batch(8, 1, 2, 16)), None)
    assert many.profile.gradients[0].ready_s == 0.02
    assert many.samples == 8
    with pytest.raises(RunFolderError, match="no measured step"):
        from_record(record(phases={}), None)


def test_steps_that_differ_make_ranks_wait() -> None:
    source = from_record(record(), None, [0.09, 0.1, 0.11] * 20)
    assert source.profile.compute_s == pytest.approx(0.1)
    assert Predictor(source, exact(1e6)).row(8).straggler_s > 0.005


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    assert GradientTimes.load(tmp_path) is None
    (tmp_path / "gradients.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"gradients\.json is damaged"):
        GradientTimes.load(tmp_path)
    GradientTimes((GradientTime(4, (1,), 0.5),), 3, 1.0).save(tmp_path)
    again = GradientTimes.load(tmp_path)
    assert again is not None
    assert again.measured


@pytest.mark.parametrize(
    ("figures", "word"),
    [
        ({"compute_ms": 10}, "gradient_mb"),
        ({"compute_ms": 10, "gradient_mb": 1, "gpus": 3}, "gpus"),
        ({"compute_ms": -1, "gradient_mb": 1}, "positive"),
        ({"compute_ms": "much", "gradient_mb": 1}, "numbers"),
        ({"compute_ms": 10, "gradient_mb": 1, "part_of_batch": 2, "part_ms": 3}, "part_of_batch"),
    ],
)
def test_figures_that_make_no_sense(figures: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        from_figures(figures)


def test_fabrics_have_sources_and_names() -> None:
    for wanted in ("nvlink4", "infiniband-ndr", "infiniband-hdr", "100gbe", "25gbe", "10gbe", "1gbe"):
        link = find_fabric(wanted)
        usual, worst, best = link.attained
        assert worst <= usual <= best <= 1
        assert link.source != "given"
    assert find_fabric("InfiniBand NDR").bytes_per_s == 50e9
    with pytest.raises(NetworkModelError, match="25gbe"):
        find_fabric("token ring")


def test_predictions_are_plain_data() -> None:
    found = Predictor(from_figures(CASE), exact(10)).predict([1, 4096])
    assert json.loads(json.dumps(found.to_dict()))["rows"][1]["status"] == found.rows[1].status
    with pytest.raises(ConfigError, match="world sizes"):
        Predictor(Source(from_figures(CASE).profile), exact(10)).predict([0])
