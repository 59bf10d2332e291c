"""Orders that keep padding small: every sample once, none favoured."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frameworm.data.batches.arrange import balanced, bucketed, widths
from frameworm.data.samples.sampling import range_of_rank

lengths_of_any_kind = st.lists(st.integers(1, 300), min_size=1, max_size=150)
batch_sizes = st.integers(1, 40)


def permutation(size: int, epoch: int = 0) -> np.ndarray:
    return np.random.default_rng([7, epoch]).permutation(size)


def skewed(size: int, seed: int = 0) -> np.ndarray:
    """Lengths as texts have them, cut at 256."""
    drawn = np.random.default_rng(seed).lognormal(3.9, 0.5, size)
    return np.clip(drawn, 1, 256).astype(np.int64)


ARRANGEMENTS = [
    balanced,
    bucketed,
    functools.partial(bucketed, mixed=True),
    functools.partial(bucketed, mixed=True, ranks=2),
]


@pytest.mark.parametrize("arrange", ARRANGEMENTS)
@given(lengths=lengths_of_any_kind, global_batch=batch_sizes, seed=st.integers(0, 3), epoch=st.integers(0, 3))
@settings(deadline=None, max_examples=100)
def test_every_sample_is_there_once_and_the_order_follows_from_its_seed(
    arrange: object, lengths: list[int], global_batch: int, seed: int, epoch: int
) -> None:
    assert callable(arrange)
    order = permutation(len(lengths))
    arranged = arrange(order, np.array(lengths), global_batch, seed=seed, epoch=epoch)
    assert sorted(arranged.tolist()) == list(range(len(lengths)))
    again = arrange(order, np.array(lengths), global_batch, seed=seed, epoch=epoch)
    assert arranged.tolist() == again.tolist()


@given(lengths=lengths_of_any_kind, global_batch=batch_sizes)
@settings(deadline=None, max_examples=150)
def test_token_sums_of_balanced_steps_differ_by_less_than_the_range_of_lengths(
    lengths: list[int], global_batch: int
) -> None:
    sizes = np.array(lengths)
    steps = len(lengths) // global_batch
    arranged = balanced(permutation(len(lengths)), sizes, global_batch, seed=0, epoch=0)
    sums = sizes[arranged[: steps * global_batch]].reshape(steps, global_batch).sum(axis=1)
    if steps:
        assert sums.max() - sums.min() <= sizes.max() - sizes.min()


@pytest.mark.parametrize("global_batch", [32, 96, 128])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 8])
def test_any_part_of_a_balanced_step_is_balanced(global_batch: int, parts: int) -> None:
    sizes = skewed(global_batch * 60 + 17)
    arranged = balanced(permutation(len(sizes)), sizes, global_batch, seed=0, epoch=0)
    table = sizes[arranged[: global_batch * 60]].reshape(60, global_batch)
    random = sizes[permutation(len(sizes))[: global_batch * 60]].reshape(60, global_batch)
    spread, random_spread = [], []
    for rank in range(parts):
        begin, end = range_of_rank(global_batch, rank, parts)
        expected = sizes.mean() * (end - begin)
        spread.append(np.abs(table[:, begin:end].sum(axis=1) - expected))
        random_spread.append(np.abs(random[:, begin:end].sum(axis=1) - expected))
    # Far nearer to the mean than parts of a random step, however the step is cut.
    assert np.mean(spread) < 0.5 * np.mean(random_spread)
    if parts == 1:
        assert np.mean(spread) < 0.02 * np.mean(random_spread) + 2


@pytest.mark.parametrize("rest", [1, 16, 31])
def test_the_short_step_is_last_and_near_the_mean(rest: int) -> None:
    sizes = skewed(32 * 50 + rest)
    for epoch in range(5):
        short = sizes[balanced(permutation(len(sizes), epoch), sizes, 32, seed=0, epoch=epoch)[32 * 50 :]]
        assert len(short) == rest
        if rest > 1:
            assert abs(short.sum() - rest * sizes.mean()) <= sizes.max()


@pytest.mark.parametrize("arrange", ARRANGEMENTS)
def test_every_sample_is_as_likely_in_every_place(arrange: object) -> None:
    assert callable(arrange)
    # The longest and the shortest of 22 samples, in steps of 4: where they land over many epochs.
    sizes = np.arange(1, 23)
    epochs = 3_000
    places = np.zeros((22, 22))
    for epoch in range(epochs):
        order = arrange(permutation(22, epoch), sizes, 4, seed=1, epoch=epoch)
        places[order, np.arange(22)] += 1
    steps = np.add.reduceat(places, np.arange(0, 22, 4), axis=1) / epochs
    expected = np.array([4, 4, 4, 4, 4, 2]) / 22
    # Five standard deviations of a share that is estimated from so many draws.
    assert np.abs(steps - expected).max() < 5 * np.sqrt(0.182 * 0.818 / epochs)


def test_bucketed_steps_hold_like_lengths_and_come_in_random_order() -> None:
    sizes = skewed(32 * 64 + 5)
    arranged = bucketed(permutation(len(sizes)), sizes, 32, seed=0, epoch=0)
    table = sizes[arranged[: 32 * 64]].reshape(64, 32)
    assert np.median(np.ptp(table, axis=1)) <= 3
    assert np.abs(np.corrcoef(table.mean(axis=1), np.arange(64))[0, 1]) < 0.4
    # Inside a step the longer ones are not at one end: that end would be one rank's.
    assert np.abs((table[:, :16] - table[:, 16:]).mean()) < 0.5


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_mixed_step_has_a_short_and_a_long_half_on_every_rank(ranks: int) -> None:
    sizes = skewed(32 * 64 + 5)
    arranged = bucketed(permutation(len(sizes)), sizes, 32, seed=0, epoch=0, mixed=True, ranks=ranks)
    table = sizes[arranged[: 32 * 64]].reshape(64, ranks, 2, -1)
    widest = table.max(axis=3, keepdims=True)
    assert 1 - table.sum() / (widest * np.ones_like(table)).sum() < 0.03, "hardly any padding in any pass"
    assert (table[:, :, 0].max(axis=2) <= table[:, :, 1].min(axis=2)).all()
    # Steps differ in length by less than texts do, as steps of one length each would.
    assert table.mean(axis=(1, 2, 3)).std() < 0.6 * sizes.std()


def test_a_mixed_step_holds_the_same_samples_on_any_number_of_ranks() -> None:
    sizes = skewed(32 * 20 + 5)
    tables = [
        bucketed(permutation(len(sizes)), sizes, 32, seed=0, epoch=0, mixed=True, ranks=ranks)[: 32 * 20].reshape(
            20, 32
        )
        for ranks in (1, 2, 3, 4, 16)
    ]
    for table in tables[1:]:
        assert [set(step) for step in table.tolist()] == [set(step) for step in tables[0].tolist()]


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30), count=st.integers(1, 5))
@settings(deadline=None, max_examples=150)
def test_widths_waste_least(lengths: list[int], count: int) -> None:
    sizes = np.array(lengths)
    found = widths(sizes, count)
    assert found.tolist() == sorted(set(found.tolist()))
    assert found[-1] == sizes.max()
    assert len(found) <= count

    def padded(chosen: np.ndarray) -> int:
        return int(chosen[np.searchsorted(chosen, sizes)].sum())

    values = sorted(set(lengths))
    candidates = [
        np.array([*some, values[-1]])
        for number in range(min(count, len(values)))
        for some in itertools.combinations(values[:-1], number)
    ]
    assert padded(found) == min(padded(chosen) for chosen in candidates)


def test_widths_of_very_long_texts_stay_cheap() -> None:
    sizes = np.random.default_rng(0).integers(1, 100_000, 5_000)
    found = widths(sizes, 8)
    assert len(found) == 8
    assert found[-1] == sizes.max()
