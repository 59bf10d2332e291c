"""Downsampling: bounded, and exact in what it keeps."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from frameworm.watch.bins import MOST_CHANNELS, Bins, joined, short, table

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)


@given(values, st.integers(2, 40), st.integers(1, 50))
def test_every_bin_has_the_mean_and_the_extremes_of_its_points(points: list[float], limit: int, most: int) -> None:
    bins = Bins(limit)
    for number, value in enumerate(points, start=1):
        bins.add(number, 0.0, {"loss": value})
    assert len(bins) <= max(limit, 2)
    shown = joined(bins.between(None, None), most)
    assert len(shown) <= most
    start = 0
    for item in shown:
        group = points[start : start + item.count]
        count, total, low, high = item.channels["loss"]
        assert (item.first, item.last, count) == (start + 1, start + item.count, len(group))
        assert math.isclose(total, math.fsum(group), rel_tol=1e-9, abs_tol=1e-6)
        assert (low, high) == (min(group), max(group))
        start += item.count
    assert start == len(points)
    # What is shown must leave what is kept as it is.
    assert sum(item.count for item in bins.between(None, None)) == len(points)


@given(values, st.integers(2, 40), st.integers(1, 50))
def test_groups_that_are_kept_are_those_made_afresh(points: list[float], limit: int, most: int) -> None:
    bins = Bins(limit)
    for number, value in enumerate(points, start=1):
        bins.add(number, float(number), {"loss": value, **({"lr": value} if number % 3 else {})})
        if number % 7 == 0 or number == len(points):
            assert table(bins.joined(most), {"loss"}) == table(joined(bins.between(None, None), most), {"loss"})


def test_a_spike_is_not_lost_among_a_million_points() -> None:
    bins = Bins(100)
    for number in range(200_000):
        bins.add(number, 0.0, {"step_s": 9.0 if number == 123_456 else 0.01})
    shown = table(joined(bins.between(None, None), 50), {"step_s"})
    assert len(shown["x"]) <= 50
    assert max(shown["channels"]["step_s"]["max"]) == 9.0
    assert "max" not in table(bins.between(None, None))["channels"]["step_s"]


def test_missing_and_infinite_values_are_gaps() -> None:
    bins = Bins()
    bins.add(1, 0.0, {"loss": 1.0})
    bins.add(2, 0.0, {"loss": math.nan, "lr": math.inf})
    bins.add(3, 0.0, {"loss": -math.inf, "lr": 0.5})
    assert table(bins.between(None, None))["channels"] == {
        "loss": {"mean": [1.0, None, None]},
        "lr": {"mean": [None, None, 0.5]},
    }


def test_the_axis_never_goes_back() -> None:
    bins = Bins()
    for x in (5, 6, 2, 7):
        bins.add(x, 0.0, {})
    assert table(bins.between(None, None))["x"] == [5, 6, 6, 7]


def test_a_part_is_what_lies_in_it() -> None:
    bins = Bins(10)
    for number in range(1, 81):
        bins.add(number, 0.0, {})
    found = bins.between(17, 40)
    assert found[0].first <= 17 <= found[0].last
    assert found[-1].first <= 40 <= found[-1].last
    assert bins.between(100, 200) == []
    assert bins.between(-5, 0) == []


def test_names_without_end_are_not_kept() -> None:
    bins = Bins(2)
    for number in range(1000):
        bins.add(number, 0.0, {f"name {number}": 1.0})
    assert all(len(item.channels) <= MOST_CHANNELS for item in bins.between(None, None))


def test_short_numbers() -> None:
    assert short(0.123456789) == 0.123457
    assert short(12345678) == 12345700.0
    assert short(math.inf) is None
