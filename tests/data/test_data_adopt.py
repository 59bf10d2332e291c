"""A user's own loader in a run of several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from frameworm.data.adopt import RankBatches, adopt_loader, set_loader_epoch
from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.prefetch import CudaDataLoader
from frameworm.data.stateful import PlacedLoader
from frameworm.errors import ConfigError, DataError


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(11))


def adopted(loader: Any, rank: int, world_size: int = 2, **options: Any) -> tuple[Any, str | None]:
    return adopt_loader(loader, rank=rank, world_size=world_size, **{"accumulation": 1, "seed": 3, **options})


def samples(loader: Any) -> list[int]:
    return [sample for batch in loader for sample in batch.tolist()]


def split(make: Any, **options: Any) -> list[list[int]]:
    """What each of two ranks gets."""
    return [samples(adopted(make(), rank, fill_empty=False, **options)[0]) for rank in range(2)]


@pytest.mark.parametrize("loader", [DataLoader(Numbers(4), 2), [1, 2], DataLoader(Stream(), 2)])
def test_one_process_uses_a_loader_as_it_is(loader: Any) -> None:
    assert adopted(loader, 0, 1) == (loader, None)


def test_ours_is_sharded() -> None:
    loader = OptimizedDataLoader.create(Numbers(16), 2, num_workers=0, shuffle=False)
    same, note = adopted(loader, 1, accumulation=2)
    assert same is loader
    assert note is None
    assert loader.global_batch == 8
    assert samples(loader) == [4, 5, 6, 7, 12, 13, 14, 15]
    adopted(loader, 0, 1, accumulation=4)
    assert loader.step_shape(0).samples == [2, 2, 2, 2]


def test_a_plain_loader_is_rebuilt_with_its_settings() -> None:
    def collate(batch: list[int]) -> torch.Tensor:
        return torch.tensor(batch) + 100

    loader = DataLoader(Numbers(10), 3, shuffle=True, collate_fn=collate, drop_last=True, timeout=0)
    ours, note = adopted(loader, 0)
    assert isinstance(ours, OptimizedDataLoader)
    assert note is not None
    assert "2 ranks" in note
    assert ours.dataset is loader.dataset
    assert (ours.batch_size, ours.num_workers) == (3, 0)
    assert ours.settings.drop_last
    assert ours.settings.shuffle
    assert ours.settings.seed == 3
    assert all(sample >= 100 for sample in samples(ours))
    assert ours.steps_per_epoch == 1


def test_a_shuffled_loader_covers_the_epoch_without_overlap() -> None:
    first, second = split(lambda: DataLoader(Numbers(11), 2, shuffle=True))
    assert sorted(first + second) == list(range(11))
    assert first + second != sorted(first + second)


def test_a_sequential_loader_keeps_its_order() -> None:
    assert split(lambda: DataLoader(Numbers(8), 2)) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_plain_batch_sampler_is_understood() -> None:
    loader = DataLoader(Numbers(8), batch_sampler=BatchSampler(SequentialSampler(Numbers(8)), 2, True))
    ours, _ = adopted(loader, 1)
    assert samples(ours) == [2, 3, 6, 7]
    assert ours.settings.drop_last


def test_the_loaders_generator_decides_the_order() -> None:
    def order(seed: int) -> list[list[int]]:
        return split(lambda: DataLoader(Numbers(32), 2, shuffle=True, generator=torch.Generator().manual_seed(seed)))

    assert order(1) == order(1)
    assert order(1) != order(2)


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * 6 + [0.0] * 2, 12),
        RandomSampler(range(8), replacement=True, num_samples=12),
        RandomSampler(range(6), num_samples=12),
    ],
)
def test_another_sampler_is_drawn_once_and_split(sampler: Any) -> None:
    def parts(rank: int) -> list[int]:
        torch.manual_seed(rank)
        ours, note = adopted(DataLoader(Numbers(8), 2, sampler=sampler), rank)
        assert note is not None
        assert type(sampler).__name__ in note
        assert ours.sampler.order().tolist() == order
        return samples(ours)

    order = adopted(DataLoader(Numbers(8), 6, sampler=sampler), 0)[0].sampler.order().tolist()
    first, second = parts(0), parts(1)
    assert len(order) == 12
    assert [*first[:2], *second[:2], *first[2:4], *second[2:4], *first[4:], *second[4:]] == order


def test_a_distributed_sampler_is_kept() -> None:
    data = Numbers(8)
    for loader in (
        DataLoader(data, 2, sampler=DistributedSampler(data, 2, 1)),
        DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data, 2, 1), 2, False)),
    ):
        assert adopted(loader, 1) == (loader, None)
        for rank, world_size in ((0, 2), (1, 4)):
            with pytest.raises(ConfigError, match="rank 1 of 2"):
                adopted(loader, rank, world_size)


def test_what_cannot_be_split_says_what_to_do() -> None:
    class Pairs:
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1], [2, 3]])

    with pytest.raises(DataError, match=r"batch_sampler \(Pairs\).*sampler="):
        adopted(DataLoader(Numbers(4), batch_sampler=Pairs()), 0)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="batch_size=None"):
        adopted(DataLoader(Numbers(4), batch_size=None), 0)
    with pytest.raises(DataError, match="cannot be iterated"):
        adopted(5, 0, 1)


def test_a_batch_sampler_of_this_rank_is_kept() -> None:
    class Pairs:
        num_replicas, rank = 2, 0

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1]])

    loader = DataLoader(Numbers(4), batch_sampler=Pairs())  # type: ignore[arg-type]
    assert adopted(loader, 0) == (loader, None)
    with pytest.raises(ConfigError, match="num_replicas=2, rank=1"):
        adopted(loader, 1)


def test_an_iterable_data_set_is_split_by_sample() -> None:
    first, second = split(lambda: DataLoader(Stream(), 2))
    assert sorted(first + second) == list(range(11))
    assert first == [0, 2, 4, 6, 8, 10]
    note = adopted(DataLoader(Stream(), 2), 0)[1]
    assert note is not None
    assert "every sample is read by 2 of them" in note


def batches_of_two() -> Iterator[torch.Tensor]:
    return iter(torch.arange(10).split(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: list(batches_of_two()),
        lambda: batches_of_two(),
        lambda: batches_of_two,
        lambda: DataLoader(StreamOfBatches(), batch_size=None),
    ],
)
def test_other_iterables_are_split_by_batch(make: Any) -> None:
    assert split(make) == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]]
    note = adopted(make(), 0)[1]
    assert note is not None
    assert "take turns" in note


class StreamOfBatches(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return batches_of_two()


def test_a_function_can_be_read_again_in_every_epoch() -> None:
    loader, note = adopted(batches_of_two, 0, 1)
    assert note is None
    assert samples(loader) == samples(loader) == list(range(10))


def test_lengths_of_the_parts() -> None:
    batches = list(batches_of_two())
    assert [len(RankBatches(batches, rank, 2)) for rank in range(2)] == [3, 2]
    assert [len(RankBatches(batches, rank, 7)) for rank in range(7)] == [1, 1, 1, 1, 1, 0, 0]


class Shuffling:
    """A loader that draws its order from the process's random state, which is another on each rank."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randperm(10).split(2))


