"""The plan of steps: same samples per step for any number of ranks and any micro-batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from frameworm.data.samples.sampling import OrderedSplitSampler, StepSampler, cut, range_of_rank
from frameworm.errors import ConfigError, DataError

sizes = st.integers(1, 70)
batches = st.integers(1, 24)
micros = st.integers(1, 9)
worlds = st.integers(1, 7)


def ranks(size: int, global_batch: int, micro: int, world: int, **kwargs: object) -> list[StepSampler]:
    return [
        StepSampler(size, global_batch, micro, rank=rank, world_size=world, **kwargs)  # type: ignore[arg-type]
        for rank in range(world)
    ]


def counted(sampler: StepSampler, step: int) -> list[int]:
    """The samples of a step that count on this rank."""
    found: list[int] = []
    for indices, samples in zip(sampler.indices(step), sampler.shape(step).samples):
        assert len(indices) == max(samples, 1)
        found += indices.tolist()[:samples]
    return found


@given(sizes, batches, micros, worlds, st.booleans(), st.booleans())
@settings(deadline=None, max_examples=150)
def test_ranks_share_every_step_of_the_one_order(
    size: int, global_batch: int, micro: int, world: int, drop_last: bool, fill_empty: bool
) -> None:
    if drop_last and size < global_batch:
        return
    alone = StepSampler(size, global_batch, global_batch, drop_last=drop_last, seed=3)
    split = ranks(size, global_batch, micro, world, drop_last=drop_last, fill_empty=fill_empty, seed=3)
    seen: list[int] = []
    for step in range(alone.steps_per_epoch):
        whole = counted(alone, step)
        assert [sample for sampler in split for sample in counted(sampler, step)] == whole
        assert {sampler.shape(step).global_samples for sampler in split} == {len(whole)}
        assert all(count <= micro for sampler in split for count in sampler.shape(step).samples)
        if fill_empty:
            assert len({len(sampler.shape(step).samples) for sampler in split}) == 1
        seen += whole
    expected = size // global_batch * global_batch if drop_last else size
    assert len(seen) == len(set(seen)) == expected
    assert {sampler.steps_per_epoch for sampler in split} == {alone.steps_per_epoch}


@given(sizes, batches, micros, worlds, st.booleans(), st.booleans(), st.data())
@settings(deadline=None, max_examples=100)
def test_iteration_agrees_with_the_plan_from_any_step(
    size: int, global_batch: int, micro: int, world: int, drop_last: bool, fill_empty: bool, data: st.DataObject
) -> None:
    if drop_last and size < global_batch:
        return
    for sampler in ranks(size, global_batch, micro, world, drop_last=drop_last, fill_empty=fill_empty):
        start = data.draw(st.integers(0, sampler.steps_per_epoch))
        planned = [[indices.tolist() for indices in sampler.indices(step)] for step in range(sampler.steps_per_epoch)]
        whole = list(sampler)
        assert whole == [*chain(*planned)]
        assert len(sampler) == len(whole)
        sampler.seek(start)
        assert list(sampler) == [*chain(*planned[start:])]
        assert list(sampler) == whole


@given(st.integers(0, 60), micros, st.integers(0, 5))
@settings(deadline=None)
def test_cut_keeps_samples_and_leaves_empty_pieces_last(share: int, micro: int, extra: int) -> None:
    pieces = -(-share // micro) + extra
    found = cut(share, micro, pieces)
    assert len(found) == pieces
    assert sum(found) == share
    assert found == sorted(found, reverse=True)
    assert share < pieces or all(found)


@given(st.integers(0, 50), worlds)
@settings(deadline=None)
def test_shares_are_contiguous_and_even(samples: int, world: int) -> None:
    shares = [range_of_rank(samples, rank, world) for rank in range(world)]
    assert shares[0][0] == 0
    assert shares[-1][1] == samples
    assert all(left[1] == right[0] for left, right in pairwise(shares))
    lengths = [end - begin for begin, end in shares]
    assert max(lengths) - min(lengths) <= 1


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    sampler = StepSampler(100, 10, 5, seed=7)
    first = list(sampler)
    sampler.set_epoch(1)
    second = list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    again = StepSampler(100, 10, 5, seed=7)
    again.set_epoch(1)
    assert list(again) == second
    assert list(StepSampler(100, 10, 5, seed=8)) != first


def test_without_shuffle_the_order_is_the_data_sets() -> None:
    sampler = StepSampler(7, 4, 2, shuffle=False)
    sampler.set_epoch(5)
    assert list(sampler) == [[0, 1], [2, 3], [4, 5], [6]]


def test_a_filler_repeats_the_steps_first_sample_and_counts_nothing() -> None:
    # The last step has 2 samples for 4 ranks: ranks 1 and 3 get none. Rank 0, whose buffers count, never goes without.
    split = ranks(10, 8, 2, 4, shuffle=False)
    assert [sampler.shape(1).samples for sampler in split] == [[1], [0], [1], [0]]
    assert [sampler.indices(1)[0].tolist() for sampler in split] == [[8], [8], [9], [8]]
    assert [len(list(sampler)) for sampler in split] == [2, 2, 2, 2]


def test_ranks_run_equally_many_micro_batches_when_shares_differ() -> None:
    split = ranks(10, 10, 2, 4)
    assert [sampler.shape(0).samples for sampler in split] == [[2, 1], [1, 1], [2, 1], [1, 1]]


def test_evaluation_counts_every_sample_once_without_fillers() -> None:
    split = ranks(10, 8, 2, 4, shuffle=False, fill_empty=False)
    drawn = [index for sampler in split for batch in sampler for index in batch]
    assert sorted(drawn) == list(range(10))
    assert [sampler.shape(1).samples for sampler in split] == [[1], [], [1], []]
    assert [len(sampler) for sampler in split] == [2, 1, 2, 1]


def test_the_next_epoch_can_be_set_while_an_iteration_runs() -> None:
    sampler = StepSampler(20, 4, 4)
    expected = list(sampler)
    running = iter(sampler)
    sampler.set_epoch(1)
    assert list(running) == expected


@pytest.mark.parametrize(
    ("arguments", "options", "error", "word"),
    [
        ((0, 1, 1), {}, DataError, "no samples"),
        ((3, 4, 2), {"drop_last": True}, DataError, "drop_last"),
        ((3, 0, 1), {}, ConfigError, "global_batch"),
        ((3, 1, 0), {}, ConfigError, "micro_batch"),
        ((3, 1, 1), {"world_size": 0}, ConfigError, "world_size"),
        ((3, 1, 1), {"rank": 2, "world_size": 2}, ConfigError, "rank"),
        ((3, 1, 1), {"seed": -1}, ConfigError, "seed"),
    ],
)
def test_impossible_arguments(
    arguments: tuple[int, int, int], options: dict[str, int], error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word):
        StepSampler(*arguments, **options)  # type: ignore[arg-type]


def test_steps_outside_the_epoch_are_refused() -> None:
    sampler = StepSampler(10, 4, 2, drop_last=True)
    for call in (sampler.shape, sampler.indices):
        for step in (-1, 2):
            with pytest.raises(ConfigError, match="2 steps"):
                call(step)
    with pytest.raises(ConfigError, match="2 steps"):
        sampler.seek(3)
    with pytest.raises(ConfigError, match="epoch"):
        sampler.set_epoch(-1)


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_users_sampler_is_drawn_alike_on_all_ranks(own_generator: bool) -> None:
    def make(rank: int, world: int) -> OrderedSplitSampler:
        torch.manual_seed(rank)  # ranks differ in their own random state
        generator = torch.Generator().manual_seed(rank) if own_generator else None
        sampler = WeightedRandomSampler([1.0, 5.0, 2.0, 0.0], 21, generator=generator)
        return OrderedSplitSampler(sampler, 8, 2, rank=rank, world_size=world, seed=5)

    alone = make(0, 1)
    split = [make(rank, 2) for rank in range(2)]
    epochs = []
    for epoch in range(2):
        for sampler in (alone, *split):
            sampler.set_epoch(epoch)
        for step in range(3):
            assert counted(split[0], step) + counted(split[1], step) == counted(alone, step)
        epochs.append(alone.order().tolist())
    assert len(epochs[0]) == 21
    assert 3 not in epochs[0]
    assert epochs[0] != epochs[1]


def test_drawing_leaves_all_random_state_alone() -> None:
    class Careless:
        generator = torch.Generator().manual_seed(1)

        def __iter__(self) -> Iterator[int]:
            yield random.randrange(10)
            yield int(np.random.randint(10))
            yield int(torch.randint(10, ()))
            yield int(torch.randint(10, (), generator=self.generator))

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index,union-attr]
    own = Careless.generator.get_state().tolist()
    first = OrderedSplitSampler(Careless(), 4, 4, seed=1).order().tolist()
    second = OrderedSplitSampler(Careless(), 4, 4, seed=1).order().tolist()
    assert first == second
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before  # type: ignore[index,union-attr]
    assert Careless.generator.get_state().tolist() == own


def test_a_subset_sampler_covers_its_subset() -> None:
    split = [OrderedSplitSampler(SubsetRandomSampler([3, 5, 8]), 2, 1, rank=rank, world_size=2) for rank in range(2)]
    assert split[0].steps_per_epoch == 2
    assert sorted(index for sampler in split for step in range(2) for index in counted(sampler, step)) == [3, 5, 8]


def test_a_sampler_is_told_the_epoch_and_may_yield_keys() -> None:
    class Keys:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[tuple[str, int]]:
            return iter([("a", self.epoch), ("b", self.epoch)])

    sampler = OrderedSplitSampler(Keys(), 2, 1)
    sampler.set_epoch(4)
    assert list(sampler) == [[("a", 4)], [("b", 4)]]


def test_an_empty_sampler_is_an_error() -> None:
    with pytest.raises(DataError, match="no samples"):
        len(OrderedSplitSampler(SubsetRandomSampler([]), 2, 1))
    with pytest.raises(DataError, match="drop_last"):
        len(OrderedSplitSampler(RandomSampler(range(3)), 4, 1, drop_last=True))
