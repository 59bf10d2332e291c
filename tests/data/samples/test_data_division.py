"""Each sample of a stream is read once by all ranks and workers together, whatever its data set does by itself.

`CAMPAIGN=1` tries all kinds of data sets, and four ranks (`make campaign`).
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from frameworm.data.adopt import adopt_loader
from frameworm.data.samples.division import Division, divide
from frameworm.data.samples.reader import copied, digest, keeps_its_place
from frameworm.data.samples.seeding import RandomState
from frameworm.errors import DataError
from stream_sets import (
    PACKAGES,
    SETS,
    SIZE,
    ByRank,
    Counting,
    Files,
    Plain,
    parts,
    place,
    read,
    read_all,
    steps_of,
    tars,
    write_shards,
)

WORKERS = (0, 1, 4)
CAMPAIGN = bool(os.environ.get("CAMPAIGN"))
SAMPLE = ["plain", "by worker", "by both", "fewer files than readers", "hugging face, few shards", "tars"]
KINDS = list(SETS) if CAMPAIGN else SAMPLE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for count in (3, 8):
        write_shards(folder, count)
    return folder


def needs(kind: str) -> None:
    package = PACKAGES.get(kind.split()[0].rstrip(","))
    if package is not None:
        pytest.importorskip(package)


def alone(dataset: Any, workers: int = 1, **more: Any) -> Division:
    return divide(dataset, rank=0, world_size=1, workers=workers, seed=0, **more)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_reads_each_sample_once(kind: str, folder: Path) -> None:
    needs(kind)
    for workers in WORKERS:
        for epoch in read(0, 1, kind, str(folder), workers, 2 - bool(workers)):
            assert sorted(epoch) == list(range(SIZE)), f"{workers} workers"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4] if CAMPAIGN else [2])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_read_each_sample_once(
    kind: str, world_size: int, folder: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    needs(kind)
    found = run_ranks(read_all, world_size, (kind, str(folder), WORKERS), timeout_s=180)
    for number, workers in enumerate(WORKERS):
        for epoch in range(2 - bool(workers)):
            shares = [rank[number][epoch] for rank in found]
            assert sorted(chain(*shares)) == list(range(SIZE)), f"{workers} workers, epoch {epoch}"
            assert min(map(len, shares)) > SIZE // world_size // 3, "no rank is left with almost nothing"


@pytest.mark.slow
def test_shuffled_epochs_differ_and_are_the_same_again(folder: Path) -> None:
    pytest.importorskip("datasets")
    first, second = read(0, 1, "hugging face, shuffled", str(folder), 0, 2)
    assert first != second
    assert read(0, 1, "hugging face, shuffled", str(folder), 0, 2) == [first, second]


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 6, 8, 12, 40])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_shards_are_divided_whole(shards: int, ranks: int, workers: int) -> None:
    """As Files hands them out; readers that share one take turns."""
    found: list[tuple[int, int]] = []
    for rank in range(ranks):
        division = Division(rank, ranks, workers, way="shards", shards=shards)
        for worker in range(workers):
            part = division.part(Files([[number] for number in range(shards)]), worker)
            if (part.rank, part.worker) == (0, 0):
                found.extend((item[0], part.ranks * part.workers) for item in part.dataset.files)
    assert sorted(number for number, _ in found) == list(range(shards))
    if shards % (ranks * workers) == 0:
        assert {sharing for _, sharing in found} == {1}


def test_what_a_data_set_does_is_found() -> None:
    assert alone(Plain(), 4).way == "turns"
    assert alone(Files(parts(6)), 4).way == "shards"
    by_worker = alone(SETS["by worker"](Path()), 4)
    assert (by_worker.way, by_worker.as_it_is, by_worker.reading) == ("workers", True, 1)
    assert alone(SETS["fewer files than readers"](Path()), 4).way == "turns"
    assert not alone(Plain(), 4).as_it_is
    assert alone(Plain(), 4).reading == 4
    assert alone(Plain()).describe() is None
    text = alone(Plain(), 4).describe()
    assert text is not None
    assert "every sample is read by 4 of them" in text


def test_a_data_set_may_say_what_it_does() -> None:
    class Random(Plain):
        shards_itself = True

    class Whole(ByRank):
        shards_itself = False

        def __iter__(self) -> Iterator[int]:
            return iter(range(place()[2], SIZE))

    assert alone(Random(), 4).way == "workers"
    assert alone(Whole(), 4).way == "turns"


def test_looking_takes_nothing_from_the_data_set() -> None:
    class Drawing(IterableDataset[float]):
        def __init__(self) -> None:
            self.rng = np.random.default_rng(3)
            self.opened = 0

        def __iter__(self) -> Iterator[float]:
            self.opened += 1
            yield from self.rng.random(5)

    dataset = Drawing()
    before = (dataset.rng.bit_generator.state, torch.get_rng_state())
    alone(dataset, 4)
    assert dataset.opened == 0
    assert dataset.rng.bit_generator.state == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_a_data_set_without_a_fixed_order_is_named() -> None:
    class Unseeded(IterableDataset[float]):
        def __iter__(self) -> Iterator[float]:
            yield from np.random.default_rng().random(40)

    note = alone(Unseeded(), 2).describe()
    assert note is not None
    assert "Unseeded yields something else each time" in note


MODULES_OWN = np.random.default_rng(0)


class DrawsFromAModule(Plain):
    """Shuffles by a generator that no copy of it has to itself, and then takes a worker's part."""

    def __iter__(self) -> Iterator[int]:
        _, _, worker, workers = place()
        return iter(MODULES_OWN.permutation(SIZE).tolist()[worker::workers])


