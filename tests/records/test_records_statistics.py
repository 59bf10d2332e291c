"""Figures from steps agree with numpy and with the plain definition, whatever the number of steps."""

from __future__ import annotations

import math

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frameworm.records.schema import PHASES, Statistics, StepRecord
from frameworm.records.series import Series
from frameworm.records.statistics import RELATIVE_ERROR, Spread, StepAggregate, statistics, summarise_steps

times = st.floats(min_value=1e-6, max_value=1e4, allow_nan=False)


def make_step(
    number: int,
    step_s: float,
    phases: dict[str, float] | None = None,
    tokens: int | None = None,
    padded: int | None = None,
    samples: int = 4,
    loss: float | None = 1.0,
) -> StepRecord:
    return StepRecord(number, 1, 0.0, step_s, loss, None, samples, float(samples), tokens, padded, phases=phases or {})


def by_numpy(values: list[float]) -> Statistics:
    array = numpy.array(values)
    p50, p95, p99 = (float(value) for value in numpy.percentile(array, [50, 95, 99]))
    return Statistics(float(array.mean()), float(array.std()), float(array.min()), float(array.max()), p50, p95, p99)


@settings(deadline=None)
@given(st.lists(times, min_size=1, max_size=200))
def test_statistics_agree_with_numpy(values: list[float]) -> None:
    found = statistics(values)
    expected = by_numpy(values)
    assert found is not None
    for name in ("mean", "min", "max", "p50", "p95", "p99"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-9)
    assert found.std == pytest.approx(expected.std, rel=1e-6, abs=1e-9 * expected.max)


def test_statistics_of_nothing_and_of_one() -> None:
    assert statistics([]) is None
    assert statistics([math.nan, math.inf]) is None
    assert statistics([2.0, math.nan]) == Statistics(2.0, 0.0, 2.0, 2.0, 2.0, 2.0, 2.0)


@settings(deadline=None)
@given(st.lists(times, min_size=1, max_size=300), st.integers(0, 50))
def test_a_bounded_spread_is_within_its_promised_error(values: list[float], exact_limit: int) -> None:
    spread = Spread(exact_limit)
    for value in values:
        spread.add(value)
    found, exact = spread.statistics(), statistics(values)
    assert found is not None
    assert exact is not None
    assert spread.count == len(values)
    assert (found.min, found.max) == (exact.min, exact.max)
    assert found.mean == pytest.approx(exact.mean, rel=1e-9)
    assert found.std == pytest.approx(exact.std, rel=1e-6, abs=1e-9 * exact.max)
    for name in ("p50", "p95", "p99"):
        assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=RELATIVE_ERROR * 1.001)
    assert found.min <= found.p50 <= found.p95 <= found.p99 <= found.max


def test_a_spread_keeps_few_numbers_of_many_and_survives_bad_ones() -> None:
    spread = Spread(exact_limit=100)
    generator = numpy.random.default_rng(0)
    values = generator.lognormal(-4, 1.5, 20_000).tolist()
    for value in [*values, math.nan, math.inf]:
        spread.add(value)
    for value in (0.0, -1e-9):
        spread.add(value)
    assert spread.count == 20_002
    assert len(spread._buckets) < 2_500
    assert spread._exact is None


phase_names = st.sampled_from([*PHASES, "custom"])


@st.composite
def step_lists(draw: st.DrawFn) -> list[StepRecord]:
    steps = []
    for number in range(1, draw(st.integers(1, 40)) + 1):
        phases = draw(st.dictionaries(phase_names, st.floats(0, 1), max_size=5))
        rest = draw(st.floats(0.001, 1))
        tokens = draw(st.none() | st.integers(1, 1000))
        padding = draw(st.none() | st.integers(0, 100))
        steps.append(
            make_step(
                number,
                sum(phases.values()) + rest,
                phases,
                tokens,
                None if tokens is None or padding is None else tokens + padding,
                draw(st.integers(0, 64)),
            )
        )
    return steps


