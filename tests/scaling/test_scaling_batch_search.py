"""The search for the largest batch, on devices that are only numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from frameworm.scaling.batch_search import MOST_TRIALS, BatchSearch, BatchSizeReport, BatchTrial, divisors


def search(
    candidates: Sequence[int], truth: int, guess: int | None, predict: Callable[[int], float] | None = None
) -> tuple[int | None, list[int]]:
    """Run a search against a device on which everything up to `truth` fits."""
    made = BatchSearch(candidates, guess)
    tried: list[int] = []
    while (size := made.next()) is not None:
        assert size in candidates
        assert size not in tried, f"{size} was tried already: {tried}"
        tried.append(size)
        fits = size <= truth
        made.tell(size, fits, predict(size) if fits and predict is not None else None)
        assert len(tried) < 100
    return made.largest, tried


@pytest.mark.parametrize("seed", range(20))
def test_within_three_percent_in_seven_trials_with_a_planner_wrong_by_a_third(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(500):
        truth = round(10 ** draw.uniform(0, 5))
        guess = max(1, round(truth * draw.uniform(0.7, 1.3)))
        # Measured memory may promise too much (free blocks that do not suit) or too little.
        wrong = draw.uniform(0.93, 1.07)
        for predict in (None, lambda size, at=truth * wrong: max(at, size * 1.0)):
            found, tried = search(range(1, 2**20), truth, guess, predict)
            assert found is not None
            assert 0.97 * truth <= found <= truth
            assert len(tried) <= MOST_TRIALS - 1, (truth, guess, tried)  # one more verifies


def test_a_right_prediction_saves_trials() -> None:
    truth = 1000
    _, without = search(range(1, 2**20), truth, 750)
    found, with_prediction = search(range(1, 2**20), truth, 750, lambda _: 1000.0)
    assert found is not None
    assert found >= 970
    assert len(with_prediction) <= 3 < len(without)


@pytest.mark.parametrize("truth", [1, 2, 3, 5, 17, 100, 1023, 5000])
def test_without_a_planner_sizes_double(truth: int) -> None:
    found, tried = search(range(1, 2**20), truth, None)
    assert found is not None
    assert 0.97 * truth <= found <= truth
    assert tried[:3] == [1, 2, 4][: len(tried[:3])]


def test_a_planner_wrong_by_far_costs_trials_only() -> None:
    for truth in (1, 7, 300, 90_000):
        for guess in (1, 40, 3000, 1_000_000):
            found, _ = search(range(1, 2**20), truth, guess)
            assert found is not None
            assert 0.97 * truth <= found <= truth


def test_the_answer_among_divisors_is_exact() -> None:
    sizes = divisors(480)
    for truth in range(1, 500):
        found, tried = search(sizes, truth, truth)
        assert found == max(size for size in sizes if size <= truth)
        assert len(tried) <= 4


def test_the_upper_end_ends_the_search() -> None:
    assert search(range(1, 513), 10**6, 512) == (512, [512])
    found, _ = search(range(1, 513), 10**6, 100)
    assert found is not None
    assert found >= 497


def test_nothing_fits() -> None:
    found, tried = search(range(1, 100), 0, 60)
    assert found is None
    assert tried[-1] == 1


def test_a_winner_that_fails_later_is_not_the_answer() -> None:
    made = BatchSearch(range(1, 1001), 100)
    made.tell(100, True)
    made.tell(112, True)
    made.tell(113, False)
    assert made.next() is None
    made.tell(112, False)
    assert made.largest == 100
    assert made.ends_below == 112
    following = made.next()
    assert following is not None
    assert 100 < following < 112


def test_divisors() -> None:
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert divisors(36, 10) == [1, 2, 3, 4, 6, 9]
    assert divisors(1) == [1]


def test_the_fastest_takes_no_more_memory_than_it_is_worth() -> None:
    report = BatchSizeReport("job", "cpu", 2, 64, 32, largest=32)
    for size, rate in ((32, 100.0), (16, 99.0), (8, 97.0), (4, 50.0)):
        report.trials.append(BatchTrial(size, "speed", "fits", samples_per_s=rate))
    report.trials.append(BatchTrial(2, "speed", "error", samples_per_s=None))
    report.choose_fastest()
    assert report.fastest == 16
    assert report.accumulation(16) == 2
    assert report.to_dict()["set"]["fastest"] == {"training.micro_batch": 16, "training.accumulation": 2}
