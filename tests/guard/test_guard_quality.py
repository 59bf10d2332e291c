"""The longer check's statistics, over simulated seeds."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from frameworm.guard.quality import Quality, SeedEnd, judge_quality

LOOKS = (4, 8, 12)
SPREAD = 0.01


def trainings(seed: int, worse: float, alike: float = 0.0, wrong: float = 0.0) -> tuple[list[SeedEnd], list[SeedEnd]]:
    """Both sides of twelve seeds: losses about 0.5 from 2.0, accuracies about 0.8; `alike` is what pairs share."""
    draw = random.Random(seed)
    sides: tuple[list[SeedEnd], list[SeedEnd]] = ([], [])
    for _ in range(LOOKS[-1]):
        common = draw.gauss(0, math.sqrt(alike))
        for side, harm, errors in zip(sides, (0.0, worse), (0.0, wrong)):
            luck = SPREAD * (common + draw.gauss(0, math.sqrt(1 - alike)))
            side.append(SeedEnd(2.0, 0.5 + luck + harm, 0.8 - luck - errors + draw.gauss(0, 0.002), 6400))
    return sides


def verdict_of(sides: tuple[Sequence[SeedEnd], Sequence[SeedEnd]]) -> bool | None:
    """As the tuner asks: after each look, until there is an answer."""
    for look in LOOKS:
        judged = judge_quality(Quality(sides[0][:look], sides[1][:look], 100))
        if not judged.open:
            break
    return judged.passed


def accepted(tries: int = 200, **how: float) -> float:
    return sum(verdict_of(trainings(seed, **how)) is True for seed in range(tries)) / tries


@pytest.mark.parametrize("alike", [0.0, 0.9])
def test_a_change_that_does_nothing_passes_usually(alike: float) -> None:
    assert accepted(worse=0.0, alike=alike) >= 0.9


@pytest.mark.parametrize("alike", [0.0, 0.9])
def test_a_change_that_harms_does_not_pass(alike: float) -> None:
    margin = 2 * SPREAD
    assert accepted(worse=margin, alike=alike) <= 0.4
    assert accepted(worse=1.5 * margin, alike=alike) <= 0.05
    assert accepted(worse=2 * margin, alike=alike) <= 0.005
    far = [verdict_of(trainings(seed, worse=4 * margin, alike=alike)) for seed in range(50)]
    assert far == [False] * 50


def test_wrong_answers_count_beside_the_loss() -> None:
    assert accepted(worse=0.0, wrong=4 * SPREAD) <= 0.005
    without = [[SeedEnd(end.start_loss, end.loss) for end in side] for side in trainings(0, 0.0)]
    judged = judge_quality(Quality(*without, steps=100))
    assert judged.passed
    assert "accuracy" not in judged.detail


def test_better_is_not_worse_and_is_told_so() -> None:
    before, after = trainings(0, worse=-0.1)
    judged = judge_quality(Quality(before, after, 100))
    assert judged.passed
    assert "validation loss 0.5011 before, 0.4042 after, better by 0.085 at least" in judged.detail
    assert judged.detail.endswith("12 seeds of 100 steps")


def test_a_config_that_learned_nothing_decides_nothing() -> None:
    draw = random.Random(0)
    side = [SeedEnd(draw.gauss(1.4, 0.02), draw.gauss(1.4, 0.02)) for _ in range(8)]
    judged = judge_quality(Quality(side, side, 100))
    assert (judged.passed, judged.open) == (None, False)
    assert "learned nothing measurable in 100 steps" in judged.detail


def test_a_check_in_which_chance_outweighs_learning_decides_nothing() -> None:
    draw = random.Random(0)
    sides = ([SeedEnd(1.4, draw.gauss(1.0, 0.2)) for _ in range(12)] for _ in range(2))
    assert judge_quality(Quality(*sides, steps=100)).passed is None


def test_sides_that_are_equal_pass_where_seeds_do_nothing() -> None:
    side = [SeedEnd(2.0, 0.5, 1.0)] * 4
    assert judge_quality(Quality(side, side, 10)).passed


def test_what_is_not_finite_is_worse_and_too_few_seeds_are_none() -> None:
    before, after = trainings(0, worse=0.0)
    broken = [*after[:3], SeedEnd(2.0, math.nan)]
    judged = judge_quality(Quality(before[:4], broken, 100))
    assert (judged.passed, judged.open) == (False, False)
    assert judge_quality(Quality(before[:2], after[:2], 100)).open


def test_other_numbers_of_samples_are_no_comparison() -> None:
    before, after = trainings(0, worse=0.0)
    fewer = [SeedEnd(end.start_loss, end.loss, end.accuracy, 3200) for end in after]
    judged = judge_quality(Quality(before, fewer, 100))
    assert (judged.passed, judged.open) == (None, False)
    assert "6400 and 3200 samples" in judged.detail