@settings(deadline=None, max_examples=50)
@given(step_lists(), st.integers(0, 10), st.integers(1, 8))
@pytest.mark.slow
def test_figures_agree_with_their_definition(steps: list[StepRecord], warmup: int, world_size: int) -> None:
    summary = summarise_steps(steps, warmup, world_size)
    measured = steps[min(warmup, len(steps) // 2) :]
    training_s = sum(step.step_s - step.phases.get("validation", 0.0) for step in measured)
    exact = statistics([step.step_s for step in measured])
    assert summary.throughput.step_s == exact
    assert exact is not None
    assert summary.throughput.samples_per_s == pytest.approx(
        world_size * sum(step.samples for step in measured) / training_s
    )
    with_tokens = [step for step in measured if step.tokens is not None]
    if with_tokens:
        seconds = sum(step.step_s - step.phases.get("validation", 0.0) for step in with_tokens)
        tokens = sum(step.tokens or 0 for step in with_tokens)
        assert summary.throughput.tokens_per_s == pytest.approx(world_size * tokens / seconds)
    else:
        assert summary.throughput.tokens_per_s is None
    with_padding = [step for step in with_tokens if step.padded_tokens is not None]
    if with_padding:
        real = sum(step.tokens or 0 for step in with_padding)
        padded = sum(step.padded_tokens or 0 for step in with_padding)
        assert summary.padding_waste == pytest.approx(1 - real / padded, abs=1e-12)
    else:
        assert summary.padding_waste is None
    phased = [step for step in measured if step.phases]
    assert bool(summary.phases) == bool(phased)
    if phased:
        assert sum(phase.mean_s for phase in summary.phases.values()) == pytest.approx(exact.mean)
        assert sum(phase.share for phase in summary.phases.values()) == pytest.approx(1)
        for name, phase in summary.phases.items():
            if name != "other":
                part = sum(step.phases.get(name, 0.0) for step in phased) / sum(step.step_s for step in phased)
                assert phase.share == pytest.approx(part, abs=1e-12)


@settings(deadline=None, max_examples=50)
@given(step_lists(), st.integers(0, 10))
@pytest.mark.slow
def test_the_aggregate_agrees_with_the_exact_summary_at_every_step(steps: list[StepRecord], warmup: int) -> None:
    aggregate = StepAggregate(warmup, exact_limit=5)
    for number, step in enumerate(steps, start=1):
        aggregate.add(step)
        exact = summarise_steps(steps[:number], warmup)
        found = aggregate.throughput()
        assert aggregate.measured_steps == number - min(warmup, number // 2)
        assert found.samples_per_s == exact.throughput.samples_per_s
        assert found.tokens_per_s == exact.throughput.tokens_per_s
        assert aggregate.phases() == exact.phases
        assert aggregate.padding_waste() == exact.padding_waste
        assert found.step_s is not None
        assert exact.throughput.step_s is not None
        assert found.step_s.p95 == pytest.approx(exact.throughput.step_s.p95, rel=RELATIVE_ERROR * 1.001)


def test_an_aggregate_of_nothing_knows_nothing() -> None:
    aggregate = StepAggregate()
    throughput = aggregate.throughput(4)
    assert (throughput.samples_per_s, throughput.tokens_per_s, throughput.step_s) == (None, None, None)
    assert aggregate.phases() == {}
    assert aggregate.padding_waste() is None
    assert aggregate.series() == []
    assert aggregate.skipped is None
    assert aggregate.measured_tokens is None


def test_warm_up_is_left_out_of_figures_but_not_of_the_series() -> None:
    aggregate = StepAggregate(warmup=2)
    for number in range(1, 11):
        aggregate.add(make_step(number, 100.0 if number <= 2 else 1.0))
    assert aggregate.measured_steps == 8
    assert aggregate.measured_s == 8.0
    assert aggregate.throughput(2).samples_per_s == 8.0
    assert aggregate.series()[0].step_s == 100.0


def test_unequal_ranks_hand_in_their_sums() -> None:
    aggregate = StepAggregate(warmup=0)
    aggregate.add(make_step(1, 2.0, tokens=10, samples=3))
    assert (aggregate.measured_samples, aggregate.measured_tokens) == (3, 10)
    throughput = aggregate.throughput(2, world_samples=8, world_tokens=30)
    assert (throughput.samples_per_s, throughput.tokens_per_s) == (4.0, 15.0)


def test_phases_beyond_the_step_stay_visible() -> None:
    summary = summarise_steps([make_step(1, 1.0, {"forward": 0.8, "backward": 0.4})], 0)
    assert summary.phases["other"].mean_s == 0.0
    assert sum(phase.share for phase in summary.phases.values()) == pytest.approx(1.2)


def test_phases_come_in_the_order_of_a_step() -> None:
    summary = summarise_steps([make_step(1, 1.0, {"mine": 0.1, "optimizer": 0.1, "data_wait": 0.1})], 0)
    assert list(summary.phases) == ["data_wait", "optimizer", "other", "mine"]


def test_skipped_steps_are_counted_only_if_known() -> None:
    aggregate = StepAggregate(warmup=0)
    for skipped in (None, True, False, True):
        step = make_step(1, 1.0)
        step.skipped = skipped
        aggregate.add(step)
    assert aggregate.skipped == 2


@settings(deadline=None)
@given(st.integers(0, 500), st.integers(3, 20))
def test_a_series_is_bounded_even_and_keeps_the_mean(count: int, limit: int) -> None:
    series = Series(limit)
    for number in range(1, count + 1):
        series.add(make_step(number, float(number), loss=float(number)))
    points = series.points()
    assert len(points) <= limit
    assert sum(point.steps for point in points) == count
    assert len({point.steps for point in points[:-1]}) <= 1
    if points:
        assert points[-1].step == count
        assert points[0].loss == pytest.approx((1 + points[0].steps) / 2)
        assert sum(point.step_s * point.steps for point in points) == pytest.approx(count * (count + 1) / 2)


def test_losses_that_are_no_numbers_are_left_out_of_a_point() -> None:
    series = Series(3)
    for number, loss in enumerate((1.0, math.nan, None, 3.0, None, math.inf), start=1):
        series.add(make_step(number, 1.0, loss=loss))
    assert [point.loss for point in series.points()] == [pytest.approx(2.0), None]
