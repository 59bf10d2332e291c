"""An epoch goes on after the samples it has trained, whatever the batch and the number of processes are now."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from frameworm.data.adopt import RankBatches
from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.position import Reading, order_of
from frameworm.data.steps import StepSource
from frameworm.errors import DataError

SIZE = 60
DATA = TensorDataset(torch.arange(SIZE))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SIZE))


class Lengths(Dataset[Any]):
    """Samples whose order may be arranged by their lengths."""

    token_lengths = tuple((number * 7) % 13 + 1 for number in range(SIZE))

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


class Pairs:
    """A batch sampler of the user's own, with batches of unequal size."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([list(range(*pair)) for pair in pairwise([0, 5, 7, 20, 41, SIZE])])

    def __len__(self) -> int:
        return 5


def _loader(kind: str, batch: int, rank: int, world_size: int) -> Any:
    if kind == "planned":
        loader: Any = OptimizedDataLoader.create(DATA, batch, num_workers=0, seed=3)
    elif kind == "bucketed":
        loader = OptimizedDataLoader.create(Lengths(), batch, num_workers=0, seed=3, batching="bucketed")
    elif kind == "mixed":
        loader = OptimizedDataLoader.create(
            Lengths(), batch, num_workers=0, seed=3, batching="bucketed", mixed_lengths=True
        )
    elif kind == "stream":
        loader = OptimizedDataLoader.create(Stream(), batch, num_workers=0)
    elif kind == "batches":
        return RankBatches([torch.arange(start, start + batch) for start in range(0, SIZE, batch)], rank, world_size)
    else:
        shuffle = kind == "distributed"
        return DataLoader(DATA, batch, sampler=DistributedSampler(DATA, world_size, rank, shuffle=shuffle, seed=4))
    loader.shard(rank, world_size)
    return loader


def _read(kind: str, batch: int, world_size: int, steps: int | None, before: Any = None, trained: Any = (0, 0)) -> Any:
    """Read steps on each of several ranks, one after the other; no rank is asked anything."""
    samples: list[int] = []
    reading: dict[str, Any] = {}
    for rank in range(world_size):
        source = StepSource(
            _loader(kind, batch, rank, world_size),
            accumulation=1,
            world_size=world_size,
            sum_over_ranks=lambda value: value,
            max_over_ranks=lambda value: value,
        )
        if before is not None:
            source.continue_reading(before)
        for step in islice(source.epoch(1, *trained), steps):
            batches = [item[0] if isinstance(item, list) else item for item in step.batches]
            samples += torch.cat(batches).tolist()
        reading = dataclasses.asdict(source.reading)
    return samples, reading


@pytest.mark.parametrize("kind", ["planned", "bucketed", "mixed", "stream", "batches", "distributed", "in order"])
@pytest.mark.parametrize(("batch", "ranks", "then", "later"), [(4, 2, 6, 1), (6, 1, 2, 3), (4, 1, 6, 1), (5, 2, 5, 3)])
def test_every_sample_comes_once(kind: str, batch: int, ranks: int, then: int, later: int) -> None:
    first, reading = _read(kind, batch, ranks, 3)
    assert len(first) == 3 * batch * ranks
    if kind == "batches" and 3 * batch * ranks % then:  # finished batches cannot be cut
        with pytest.raises(DataError, match="in the middle of one of this loader's batches"):
            _read(kind, then, later, None, reading, (3, len(first)))
        return
    rest, _ = _read(kind, then, later, None, reading, (3, len(first)))
    assert sorted([*first, *rest]) == list(range(SIZE))


def _of_two_ranks(rank: int, first: int, told: list[str]) -> StepSource:
    batches = [torch.arange(start, start + 4) for start in range(first, SIZE, 4)]
    return StepSource(
        RankBatches(batches, rank, 2),
        accumulation=1,
        rank=rank,
        world_size=2,
        sum_over_ranks=lambda value: 2 * value,
        max_over_ranks=lambda value: value,
        warn=told.append,
    )


def test_each_rank_has_a_first_batch_of_its_own_and_only_one_is_saved() -> None:
    told: list[str] = []
    begun = _of_two_ranks(0, 0, told)
    next(begun.epoch(0))
    before = dataclasses.asdict(begun.reading)
    for rank in range(2):
        again = _of_two_ranks(rank, 0, told)
        again.continue_reading(before)
        next(again.epoch(0, 2, 16))
    assert not told
    changed = _of_two_ranks(0, 4, told)
    changed.continue_reading(before)
    next(changed.epoch(0, 2, 16))
    assert "did not yield the same" in told[0]


def test_a_batch_sampler_of_ones_own_is_cut_where_it_stopped() -> None:
    loader = DataLoader(DATA, batch_sampler=Pairs())
    source = StepSource(loader, accumulation=1)
    before = dataclasses.asdict(source.reading)
    source = StepSource(DataLoader(DATA, batch_sampler=BatchSampler(range(SIZE), 8, False)), accumulation=2)
    assert "Pairs" in before["order"]
    with pytest.raises(DataError, match="Pairs"):
        source.continue_reading(before)
    source = StepSource(loader, accumulation=2)
    assert source.continue_reading(before)
    sizes = [step.samples for step in source.epoch(0, 2, 9)]
    assert sizes == [[11, 21], [19]]
    assert loader.batch_sampler is not None
    assert [step.samples for step in source.epoch(1)] == [[5, 2], [13, 21], [19]]


@pytest.mark.parametrize("change", [{"world_size": 2}, {"first_step": 6}])
def test_a_finished_batch_is_not_cut(change: dict[str, int]) -> None:
    source = StepSource([torch.arange(8), torch.arange(8)], accumulation=1)
    source.continue_reading({**dataclasses.asdict(source.reading), **change})
    with pytest.raises(DataError, match="stopped after 12 samples"):
        source.epoch(0, 2, 12)


@pytest.mark.parametrize("change", [{"seed": 4}, {"shuffle": False}])
def test_another_order_is_refused(change: dict[str, Any]) -> None:
    source = StepSource(OptimizedDataLoader.create(DATA, 4, num_workers=0, **{"seed": 3}), accumulation=1)
    other = StepSource(OptimizedDataLoader.create(DATA, 4, num_workers=0, **{"seed": 3, **change}), accumulation=1)
    with pytest.raises(DataError, match="60 samples shuffled by seed 3"):
        other.continue_reading(dataclasses.asdict(source.reading))


def test_a_checkpoint_that_does_not_tell_is_taken_as_it_is() -> None:
    source = StepSource(OptimizedDataLoader.create(DATA, 4, num_workers=0), accumulation=1)
    assert not source.continue_reading(None)
    assert len(list(source.epoch(0, 3, 12))) == 12


def test_steps_of_a_plan_stay_if_only_their_division_changes() -> None:
    before = Reading("the order", 8, 1, 2, arranged_for=16)
    assert not Reading("the order", 4, 4, 1, arranged_for=16).after(before).mixed
    assert Reading("the order", 8, 1, 1, arranged_for=8).after(before).mixed


def test_the_order_of_a_foreign_loader_is_named_by_its_sampler() -> None:
    assert order_of(DataLoader(DATA, 4)) == OptimizedDataLoader.create(DATA, 4, shuffle=False).order
    assert "RandomSampler" in order_of(DataLoader(DATA, 4, shuffle=True))
