"""Drawings are well formed, stay within their frame and escape what they are given."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frameworm.report.kit.svg import (
    HEIGHT,
    WIDTH,
    Line,
    Part,
    line_chart,
    nice_ticks,
    outlier_limit,
    stacked_bar,
    tick_label,
)

values = st.floats(-1e12, 1e12, allow_nan=False).map(lambda value: 0.0 if abs(value) < 1e-9 else value)


def shapes(drawing: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(drawing).iter(tag))


@given(values, values, st.booleans())
def test_ticks_enclose_the_values_and_rise_evenly(first: float, second: float, whole: bool) -> None:
    low, high = min(first, second), max(first, second)
    ticks = nice_ticks(low, high, whole=whole)
    slack = 1e-6 * max(abs(low), abs(high), 1e-9)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 8
    steps = [right - left for left, right in itertools.pairwise(ticks)]
    assert min(steps) > 0
    assert max(steps) == pytest.approx(min(steps), rel=1e-3)
    if whole:
        assert all(tick == round(tick) for tick in ticks)


def test_ticks_are_round_numbers() -> None:
    assert nice_ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert nice_ticks(0.3, 2.6) == [0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert nice_ticks(1, 3, whole=True) == [1, 2, 3]


def test_tick_labels_have_the_digits_they_need() -> None:
    assert [tick_label(tick, 0.25) for tick in (0, 0.25, 0.5)] == ["0", "0.25", "0.50"]
    assert [tick_label(tick, 2.5) for tick in (0, 2.5)] == ["0", "2.5"]
    assert tick_label(2000, 1000) == "2,000"
    assert tick_label(0.1 * 3, 0.1) == "0.3"
    assert tick_label(2e9, 1e9) == "2e+09"


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.none() | st.floats(allow_nan=True, width=32)), max_size=30),
    st.booleans(),
)
def test_a_chart_stays_in_its_frame(points: list[tuple[int, float | None]], dots: bool) -> None:
    ordered = sorted(((float(x), y) for x, y in points), key=lambda point: point[0])
    drawing = line_chart([Line(ordered, "curve-a", dots)], "title", "step", "loss")
    drawable = [point for point in ordered if point[1] is not None and math.isfinite(point[1])]
    assert bool(drawing) == bool(drawable)
    if drawing:
        assert "nan" not in re.sub(r"<text.*?</text>", "", drawing)
        places = [
            tuple(float(part) for part in pair.split(","))
            for line in shapes(drawing, "polyline")
            for pair in line.attrib["points"].split()
        ]
        places += [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in shapes(drawing, "circle")]
        assert places
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)


def test_gaps_split_a_curve() -> None:
    points = [(1.0, 1.0), (2.0, 2.0), (3.0, None), (4.0, math.nan), (5.0, 2.0), (6.0, 1.0), (7.0, None), (8.0, 1.0)]
    drawing = line_chart([Line(points, "curve-a")], "t", "x", "y")
    assert [len(line.attrib["points"].split()) for line in shapes(drawing, "polyline")] == [2, 2]
    assert len(shapes(drawing, "circle")) == 1


def test_higher_values_are_drawn_higher() -> None:
    drawing = line_chart([Line([(1.0, 1.0), (2.0, 5.0)], "curve-a")], "t", "x", "y")
    first, second = shapes(drawing, "polyline")[0].attrib["points"].split()
    assert float(first.split(",")[0]) < float(second.split(",")[0])
    assert float(first.split(",")[1]) > float(second.split(",")[1])


def test_values_beyond_the_limit_are_marked_at_the_edge() -> None:
    points = [(float(x), 500.0 if x == 3 else 10.0) for x in range(20)]
    limit = outlier_limit([y for _, y in points])
    assert limit == 15.0
    drawing = line_chart([Line(points, "curve-a")], "t", "x", "y", from_zero=True, y_limit=limit)
    marks = [path for path in shapes(drawing, "path") if path.attrib["class"] == "beyond"]
    assert len(marks) == 1
    assert marks[0].attrib["d"].count("z") == 1
    assert "500" not in [text.text for text in shapes(drawing, "text")]


def test_ordinary_spread_is_not_cut() -> None:
    assert outlier_limit([1.0, 1.1, 1.3] * 10) is None
    assert outlier_limit([1.0, 100.0]) is None
    assert outlier_limit([0.0] * 20 + [1.0]) is None


def test_a_bar_fills_its_width() -> None:
    drawing = stacked_bar([Part("a", 0.25, "x"), Part("b", 0.0, "x"), Part("c", 0.75, "y")], "t")
    widths = [float(shape.attrib["width"]) for shape in shapes(drawing, "rect")]
    assert widths == [WIDTH * 0.25, WIDTH * 0.75]
    assert [text.text for text in shapes(drawing, "text")] == ["25.0%", "75.0%"]


def test_a_bar_of_too_much_is_drawn_to_scale() -> None:
    drawing = stacked_bar([Part("a", 1.0, "x"), Part("b", 1.0, "y")], "t")
    assert [float(shape.attrib["width"]) for shape in shapes(drawing, "rect")] == [WIDTH / 2, WIDTH / 2]
    assert stacked_bar([], "t") == ""


def test_words_are_escaped() -> None:
    evil = '"><script>alert(1)</script>'
    drawing = line_chart([Line([(1.0, 1.0)], evil)], evil, evil, evil) + stacked_bar([Part(evil, 1.0, evil)], evil)
    assert "<script" not in drawing
    ElementTree.fromstring(f"<both>{drawing}</both>")