def test_looking_takes_nothing_from_a_modules_generator() -> None:
    before = MODULES_OWN.bit_generator.state
    division = alone(DrawsFromAModule(), 2)
    assert MODULES_OWN.bit_generator.state == before
    assert (division.way, division.note) == ("workers", None)


class Around(IterableDataset[int]):
    """Changes the samples of another, whose other attributes are seen through it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __iter__(self) -> Iterator[int]:
        return (sample + 1000 for sample in self.inner)


def test_shards_are_not_those_of_what_is_inside() -> None:
    source = steps_of(0, 1, DataLoader(Around(Files(parts(6))), 4, num_workers=2))
    found = [number for step in source.epoch(0) for batch in step.batches for number in batch.tolist()]
    assert sorted(found) == list(range(1000, 1000 + SIZE))


class Drawn(IterableDataset[float]):
    """Numbers from a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[float]:
        return (float(self.rng.random()) for _ in range(40))


def _seed_by_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.rng = np.random.default_rng(worker)  # type: ignore[attr-defined]


def test_workers_that_are_seeded_by_the_user_draw_samples_of_their_own() -> None:
    loader = DataLoader(Drawn(0), 4, num_workers=2, worker_init_fn=_seed_by_worker)
    steps = list(steps_of(0, 1, loader).epoch(0))
    found = [number for step in steps for batch in step.batches for number in batch.tolist()]
    assert len(found) == len(set(found)) == 80