@pytest.mark.parametrize("given", [Shuffling(), lambda: torch.randperm(10).split(2)], ids=["loader", "function"])
def test_turns_at_batches_that_are_shuffled_meet_each_once(given: Any) -> None:
    epochs = []
    for epoch in range(2):
        found = []
        for rank in range(2):
            torch.manual_seed(rank)
            loader, _ = adopted(given, rank)
            set_loader_epoch(loader, epoch)
            before = torch.get_rng_state()
            found.append(samples(loader))
            assert torch.equal(torch.get_rng_state(), before)
        assert sorted(found[0] + found[1]) == list(range(10))
        epochs.append(found)
    assert epochs[0] != epochs[1]


class Noisy:
    """Says where it is, and draws something for each batch."""

    def __init__(self) -> None:
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.next < 10:
            self.next += 1
            yield self.next - 1 + torch.rand(2)


@pytest.mark.parametrize("ahead", [False, True])
def test_turns_go_on_at_a_place_with_the_same_random_numbers(ahead: bool) -> None:
    loader = PlacedLoader(adopted(Noisy(), 1)[0])
    loader.copied = ahead
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    early = [next(batches).tolist()] if ahead else []  # as a transfer to a device reads
    place = loader.place(2)
    rest = early + samples_of(batches)
    again = PlacedLoader(adopted(Noisy(), 1)[0])
    assert place is not None
    assert again.go_on(place)
    assert samples_of(iter(again)) == rest


def samples_of(batches: Iterator[torch.Tensor]) -> list[list[float]]:
    return [batch.tolist() for batch in batches]


def test_a_transfer_loader_is_adopted_inside() -> None:
    outer = CudaDataLoader(DataLoader(Numbers(8), 2), "cpu")
    replaced, note = adopted(outer, 1)
    assert isinstance(replaced, CudaDataLoader)
    assert note is not None
    assert samples(replaced) == [2, 3, 6, 7]
    ours = CudaDataLoader(OptimizedDataLoader.create(Numbers(8), 2, num_workers=0), "cpu")
    assert adopted(ours, 1) == (ours, None)


def test_set_loader_epoch_reaches_whatever_draws_the_order() -> None:
    data = Numbers(8)
    sampler = DistributedSampler(data, 2, 0)
    set_loader_epoch(DataLoader(data, 2, sampler=sampler), 4)
    assert sampler.epoch == 4
    set_loader_epoch(DataLoader(data, batch_sampler=BatchSampler(sampler, 2, False)), 5)
    assert sampler.epoch == 5
    set_loader_epoch(RankBatches(DataLoader(data, 2, sampler=sampler), 0, 1), 6)
    assert sampler.epoch == 6
    ours = OptimizedDataLoader.create(data, 2, num_workers=0)
    set_loader_epoch(CudaDataLoader(ours, "cpu"), 7)
    assert ours.sampler is not None
    assert ours.sampler.epoch == 7
    set_loader_epoch([1, 2], 8)


def _rank_with_a_seed_of_its_own(rank: int, folder: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(10 + rank)
    loader, _ = adopted(DataLoader(Numbers(12), 2, shuffle=True, generator=generator), rank)
    results.put((rank, samples(loader)))
    dist.destroy_process_group()


@pytest.mark.slow
def test_generators_seeded_by_rank_do_not_make_ranks_overlap(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_rank_with_a_seed_of_its_own, args=(rank, str(tmp_path), results), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=120) for _ in processes)
        for process in processes:
            process.join(timeout=60)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
    assert sorted(found[0] + found[1]) == list(range(12))
