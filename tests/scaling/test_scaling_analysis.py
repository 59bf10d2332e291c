"""Known curves come out exactly; losses add up; slow worlds are explained and helped."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path

import pytest
from stored_runs import IMDB_MODEL, store_run

from frameworm.scaling.analysis import Analysis, Measurement, Mode, Point, analyse, grade_of
from frameworm.scaling.enough_work import model_step
from frameworm.scaling.run_points import collect

SIZES = (1, 2, 4, 8, 64)


def _point(world_size: int, *epochs_s: float, mode: Mode = "strong") -> Point:
    return Point("data", world_size, tuple(Measurement(epoch_s=value) for value in epochs_s), mode=mode)


def _stepped(
    world_size: int, compute_s: float, exposed_s: float = 0.0, wait_s: float = 0.0, data_s: float = 0.0, **facts: object
) -> Point:
    phases = {"forward": compute_s / 4, "backward": compute_s * 3 / 4, "data_wait": data_s}
    run = Measurement(
        step_s=compute_s + exposed_s + data_s + float(facts.pop("rest_s", 0.0)),  # type: ignore[arg-type]
        phases=phases,
        exposed_s=exposed_s,
        rank_wait_s=wait_s,
        data_wait_s=data_s,
    )
    return Point("data", world_size, (run,), **facts)  # type: ignore[arg-type]


def test_an_ideal_curve_is_ideal() -> None:
    (curve,) = analyse([_point(size, 128.0 / size) for size in SIZES]).curves
    assert [row.speedup.value for row in curve.rows] == list(SIZES)
    assert all(row.efficiency.value == 1.0 for row in curve.rows)
    assert [row.grade for row in curve.rows] == [None, *["excellent"] * 4]
    assert curve.serial_fraction is not None
    assert curve.serial_fraction.value == 0.0
    assert all(row.losses is None or row.losses.total == 0.0 for row in curve.rows)
    assert not analyse([_point(size, 128.0 / size) for size in SIZES]).findings


@pytest.mark.parametrize("serial", [0.0, 0.05, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("least", [1, 2, 4])
def test_amdahl_gives_its_fraction_back(serial: float, least: int) -> None:
    sizes = [size for size in SIZES if size >= least]
    (curve,) = analyse([_point(size, 100 * (serial + (1 - serial) / size)) for size in sizes]).curves
    found = curve.serial_fraction
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert found.value == pytest.approx(serial, abs=1e-9)
    assert found.high - found.low == pytest.approx(0, abs=1e-6)
    for row in curve.rows[1:]:
        expected = (serial + (1 - serial) / least) / (serial + (1 - serial) / row.world_size)
        assert row.speedup.value == pytest.approx(expected, rel=1e-12)
        assert row.efficiency.value == pytest.approx(expected * least / row.world_size, rel=1e-12)
        assert row.serial_fraction == pytest.approx(serial, abs=1e-9)
    assert (least == 1) == (not any("against world size" in note for note in curve.notes))


def test_a_curve_that_falls_is_found_at_the_sizes_that_are_slower() -> None:
    (curve,) = analyse([_point(1, 100.0), _point(2, 80.0), _point(4, 125.0), _point(8, 400.0)]).curves
    assert [row.speedup.value for row in curve.rows] == [1.0, 1.25, 0.8, 0.25]
    assert [row.finding.code if row.finding else None for row in curve.rows] == [
        None,
        None,
        "negative_scaling",
        "negative_scaling",
    ]
    assert curve.rows[2].finding is not None
    assert curve.rows[2].finding.share == pytest.approx(0.2)
    assert curve.rows[3].grade == "poor"


def test_weak_scaling_counts_samples_not_steps() -> None:
    points = [
        Point("data", size, (Measurement(step_s=0.1),), mode="weak", global_batch=32 * size) for size in (1, 2, 4)
    ]
    (curve,) = analyse(points).curves
    assert [row.speedup.value for row in curve.rows] == pytest.approx([1, 2, 4])
    slower = Point("data", 8, (Measurement(step_s=0.2),), mode="weak", global_batch=256)
    row = analyse([*points, slower]).curves[0].row(8)
    assert row is not None
    assert row.efficiency.value == pytest.approx(0.5)


def test_epochs_of_unequal_length_are_compared_per_sample() -> None:
    short = Point("data", 1, (Measurement(epoch_s=10.0, epoch_samples=1000.0),))
    long = Point("data", 2, (Measurement(epoch_s=10.0, epoch_samples=2000.0),))
    assert analyse([short, long]).curves[0].rows[1].speedup.value == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("efficiency", "word"),
    [(0.85, "excellent"), (0.8499, "good"), (0.7, "good"), (0.69, "fair"), (0.5, "fair"), (0.49, "poor"), (0, "poor")],
)
def test_classes_of_the_contract(efficiency: float, word: str) -> None:
    assert grade_of(efficiency) == word


def test_one_run_has_no_interval_and_repeats_have_one() -> None:
    row = analyse([_point(1, 100.0), _point(2, 50.0, 51.0)]).curves[0].rows[1]
    assert (row.speedup.low, row.efficiency.high) == (None, None)
    row = analyse([_point(1, 100.0, 102.0), _point(2, 50.0, 51.0)]).curves[0].rows[1]
    assert row.speedup.low is not None
    assert row.speedup.high is not None
    assert row.speedup.low < row.speedup.value < row.speedup.high
    assert row.efficiency.low == pytest.approx(row.speedup.low / 2)


@pytest.mark.parametrize(("values", "margin"), [((1.0, 3.0), 12.706), ((1.0, 2.0, 3.0), 4.303 / math.sqrt(3))])
def test_the_interval_of_a_mean_is_students(values: tuple[float, ...], margin: float) -> None:
    found = Point("data", 1, tuple(Measurement(val_loss=value) for value in values)).interval("val_loss")
    assert found is not None
    assert (found.low, found.value, found.high) == pytest.approx((2 - margin, 2, 2 + margin))


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    generator = random.Random(7)
    trials, held, serial_held = 400, 0, 0
    for _ in range(trials):
        times = {size: 100 * (0.2 + 0.8 / size) for size in (1, 4)}
        noisy = [_point(size, *(value * generator.gauss(1, 0.02) for _ in range(5))) for size, value in times.items()]
        (curve,) = analyse(noisy).curves
        speedup, serial = curve.rows[1].speedup, curve.serial_fraction
        assert speedup.low is not None
        assert speedup.high is not None
        assert serial is not None
        assert serial.low is not None
        assert serial.high is not None
        held += speedup.low <= times[1] / times[4] <= speedup.high
        serial_held += serial.low <= 0.2 <= serial.high
    assert 0.91 < held / trials < 0.99
    assert 0.91 < serial_held / trials < 0.995


def test_losses_name_each_cause_and_add_up() -> None:
    base = _stepped(1, 0.100, data_s=0.004, global_batch=64)
    point = _stepped(4, 0.035, 0.020, 0.008, 0.003, rest_s=0.002, global_batch=64)
    row = analyse([base, point]).curves[0].rows[1]
    losses = row.losses
    assert losses is not None
    step = 0.060
    assert losses.communication == pytest.approx(0.012 / step)
    assert losses.stragglers == pytest.approx(0.008 / step)
    assert losses.input == pytest.approx(0.002 / step)
    assert losses.smaller_batch == pytest.approx(0.010 / step)
    assert losses.other == pytest.approx(0.002 / step)
    assert losses.total == pytest.approx(1 - row.efficiency.value)
    assert row.limit == "exposed communication"


@pytest.mark.parametrize("seed", range(50))
def test_losses_always_add_up(seed: int) -> None:
    generator = random.Random(seed)

    def some(world_size: int) -> Point:
        exposed = generator.uniform(0, 0.05) * (world_size > 1)
        return _stepped(
            world_size,
            generator.uniform(0.01, 0.1),
            exposed,
            exposed * generator.random(),
            generator.uniform(0, 0.03),
            rest_s=generator.uniform(0, 0.02),
            global_batch=64,
        )

    row = analyse([some(generator.choice([1, 2])), some(generator.choice([4, 8]))]).curves[0].rows[1]
    assert row.losses is not None
    parts = list(row.losses.parts.values())
    assert math.fsum(part for part in parts if part is not None) == pytest.approx(1 - row.efficiency.value, abs=1e-12)
    assert None not in parts


def test_what_nobody_measured_is_unknown_and_stays_in_other() -> None:
    row = analyse([_point(1, 100.0), _point(4, 50.0)]).curves[0].rows[1]
    assert row.losses is not None
    assert row.losses.parts == {
        "communication": None,
        "stragglers": None,
        "input": None,
        "smaller_batch": None,
        "other": 0.5,
    }


def test_more_than_linear_is_doubted() -> None:
    (curve,) = analyse([_point(1, 100.0), _point(2, 30.0)]).curves
    assert curve.rows[1].limit is None
    assert any("more than linear" in note for note in curve.notes)


def test_a_process_that_had_all_cores_leaves_none_for_a_second_one() -> None:
    base = _stepped(1, 0.040, global_batch=64, cpus=2, threads=2)
    point = _stepped(2, 0.042, 0.003, global_batch=64, cpus=2, threads=1)
    analysis = analyse([base, point])
    (finding,) = analysis.findings
    assert "already computed on 2 cores" in finding.evidence["cause"]
    losses = analysis.curves[0].rows[1].losses
    assert losses is not None
    assert losses.smaller_batch == 0.0
    own = dataclasses.replace(point, threads=2)  # each with as many as the base: then it is the batch
    assert "already computed" not in analyse([base, own]).findings[0].evidence["cause"]


@pytest.mark.parametrize(
    ("compute_ms", "launches", "remedied"),
    [(8.0, True, True), (8.0, False, False), (2.4, True, False), (80.0, True, False)],
)
def test_short_steps_that_wait_for_launches_are_to_be_captured(
    compute_ms: float, launches: bool, remedied: bool
) -> None:
    """9 ms for 32 samples on one GPU, and nearly as long for the 8 that each of four has: the host is what takes it."""
    scale = 10 if compute_ms > 50 else 1
    base = _stepped(1, 0.009 * scale, global_batch=32, launches_steps=launches)
    point = _stepped(4, compute_ms / 1e3, 0.007 * scale, global_batch=32, launches_steps=launches)
    (finding,) = analyse([base, point]).findings
    captured = [remedy for remedy in finding.remedies if remedy.knob == "gpu.capture"]
    assert bool(captured) == remedied
    for remedy in captured:
        assert remedy.value == "step"
        assert "8 samples compute for 8 ms where a fair share of the larger batch takes 2.25 ms" in remedy.text


def test_a_speedup_that_stays_poor_has_a_cause_too() -> None:
    base = _stepped(1, 0.040, global_batch=64, cpus=2, threads=2)
    point = _stepped(2, 0.030, 0.003, global_batch=64, cpus=2, threads=1)
    row = analyse([base, point]).curves[0].rows[1]
    assert row.finding is None
    assert "already computed on 2 cores" in (row.cause or "")
    late = _stepped(4, 0.010, data_s=0.020, global_batch=512)
    row = analyse([_stepped(1, 0.040, global_batch=512), late]).curves[0].rows[1]
    assert "batches come too late" in (row.cause or "")
    fine = _stepped(4, 0.010, 0.0005, global_batch=512)
    assert analyse([_stepped(1, 0.040, global_batch=512), fine]).curves[0].rows[1].cause is None


def test_weak_scaling_on_shared_cores_names_them() -> None:
    base = _stepped(1, 0.020, global_batch=32, mode="weak", cpus=2, threads=2)
    point = _stepped(2, 0.034, 0.001, global_batch=64, mode="weak", cpus=2, threads=1)
    row = analyse([base, point]).curves[0].rows[1]
    assert "they share 2 cores" in (row.cause or "")


def test_more_processes_than_cores_are_noted() -> None:
    points = [_stepped(size, 0.040, global_batch=64, cpus=2, threads=1) for size in (1, 2, 4)]
    (note,) = [note for note in analyse(points).curves[0].notes if "cores" in note]
    assert note.startswith("4 processes share 2 cores")
    roomy = [_stepped(size, 0.040, global_batch=64, cpus=8, threads=1) for size in (1, 2, 4)]
    assert not [note for note in analyse(roomy).curves[0].notes if "cores" in note]


def test_processes_that_share_cores_are_not_promised_speed() -> None:
    base = _stepped(1, 0.005, global_batch=32)
    point = _stepped(2, 0.010, 0.002, global_batch=32, cpus=2)
    (finding,) = analyse([base, point]).findings
    assert "shared_device" in finding.evidence["causes"]
    assert "share 2 cores" in finding.evidence["cause"]
    assert finding.evidence["changed"] is None
    assert finding.expected_speedup is None


def test_input_and_stragglers_are_named_when_they_are_the_cause() -> None:
    base = _stepped(1, 0.040, global_batch=512)
    late = _stepped(4, 0.010, data_s=0.045, global_batch=512)
    (finding,) = analyse([base, late]).findings
    assert finding.evidence["causes"] == ["input"]
    waiting = _stepped(4, 0.010, 0.045, 0.045, global_batch=512)
    (finding,) = analyse([base, waiting]).findings
    assert finding.evidence["causes"] == ["stragglers"]


def test_large_gradients_on_a_slow_network_are_no_small_model() -> None:
    base = _stepped(1, 0.1, global_batch=64, parameters=124_000_000)
    point = _stepped(4, 0.025, 4.0, global_batch=64, parameters=124_000_000, sequence_length=1024)
    (finding,) = analyse([base, point]).findings
    assert "slow_network" in finding.evidence["causes"]
    assert not {"model_too_small", "sequences_too_short"} & set(finding.evidence["causes"])
    assert finding.evidence["bus_bytes_per_s"] == pytest.approx(1.5 * 4 * 124e6 / 4.0)


def test_the_model_of_a_step_reproduces_what_it_was_made_from() -> None:
    base = _stepped(1, 0.025, rest_s=0.001, global_batch=32)
    point = _stepped(4, 0.008, 0.045, rest_s=0.002, global_batch=32)
    speedup = 0.026 / 0.055
    model = model_step(base, point, speedup)
    assert model.step_after() == pytest.approx(0.055)
    assert model.efficiency() == pytest.approx(speedup / 4)
    efficiencies = [model.efficiency(factor) for factor in (1, 2, 4, 8, 1024)]
    assert efficiencies == sorted(efficiencies)
    assert efficiencies[-1] <= 1.0
    assert model.efficiency(4, hidden=0.5) >= model.efficiency(4)


def _published(tmp_path: Path) -> Analysis:
    """3.49 times as fast on four GPUs, and 0.46 times."""
    imdb = {"dataset": "imdb", "model": IMDB_MODEL, "samples": 25_000, "parameters": 11_000_000}
    store_run(tmp_path / "imdb1", epoch_s=349.0, name="imdb_single_gpu", **imdb)  # type: ignore[arg-type]
    store_run(tmp_path / "imdb4", epoch_s=100.0, world_size=4, name="imdb_ddp_4gpu", **imdb)  # type: ignore[arg-type]
    step_s = 0.025
    epoch_s = 120_000 / 32 * step_s
    store_run(tmp_path / "ag1", epoch_s=epoch_s, compute_s=step_s)
    store_run(
        tmp_path / "ag4",
        epoch_s=epoch_s / 0.46,
        world_size=4,
        name="ag_news_ddp_4gpu_20ep",
        compute_s=0.008,
        exposed_s=step_s / 0.46 - 0.008,
    )
    return analyse(collect(tmp_path).points)


def test_the_published_cases(tmp_path: Path) -> None:
    analysis = _published(tmp_path)
    bad, good = analysis.curves
    assert (good.dataset, bad.dataset) == ("imdb", "ag_news")
    assert good.rows[1].efficiency.value == pytest.approx(0.873, abs=5e-4)
    assert good.rows[1].grade == "excellent"
    assert good.rows[1].finding is None
    row = bad.rows[1]
    assert row.efficiency.value == pytest.approx(0.115)
    assert row.grade == "poor"
    finding = row.finding
    assert finding is not None
    assert finding.code == "negative_scaling"
    assert finding.severity == "critical"
    assert finding.evidence["causes"] == ["model_too_small", "batch_too_small", "sequences_too_short"]
    words = finding.evidence["cause"]
    for piece in ("4.2 M parameters", "8 samples of 32", "128 tokens", "16.8 MB of gradients", "Amdahl"):
        assert piece in words, words
    change = row.change
    assert change is not None
    assert change.basis == "modelled"
    assert change.settings["training.global_batch"] > 32
    assert change.speedup > 2
    assert change.efficiency >= 0.7
    assert finding.expected_speedup is not None
    assert finding.expected_speedup.value > 1
    assert finding.remedies[0].knob == "training.global_batch"
    # The larger twin that ships: 256 wide, 4 layers, batch 128; published at 2.8 to 3.2 times on four.
    assert any(remedy.knob == "model.d_model" and remedy.value == 256 for remedy in finding.remedies)


def test_the_analysis_is_plain_data(tmp_path: Path) -> None:
    data = json.loads(json.dumps(_published(tmp_path).to_dict(), allow_nan=False))
    assert data["curves"][0]["rows"][1]["finding"]["code"] == "negative_scaling"
    assert data["curves"][1]["rows"][1]["speedup"]["low"] is None


def test_points_without_a_common_clock_are_refused() -> None:
    with pytest.raises(ValueError, match="no measure of speed"):
        analyse([_point(1, 10.0), Point("data", 2, (Measurement(samples_per_s=5.0),))])
    with pytest.raises(ValueError, match="at least one run"):
        analyse([Point("data", 2, ())])
    assert analyse([]).curves == ()