def _drawn_by_rank(rank: int, world_size: int, workers: int) -> list[float]:
    source = steps_of(rank, world_size, DataLoader(Drawn(rank), 4, num_workers=workers))
    return [number for step in source.epoch(0) for batch in step.batches for number in batch.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_with_seeds_of_their_own_draw_samples_of_their_own(
    workers: int, run_ranks: Callable[..., list[Any]]
) -> None:
    found = list(chain(*run_ranks(_drawn_by_rank, 2, (workers,))))
    assert len(found) == len(set(found)) == 80


class Locked(Plain):
    """Takes its part when it is made, and cannot be copied."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.part = (rank, SIZE, ranks)
        self.lock = threading.Lock()

    def __iter__(self) -> Iterator[int]:
        return iter(range(*self.part))


def _not_copied(rank: int, world_size: int) -> tuple[list[str | None], list[list[int]]]:
    """Notes, and the samples of what says that ranks have their own."""
    _, stream = adopt_loader(DataLoader(Locked(rank, world_size), 4), rank=rank, world_size=world_size)
    _, generator = adopt_loader((batch for batch in [torch.ones(2)]), rank=rank, world_size=world_size)
    dataset = Locked(rank, world_size)
    dataset.shards_itself = True  # type: ignore[attr-defined]
    both = []
    for given in (DataLoader(dataset, 4), ByHand(rank, world_size)):
        source = steps_of(rank, world_size, given)
        both.append([int(number) for step in source.epoch(0) for batch in _real(step) for number in batch.flatten()])
    return [stream, generator], both


def _real(step: Any) -> list[Any]:
    return [batch for batch, size in zip(step.batches, step.samples) if size]


class ByHand:
    """Batches of one rank, which cannot be copied."""

    shards_itself = True

    def __init__(self, rank: int, ranks: int) -> None:
        self.batches = list(torch.arange(SIZE).split(4))[rank::ranks]
        self.lock = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@pytest.mark.slow
def test_what_cannot_be_compared_is_named_and_may_say_what_it_does(run_ranks: Callable[..., list[Any]]) -> None:
    found = run_ranks(_not_copied, 2)
    (stream, generator), _ = found[0]
    assert "Locked cannot be copied" in stream
    assert "say so by shards_itself = True" in stream
    assert "pass a function that makes it" in generator
    for number in range(2):
        assert sorted(chain(*[rank[1][number] for rank in found])) == list(range(SIZE))


def _half_divided(rank: int, world_size: int) -> str:
    class Pairs(Plain):
        """Ranks 0 and 1 read the same."""

        def __iter__(self) -> Iterator[int]:
            return iter(range(rank // 2, SIZE, 2))

    with pytest.raises(DataError, match="4 ranks read 2 different streams") as error:
        steps_of(rank, world_size, DataLoader(Pairs(), 4))
    return str(error.value)


@pytest.mark.slow
def test_ranks_that_share_in_part_are_refused(run_ranks: Callable[..., list[Any]]) -> None:
    assert len(set(run_ranks(_half_divided, 4))) == 1


def _too_few_tars(rank: int, world_size: int, folder: str) -> str:
    with pytest.raises(DataError, match="leaves nothing for rank 3") as error:
        steps_of(rank, world_size, DataLoader(tars(Path(folder), 3), 4))
    return str(error.value)


@pytest.mark.slow
def test_a_rank_that_would_get_nothing_is_named(folder: Path, run_ranks: Callable[..., list[Any]]) -> None:
    pytest.importorskip("webdataset")
    assert len(set(run_ranks(_too_few_tars, 4, (str(folder),)))) == 1


def _batches_by_hand(rank: int, world_size: int, own: bool) -> list[int]:
    batches = list(torch.arange(24).split(2))[rank if own else 0 :: world_size if own else 1]
    source = steps_of(rank, world_size, batches)
    return [number for step in source.epoch(0) for batch in step.batches for number in batch.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_batches_divided_by_hand_are_not_divided_again(own: bool, run_ranks: Callable[..., list[Any]]) -> None:
    assert sorted(chain(*run_ranks(_batches_by_hand, 2, (own,)))) == list(range(24))


def test_finished_batches_that_all_workers_would_read_are_refused() -> None:
    with pytest.raises(DataError, match="each of 2 workers"):
        steps_of(0, 1, DataLoader(Plain(), batch_size=None, num_workers=2))
    assert len(list(steps_of(0, 1, DataLoader(Plain(), batch_size=None)).epoch(0))) == SIZE


class Buffered(Counting):
    """Has a state that lacks what is in its buffer."""

    def __iter__(self) -> Iterator[Any]:
        inner, held = super().__iter__(), []
        for item in inner:
            held.append(item)
            if len(held) == 8:
                yield from reversed(held)
                held.clear()
        yield from held


def test_a_state_that_brings_back_others_is_found() -> None:
    assert keeps_its_place(Counting(), 0)
    assert not keeps_its_place(Buffered(), 0)
    assert not keeps_its_place(Plain(), 0)


def test_samples_of_every_kind_are_told_apart() -> None:
    class Item:
        def __init__(self, value: int) -> None:
            self.value = value

    samples = [1, 2, "1", b"1", 1.5, None, torch.tensor([1]), torch.tensor([2]), np.array([3]), {"a": 1}, {"b": 1}]
    samples += [{"a": {"b": [1, (2, "x")]}}, {"a": {"b": [1, (2, "y")]}}, Item(1), Item(2), np.array(["a", 1], object)]
    digests = [digest(sample) for sample in samples]
    assert len(set(digests)) == len(samples)
    assert digests == [digest(copied(sample)) for sample in samples]


def test_random_state_can_be_saved() -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    state = RandomState(1, 2)
    assert state.saved() is None
    with state:
        draw()
    saved = state.saved()
    assert saved is not None
    with state:
        expected = draw()
    other = RandomState(3)
    other.load(saved)
    with other:
        assert draw() == expected
