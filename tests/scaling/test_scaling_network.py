"""The network model: times between and beyond the points, fits, other world sizes, and its file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frameworm.errors import NetworkModelError
from frameworm.scaling.network import (
    COLLECTIVES,
    NetworkModel,
    NetworkPoint,
    bus_share,
    fit,
    ring_steps,
)

SIZES = tuple(256 * 4**power for power in range(9))
LATENCY_S, RATE = 2e-4, 12e6


def point(size: int, seconds: float) -> NetworkPoint:
    return NetworkPoint(size, seconds, 0.9 * seconds, 1.1 * seconds, 7)


def points(seconds: Callable[[int], float], sizes: tuple[int, ...] = SIZES) -> tuple[NetworkPoint, ...]:
    return tuple(point(size, seconds(size)) for size in sizes)


def ring(collective: str, world_size: int, step_s: float = LATENCY_S, rate: float = RATE) -> Callable[[float], float]:
    steps, share = ring_steps(collective, world_size), bus_share(collective, world_size)
    return lambda size: steps * step_s + share * size / rate


def model(world_size: int = 4) -> NetworkModel:
    measured = {name: points(ring(name, world_size)) for name in COLLECTIVES}
    return NetworkModel(measured, world_size, hosts=2, backend="gloo", environment={"torch": "2.13"})


def test_times_go_through_the_points_and_straight_between_them() -> None:
    uneven = NetworkModel({"all_reduce": (point(1000, 1.0), point(3000, 2.0), point(4000, 6.0))}, 2)
    sizes = (0, 1000, 2000, 3000, 3500, 4000, 5000)
    assert [uneven.seconds("all_reduce", size) for size in sizes] == pytest.approx([1, 1, 1.5, 2, 4, 6, 10])


def test_noise_at_the_end_does_not_make_larger_sizes_faster() -> None:
    falling = NetworkModel({"broadcast": (point(100, 1.0), point(1000, 5.0), point(2000, 4.9))}, 2)
    assert falling.seconds("broadcast", 20000) > 20
    alone = NetworkModel({"broadcast": (point(100, 1.0),)}, 2)
    assert alone.seconds("broadcast", 50) == 1.0
    assert alone.seconds("broadcast", 300) == pytest.approx(3.0)
    assert alone.fit("broadcast").bytes_per_s is None
    assert alone.summary()["broadcast"]["bus_bandwidth_gbps"] is None


@settings(deadline=None)
@given(
    latency_s=st.floats(1e-6, 1e-2),
    rate=st.floats(1e6, 1e11),
    collective=st.sampled_from(COLLECTIVES),
    world_size=st.integers(2, 64),
)
def test_a_straight_line_is_found_again(latency_s: float, rate: float, collective: str, world_size: int) -> None:
    straight = points(lambda size: latency_s + size / rate, (16, *SIZES))
    found = NetworkModel({collective: straight}, world_size)
    assert found.latency_s(collective) == pytest.approx(latency_s + 16 / rate)
    # Where latency hides the transfer, its growth is lost in the digits of the sum.
    if SIZES[-1] / rate > 1e-3 * latency_s:
        assert found.fit(collective).bytes_per_s == pytest.approx(rate, rel=1e-6)
        bus = found.bus_bytes_per_s(collective)
        assert bus == pytest.approx(rate * bus_share(collective, world_size), rel=1e-6)
        for size in (100, 10**5, 10**9):
            assert found.seconds(collective, size) == pytest.approx(latency_s + size / rate, rel=0.05)


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 10.0), min_size=2, max_size=9), st.floats(0, 1e12))
def test_any_measurement_gives_positive_times(times: list[float], size: float) -> None:
    found = NetworkModel({"all_gather": tuple(map(point, SIZES, times))}, 3)
    numbers = found.fit("all_gather")
    assert numbers.latency_s > 0
    assert numbers.bytes_per_s is None or numbers.bytes_per_s > 0
    for world_size in (2, 3, 17):
        seconds = found.seconds("all_gather", size, world_size)
        assert seconds > 0
        assert math.isfinite(seconds)


def test_what_passes_at_once_is_not_bandwidth() -> None:
    burst = points(lambda size: 1e-4 + max(0, size - 128_000) / RATE)
    assert fit(burst).bytes_per_s == pytest.approx(RATE, rel=0.02)
    assert fit(burst).latency_s == pytest.approx(1e-4)


def test_latency_from_large_messages_is_without_their_transfer() -> None:
    large = points(lambda size: 0.01 + size / RATE, (2**20, 2**22))
    assert fit(large).latency_s == pytest.approx(0.01)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("world_size", [2, 3, 8, 64])
def test_other_world_sizes_follow_the_ring(collective: str, world_size: int) -> None:
    measured, expected = model(4), ring(collective, world_size)
    for size in (SIZES[0], SIZES[-1], 10**9):
        # The smallest size carries a little too, which counts as latency.
        assert measured.seconds(collective, size, world_size) == pytest.approx(expected(size), rel=0.1)
    assert measured.seconds(collective, 10**6, 1) == 0.0


def test_ring_formulas() -> None:
    assert bus_share("all_reduce", 4) == pytest.approx(1.5)
    assert bus_share("all_gather", 4) == bus_share("all_to_all", 4) == pytest.approx(0.75)
    assert bus_share("broadcast", 4) == 1.0
    assert [ring_steps(name, 4) for name in COLLECTIVES] == [6, 3, 3, 3]
    assert all(bus_share(name, 1) == 0 == ring_steps(name, 1) for name in COLLECTIVES)


def test_the_summary_is_for_people() -> None:
    summary = model().summary()
    assert list(summary) == list(COLLECTIVES)
    for name in COLLECTIVES:
        assert summary[name]["bus_bandwidth_gbps"] == pytest.approx(RATE * 8 / 1e9, rel=0.01)
    all_reduce = summary["all_reduce"]
    assert all_reduce["bandwidth_gbps"] == pytest.approx(RATE * 8 / 1e9 / 1.5, rel=0.01)
    assert all_reduce["latency_us"] == pytest.approx(6 * LATENCY_S * 1e6, rel=0.05)


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = model()
    written.save(tmp_path / "network.json")
    assert NetworkModel.load(tmp_path / "network.json") == written
    data = json.loads((tmp_path / "network.json").read_text())
    assert data["schema_version"] == 1
    assert (data["world_size"], data["hosts"], data["backend"]) == (4, 2, "gloo")
    assert data["points"]["all_reduce"][0] == {
        "size_bytes": 256,
        "median_s": pytest.approx(6 * LATENCY_S, rel=0.05),
        "q1_s": pytest.approx(0.9 * 6 * LATENCY_S, rel=0.05),
        "q3_s": pytest.approx(1.1 * 6 * LATENCY_S, rel=0.05),
        "repetitions": 7,
        "cpu_s": None,
    }


def changed(**changes: Any) -> str:
    return json.dumps({**model().to_dict(), **changes})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "`frameworm network` writes one"),
        ("{", "not JSON"),
        ("[]", "holds no network"),
        ("{}", "schema_version is missing"),
        (changed(schema_version=2), "measure again"),
        (changed(points={"all_reduce": [{"size_bytes": 1}]}), "median_s is missing"),
        (changed(points=[1]), "malformed"),
        (changed(points={"gather": []}), "gather is not one of"),
        (changed(points={"all_reduce": []}), "sizes of all_reduce"),
        (changed(world_size=1), "2 ranks or more"),
        (changed(world_size="many"), "malformed"),
    ],
)
def test_a_bad_file_says_what_is_wrong(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "network.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(NetworkModelError, match=words) as caught:
        NetworkModel.load(path)
    assert str(path) in str(caught.value)


def test_what_was_not_measured_is_not_made_up() -> None:
    partial = NetworkModel({"all_reduce": points(ring("all_reduce", 2))}, 2)
    with pytest.raises(NetworkModelError, match="broadcast was not measured, only all_reduce"):
        partial.seconds("broadcast", 10)
    with pytest.raises(NetworkModelError, match="is not one of"):
        partial.seconds("allreduce", 10)
    for bad in ((point(8, 1.0), point(8, 1.0)), (point(8, 1.0), point(4, 1.0)), (point(8, 0.0),)):
        with pytest.raises(NetworkModelError):
            NetworkModel({"all_reduce": bad}, 2)


def test_points_sum_repetitions_up() -> None:
    summed = NetworkPoint.from_times(64, [5.0, 1.0, 2.0, 3.0, 4.0])
    assert summed == NetworkPoint(64, 3.0, 2.0, 4.0, 5)
