"""Verdicts on comparisons from the same states, from plain numbers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from frameworm.guard.agreement import (
    BIAS_ALLOWED,
    LEAST_STATES,
    ROUNDING_UNITS,
    Agreement,
    AgreementVerdict,
    Draws,
    OutputErrors,
    StateErrors,
    agreement_per_output,
    judge_agreement,
)

ROUNDING = 1e-2  # of a step in bf16, relative to the gradient
BF16 = ROUNDING_UNITS["bf16"]


def output(
    name: str = "gradient of weight",
    *,
    error: float = ROUNDING,
    shift: float = 0.0,
    size: float = 1.0,
    rounding: float = ROUNDING,
    noise: float = 0.0,
    elements: int = 1000,
) -> OutputErrors:
    """An output at one state: lengths relative to `size`."""
    return OutputErrors(name, elements, size, rounding * size, rounding * size, noise * size, error * size, shift)


def agreement(*states: Sequence[OutputErrors], unit: float = BF16) -> Agreement:
    return Agreement([StateErrors(step, outputs) for step, outputs in enumerate(states)], reference="fp64", unit=unit)


def judged(*states: Sequence[OutputErrors], unit: float = BF16) -> AgreementVerdict:
    return judge_agreement(agreement(*states, unit=unit))


SAME = [[output(), output("loss", elements=1)]] * 8


def test_errors_as_large_as_those_of_an_eager_step_agree() -> None:
    verdict = judged(*SAME)
    assert verdict.passed is True
    assert "2 outputs agree at 8 states" in verdict.detail
    assert "an fp64 reference" in verdict.detail


@pytest.mark.parametrize(("times", "passes"), [(0.1, True), (1.5, True), (2.0, True), (4.0, False), (100.0, False)])
def test_an_error_may_be_about_twice_what_rounding_explains(times: float, passes: bool) -> None:
    verdict = judged(*[[output(error=times * ROUNDING), output("loss")]] * 8)
    assert verdict.passed is passes
    assert passes or "gradient of weight is off by" in verdict.detail
    assert (verdict.outputs[0].name == "gradient of weight") == (times > 1), "the least alike comes first"


def test_the_worst_of_baseline_expected_and_noise_explains_an_error() -> None:
    for baseline, expected, noise in ((1e-1, 0.0, 0.0), (0.0, 1e-1, 0.0), (0.0, 0.0, 1e-1)):
        row = OutputErrors("gradient of weight", 1000, 1.0, baseline, expected, noise, 1.5e-1, 0.0)
        assert judged(*[[row]] * 8).passed is True
    assert judged(*[[output(error=1.5e-1)]] * 8).passed is False


def test_few_elements_leave_an_error_uncertain() -> None:
    def times(elements: int) -> float:
        return agreement_per_output(agreement(*[[output(elements=elements)]] * 8))[0].allowed

    assert times(1) > times(10) > times(100) == times(10**6) > 2


@pytest.mark.parametrize(("error", "passes"), [(2e-6, True), (5e-5, True), (3e-4, False), (1e-2, False)])
def test_kernels_of_fp32_may_differ_by_a_ten_thousandth(error: float, passes: bool) -> None:
    rows = [[output(rounding=1e-7, error=error), output("loss", rounding=1e-8, error=1e-7)]] * 8
    assert judged(*rows, unit=ROUNDING_UNITS["fp32"]).passed is passes


@pytest.mark.parametrize(
    ("flipped", "error", "passes"), [(1, 0.02, True), (2, 0.02, True), (3, 0.02, False), (1, 0.2, False)]
)
def test_a_choice_that_falls_otherwise_at_few_states_is_rounding(flipped: int, error: float, passes: bool) -> None:
    fine, off = [output(rounding=1e-6, error=1e-6)], [output(rounding=1e-6, error=error)]
    states = [fine] * (8 - flipped) + [off] * flipped
    for order in (states, states[::-1]):
        assert judged(*order, unit=ROUNDING_UNITS["fp32"]).passed is passes


def shifts(mean: float, scatter: float, count: int = 8, seed: int = 0) -> list[float]:
    """So many draws with exactly that mean and deviation."""
    draw = random.Random(seed)
    raw = [draw.gauss(0, 1) for _ in range(count)]
    middle = math.fsum(raw) / count
    deviation = math.sqrt(math.fsum((value - middle) ** 2 for value in raw) / (count - 1))
    return [mean + scatter * (value - middle) / deviation for value in raw]


@pytest.mark.parametrize(
    ("mean", "scatter", "passed"),
    [
        (0.0, 1e-4, True),
        (0.002, 1e-4, True),  # does not matter
        (0.005 * 1.1, 1e-4, False),
        (-0.02, 1e-3, False),
        (0.0, 3e-3, True),  # rounding of bf16
        (0.02, 3e-3, False),
        (0.0, 0.2, None),  # noise would hide a bias of 5%
    ],
)
def test_a_bias_must_be_shown_to_be_small(mean: float, scatter: float, passed: bool | None) -> None:
    verdict = judged(*[[output(shift=shift)] for shift in shifts(mean, scatter)])
    assert verdict.passed is passed, verdict.detail
    if passed is False:
        assert f"{abs(mean):.2%} too {'long' if mean > 0 else 'short'}" in verdict.detail


def test_outputs_whose_bias_is_vaguely_known_are_judged_together() -> None:
    """One of many stands out by chance; all of them, or one by far, do not."""
    many = [f"gradient of layers.{index}.bias" for index in range(200)]

    def states(bias: float, alone: float = 0.0) -> list[list[OutputErrors]]:
        drawn = [shifts(bias + random.Random(seed).gauss(0, 2e-3), 5e-3, seed=seed) for seed in range(len(many))]
        drawn[17] = [shift + alone for shift in drawn[17]]
        return [[output(name, shift=drawn[index][at]) for index, name in enumerate(many)] for at in range(8)]

    assert max(abs(item.bias) for item in agreement_per_output(agreement(*states(0.0)))) < BIAS_ALLOWED
    assert judged(*states(0.0)).passed is True
    assert judged(*states(0.008)).passed is False
    apart = judged(*states(0.0, alone=0.05))
    assert apart.passed is False
    assert "layers.17.bias" in apart.detail


def below(error: float, name: str = "gradient of key.bias", size: float = 1e-9) -> OutputErrors:
    """An output whose true value is a tenth of its rounding noise; `error` as a multiple of that noise."""
    noise = 10 * size
    return OutputErrors(name, 64, size, noise, noise, noise, error * noise, 5 * error)


def test_outputs_below_their_noise_do_not_pass_for_a_change() -> None:
    names = [f"gradient of convolutions.{index}.bias" for index in range(3)]
    verdict = judged(*[[output(), *(below(1.0, name) for name in names)]] * 8)
    assert verdict.passed is True, verdict.detail
    assert [item.name for item in verdict.outputs if item.below_noise] == ["3 outputs below their rounding noise"]
    assert "gradients of 1 outputs" in verdict.detail, "they are no evidence of agreement either"


def test_outputs_below_their_noise_do_not_hide_a_change() -> None:
    assert judged(*[[output(), below(30.0)]] * 8).passed is False
    assert judged(*[[output(error=0.2), below(1.0)]] * 8).passed is False


@pytest.mark.parametrize(("size", "passed"), [(1e-3, True), (0.05, True), (0.5, None), (10.0, None)])
def test_noise_that_hides_much_of_the_gradient_shows_nothing(size: float, passed: bool | None) -> None:
    verdict = judged(*[[output(), output("loss"), below(0.5, size=size)]] * 8)
    assert verdict.passed is passed, verdict.detail
    assert passed or "of the gradient" in verdict.detail


def test_where_all_is_noise_nothing_is_shown() -> None:
    verdict = judged(*[[below(1.0), below(1.0, "loss")]] * 8)
    assert verdict.passed is None
    assert "smaller than its rounding noise" in verdict.detail


def test_an_output_that_is_zero_on_both_sides_agrees() -> None:
    nothing = OutputErrors("gradient of unused", 10, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert judged(*[[output(), nothing]] * 8).passed is True
    assert judged(*[[output(), nothing._replace(candidate=1e-3)]] * 8).passed is False


def test_an_output_that_some_states_lack_is_judged_by_the_others() -> None:
    """A layer that not every batch reaches, such as an expert."""
    some = [[output(), output("gradient of expert")], [output()]] * 4
    assert judged(*some).passed is True
    wrong = [[output(), output("gradient of expert", error=0.5)], [output()]] * 4
    assert judged(*wrong).passed is False


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 5])
def test_what_is_not_finite_is_a_change(value: float, at: int) -> None:
    bad = output()._replace(candidate=abs(value), shift=value)
    states = [[output(), output("loss")] for _ in range(8)]
    states[at] = [bad, output("loss")]
    verdict = judged(*states)
    assert verdict.passed is False
    assert "gradient of weight is not finite" in verdict.detail


def test_infinities_of_both_signs_are_a_change_too() -> None:
    bad = [output()._replace(candidate=math.inf, shift=shift) for shift in (math.inf, -math.inf)]
    assert judged(*[[row] for row in bad * 4]).passed is False


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("field", ["baseline", "expected"])
def test_nothing_is_shown_by_a_baseline_that_is_not_finite(field: str, value: float) -> None:
    lost = output()._replace(**{field: value}, shift=math.nan if field == "expected" else 0.0)
    assert judged(*SAME[:7], [lost, output("loss")]).passed is None
    assert judged(*[[lost, output("loss")]] * 8).passed is None


@pytest.mark.parametrize("count", range(LEAST_STATES))
def test_few_states_show_nothing(count: int) -> None:
    verdict = judged(*SAME[:count])
    assert verdict.passed is None
    assert f"only {count} states" in verdict.detail
    wrong = judged(*[[output(error=1.0)]] * count)
    assert wrong.passed is (False if count else None), "a change is a change at any state"


def test_unequal_decisions_are_a_change_whatever_the_gradients() -> None:
    told = ["lr of weight is 0.2 instead of 0.1", "a step is now skipped"]
    verdict = judge_agreement(replace(agreement(*SAME), differences=told))
    assert verdict.passed is False
    assert verdict.detail == "lr of weight is 0.2 instead of 0.1 (and 1 more)"


@pytest.mark.parametrize(("times", "passes"), [(0.0, True), (1.0, True), (1.1, False), (math.nan, False)])
def test_updates_must_be_what_the_settings_give(times: float, passes: bool) -> None:
    verdict = judge_agreement(replace(agreement(*SAME), updates={"weight": times, "bias": 0.3}))
    assert verdict.passed is passes
    assert passes or "update of weight is not what" in verdict.detail


def with_draws(after: tuple[float, float, float], *, repeated: int = 0, repeated_before: int = 0) -> AgreementVerdict:
    draws = Draws(24, (2.0, 0.1, 0.5), after, repeated, repeated_before)
    return judge_agreement(replace(agreement(*SAME, unit=ROUNDING_UNITS["fp32"]), draws=draws))


@pytest.mark.parametrize(
    ("after", "passes"),
    [
        ((2.0, 0.1, 0.5), True),
        ((2.05, 0.12, 0.4), True),
        ((2.5, 0.1, 0.5), False),  # another mean
        ((2.0, 0.0, 0.0), False),  # no dropout
        ((2.0, 0.1, 0.2), False),  # too little of it
        ((2.0, 0.1, 1.0), False),  # too much
    ],
)
def test_random_draws_must_spread_and_mean_the_same(after: tuple[float, float, float], passes: bool) -> None:
    verdict = with_draws(after)
    assert verdict.passed is passes
    assert passes or "random draws" in verdict.detail


def test_random_draws_must_not_repeat_unless_they_did_before() -> None:
    repeated = with_draws((2.0, 0.1, 0.5), repeated=12)
    assert repeated.passed is False
    assert "repeat" in repeated.detail
    assert with_draws((2.0, 0.1, 0.5), repeated=12, repeated_before=12).passed is True


@pytest.mark.parametrize("draws", [None, Draws(24, (2.0, 0.1, 0.5), (2.1, 0.1, 0.4), 3, 1)])
def test_comparisons_survive_json(draws: Draws | None) -> None:
    measured = Agreement(
        [StateErrors(3, [output(), below(2.0)]), StateErrors(9, [output()])],
        ["a step is now skipped"],
        {"weight": 0.25},
        "fp32",
        BF16,
        1e-7,
        draws,
        changes_precision=True,
    )
    again = Agreement.from_json(json.loads(json.dumps(measured.to_json())))
    assert again == measured
    assert judge_agreement(again) == judge_agreement(measured)


def test_a_step_that_is_not_deterministic_is_named() -> None:
    assert "not deterministic" in judge_agreement(replace(agreement(*SAME), repeats=1e-6)).detail
    assert "not deterministic" not in judge_agreement(agreement(*SAME)).detail
