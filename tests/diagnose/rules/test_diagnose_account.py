"""Shares and their errors: right for steps that are correlated, and bounded however long the run."""

from __future__ import annotations

import random

import pytest
from planted_facts import COMPUTE, make_steps

from frameworm.diagnose.rules.cost import SHARES, expected_speedup, severity_of, undecided
from frameworm.records.account import BIN_LIMIT, StepAccount
from frameworm.records.estimate import Estimate, quantile, ratio, trend
from frameworm.records.statistics import summarise_steps


@pytest.mark.parametrize("count", [20, 63, 64, 65, 200, 5000])
def test_shares_are_those_of_the_summary(count: int) -> None:
    steps = make_steps({**COMPUTE, "data_wait": 0.01}, count=count, every={"validation": (7, 0.2)})
    sums = StepAccount().extend(steps).sums()
    assert sums.steps == count - 5
    expected = summarise_steps(steps).phases
    shares = sums.phases()
    assert set(shares) == set(expected)
    for name, share in shares.items():
        assert share.value == pytest.approx(expected[name].share, abs=1e-9)
    assert len(sums.batches()) <= 20
    assert sum(batch.steps for batch in sums.batches()) == sums.steps
    assert len(sums._bins) < BIN_LIMIT


def test_steps_that_were_not_divided_count_as_the_others() -> None:
    steps = make_steps(count=80, noise=0.0)
    for step in steps[::2]:
        step.phases = {}
    shares = StepAccount().extend(steps).sums().phases()
    assert shares["forward"].value == pytest.approx(COMPUTE["forward"] / sum(COMPUTE.values()))


def test_the_warm_up_is_left_out_but_never_more_than_half() -> None:
    steps = make_steps(count=6)
    steps[0].step_s = 100.0
    assert StepAccount().extend(steps).sums().steps == 3
    assert StepAccount().extend(make_steps(count=100)).sums().steps == 95
    assert StepAccount().sums().steps == 0
    assert StepAccount().sums().phases() == {}


def _correlated(seed: int, count: int = 400, memory: float = 0.9) -> list[float]:
    draw = random.Random(seed)
    value, values = 0.0, []
    for _ in range(count):
        value = memory * value + draw.gauss(0, 1)
        values.append(value)
    return values


def test_intervals_hold_for_steps_that_resemble_their_neighbours() -> None:
    """With an error made from single steps, two of three intervals would miss the true share."""
    true_share = 0.01 / 0.03
    covered = naive = 0
    for seed in range(60):
        steps = make_steps({"data_wait": 0.01, "forward": 0.02}, count=405, noise=0.0)
        for step, change in zip(steps[5:], _correlated(seed)):
            step.phases["data_wait"] = max(0.01 + 0.001 * change, 0.0)
            step.step_s = sum(step.phases.values())
        share = StepAccount().extend(steps).sums().phases()["data_wait"]
        covered += share.low <= true_share <= share.high
        single = ratio([step.phases["data_wait"] for step in steps[5:]], [step.step_s for step in steps[5:]])
        assert single is not None
        naive += single.low <= true_share <= single.high
    assert covered >= 48
    assert naive < covered


def test_rare_phases_do_not_blur_the_others() -> None:
    steps = make_steps({**COMPUTE, "data_wait": 0.01}, every={"validation": (50, 1.0), "checkpoint": (20, 0.5)})
    shares = StepAccount().extend(steps).sums().phases()
    assert shares["data_wait"].margin < 0.1 * shares["data_wait"].value
    assert shares["checkpoint"].margin < 0.1 * shares["checkpoint"].value  # all alike
    assert shares["validation"].margin > 0.5 * shares["validation"].value  # seen twice


def test_drift_is_relative_to_the_mean() -> None:
    found = trend([1.0, 1.1, 1.2, 1.3, 1.4])
    assert found is not None
    assert found.value == pytest.approx(0.4 / 1.2)
    assert found.error == pytest.approx(0.0, abs=1e-12)
    assert trend([1.0, 1.0, 1.0]) is None


def test_counts_are_per_step() -> None:
    steps = make_steps(metrics={"syncs": 3.0, "sync_s": 0.001})
    sums = StepAccount().extend(steps).sums()
    assert sums.counts() == {"syncs": pytest.approx(3.0)}
    assert set(sums.metrics()) == {"sync_s"}


@pytest.mark.parametrize(("freedom", "value"), [(3, 3.182), (7, 2.365), (19, 2.093), (None, 1.96)])
def test_student(freedom: int | None, value: float) -> None:
    assert quantile(freedom) == pytest.approx(value, rel=0.01)


def test_one_batch_knows_no_error() -> None:
    assert ratio([1.0], [2.0]) is None
    assert ratio([1.0, 1.0], [0.0, 0.0]) is None
    assert ratio([1.0, 2.0], [2.0, 4.0]) == Estimate(0.5, 0.0, 1)


@pytest.mark.parametrize(
    ("value", "error", "severity"),
    [
        (0.01, 0.0, None),
        (0.05, 0.0, "info"),
        (0.1, 0.0, "warning"),
        (0.4, 0.0, "critical"),
        (0.4, 0.2, None),
        (0.4, 0.1, "warning"),
    ],
)
def test_severity_follows_the_lower_bound(value: float, error: float, severity: str | None) -> None:
    assert severity_of(Estimate(value, error)) == severity
    assert undecided(Estimate(value, error)) == (value == 0.40 and error == 0.2)


def test_thresholds_are_gains() -> None:
    assert {name: 1 / (1 - share) for name, share in SHARES.items()} == pytest.approx(
        {"info": 1.02, "warning": 1.1, "critical": 1.5}
    )
    expected = expected_speedup(Estimate(SHARES["critical"], 0.0))
    assert expected is not None
    assert expected.value == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("share", "removable", "told"),
    [
        (Estimate(0.3, 0.02), 1.0, True),
        (Estimate(0.8, 0.01), 1.0, True),  # 1.7 to 5.6 times
        (Estimate(0.93, 0.02), 1.0, False),  # 1.8 to 33 times
        (Estimate(0.93, 0.02), 0.5, True),
        (Estimate(0.5, 0.19), 1.0, False),  # may be 1.07 or 8 times
        (Estimate(0.095, 0.0), 1.0, False),  # 1.0499 at worst
        (Estimate(0.3, 0.12), 1.0, False),
        (Estimate(1.0, 0.0), 1.0, False),
    ],
)
def test_an_estimate_that_is_too_wide_is_no_figure(share: Estimate, removable: float, told: bool) -> None:
    expected = expected_speedup(share, removable)
    assert (expected is not None) == told
    if expected is not None:
        assert expected.low >= 1.05
        assert expected.high <= 4 * expected.low
