"""How the readers of a stream (the workers of all ranks) divide it, so that each sample ends up in exactly one batch.

A data set may divide itself by rank, by worker or both; it may offer shards; or it does neither, and its readers take
turns. Its behaviour is found by reading the first samples of copies as different readers would, and comparing them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from frameworm.data.samples.reader import NOT_COPIED, Told, first_samples, keeps_its_place, shards_of
from frameworm.errors import DataError

LOOKED_AT = 16  # samples read per reader
T = TypeVar("T")
Way = Literal["turns", "shards", "workers", "readers"]


@dataclass(frozen=True)
class Part:
    """What one reader reads: its turns in a data set that it may share with other readers.

    Attributes:
        dataset: The data set, or a shard of it.
        rank: This rank's turn among `ranks`, sample by sample.
        ranks: Ranks that take turns.
        worker: This worker's turn among `workers`, batch by batch.
        workers: Workers that take turns.
        told: The worker that this reader appears as to the data set; None: the main process.
    """

    dataset: Any
    rank: int = 0
    ranks: int = 1
    worker: int = 0
    workers: int = 1
    told: Told | None = None


@dataclass(frozen=True)
class Division:
    """How the readers divide a data set.

    Attributes:
        rank: This process.
        world_size: Number of processes.
        workers: Readers in each process, at least one.
        own_ranks: The data set gives each rank samples of its own.
        way: turns: readers take turns; shards: each reads its own shards, or shares one with others in turns; workers:
            the data set divides itself among the workers of a rank; readers: among all readers.
        shards: Shards that the data set offers.
        own_workers: The data set gives each worker of a loader samples of its own.
        too_few: It divides itself among workers, but some would get nothing.
        places: Its saved state brings a reader back to exactly the same position.
        note: Anything else the user should know.
    """

    rank: int = 0
    world_size: int = 1
    workers: int = 1
    own_ranks: bool = False
    way: Way = "turns"
    shards: int = 1
    own_workers: bool = False
    too_few: bool = False
    places: bool = False
    note: str | None = None

    @property
    def readers(self) -> int:
        """Number of readers over all ranks."""
        return self.world_size * self.workers

    @property
    def as_it_is(self) -> bool:
        """Whether a plain torch loader, which divides nothing, would read each sample once."""
        return (self.own_ranks or self.world_size == 1) and (self.own_workers or self.workers == 1)

    @property
    def one_order(self) -> bool:
        """Whether the order of samples is the same for any number of readers."""
        alone = self.world_size == 1 or not self.own_ranks
        return alone and self.shards == 1 and (self.way in ("turns", "shards") or self.readers == 1)

    def part(self, dataset: Any, worker: int) -> Part:
        """The part that a worker of this rank reads."""
        rank, ranks = (0, 1) if self.own_ranks else (self.rank, self.world_size)
        if self.way == "workers":
            return Part(dataset, rank, ranks, told=(worker, self.workers) if self.workers > 1 else None)
        if self.way == "readers":  # numbered across ranks, so that readers without samples are spread over them
            return Part(dataset, told=(worker * ranks + rank, self.workers * ranks))
        if self.way == "turns":
            return Part(dataset, rank, ranks, worker, self.workers)
        groups = math.gcd(self.shards, ranks)  # groups of ranks, with equally many shards each
        if groups > 1:
            dataset = dataset.shard(num_shards=groups, index=rank % groups)
        pieces = min(self.shards // groups, self.workers)
        if pieces > 1:
            dataset = dataset.shard(num_shards=pieces, index=worker % pieces)
        sharing = len(range(worker % pieces, self.workers, pieces))
        return Part(dataset, rank // groups, ranks // groups, worker // pieces, sharing)

    @property
    def reading(self) -> int:
        """Number of readers that read each sample; all but one of them discard it."""
        part = self.part(_Anything(), 0)
        return part.ranks * part.workers

    def __str__(self) -> str:
        """The division as text; with the same text, a resumed run's readers can continue from saved positions."""
        if self.one_order:
            return "turns"
        ways = {
            "turns": "turns",
            "shards": f"{self.shards} shards",
            "workers": "the data set's own division",
            "readers": "the data set's own division",
        }
        own = " of its own samples per rank" if self.own_ranks and self.world_size > 1 else ""
        return f"{ways[self.way]}{own}, {_readers(self.world_size, self.workers)}"

    def describe(self) -> str | None:
        """A sentence for the log; None if there is only one reader."""
        if self.readers == 1:
            return None
        who = _readers(self.world_size, self.workers)
        again = "" if self.reading == 1 else f"; every sample is read by {self.reading} of them and kept by one"
        if self.way in ("workers", "readers"):
            text = f"The stream divides itself among {who}{again}."
        elif self.way == "shards":
            text = f"The {self.shards} shards of the stream are divided among {who}{again}."
        elif self.reading == 1:
            text = f"The stream gives each of {self.world_size} ranks samples of its own, and is read as it is."
        else:
            text = f"{who} take turns at the stream: every sample is read by {self.reading} of them and kept by one."
            if not self.too_few:
                text += (
                    " To read it once, give the data set num_shards and shard(num_shards, index), or let its __iter__ "
                    "divide it by get_worker_info()."
                )
            else:
                text += " It divides itself, but some of them would get nothing: give it more shards."
        if self.own_ranks and self.world_size > 1 and self.reading > 1:
            text += f" Each of {self.world_size} ranks has samples of its own."
        return text if self.note is None else f"{text} {self.note}"


class _Anything:
    def shard(self, num_shards: int, index: int) -> _Anything:
        return self


def _readers(ranks: int, workers: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)} x {workers} reader{'s' * (workers > 1)}"


def divide(
    dataset: Any,
    *,
    rank: int,
    world_size: int,
    workers: int,
    seed: int,
    own_ranks: bool = False,
    own_workers: bool = False,
    context: Any = None,
    processes: int = 0,
) -> Division:
    """Find out how to divide a data set; ranks that are connected must all call it.

    Args:
        dataset: An iterable data set. Its attribute `shards_itself`, if any, says whether it gives each reader samples
            of its own.
        rank: This process.
        world_size: Number of processes.
        workers: Readers in each process.
        seed: Seed of random draws during the test.
        own_ranks: The ranks are known to have samples of their own.
        own_workers: The workers are known to have samples of their own.
        context: How worker processes are started, as a torch loader takes it.
        processes: Number of worker processes.

    Raises:
        DataError: It cannot be divided so that each sample is read once.
    """
    workers = max(1, workers)
    declared = getattr(dataset, "shards_itself", None)
    if world_size * workers == 1:
        return Division(places=keeps_its_place(dataset, seed))
    if declared is True or (own_ranks and own_workers):
        places = all(_gathered(keeps_its_place(dataset, seed), own_ranks or world_size == 1))
        return Division(rank, world_size, workers, True, "workers", own_workers=True, places=places)
    views: list[list[int | str]] = []
    if declared is not False:
        views = [first_samples(dataset, seed, told, LOOKED_AT) for told in (None, (0, 2), (1, 2))]
    steady = not views or views[0] == first_samples(dataset, seed, None, LOOKED_AT)
    shards = shards_of(dataset)
    alone = own_ranks or world_size == 1
    every = _gathered((views, steady, keeps_its_place(dataset, seed), (shards, workers)), alone)
    seen, steadies, placed, numbers = (list(item) for item in zip(*every))
    alike = len(set(numbers)) == 1
    by_worker = all(steadies) and all(item and item[1] != item[2] for item in seen)  # must agree on all ranks
    found_own, note = _compared(dataset, seen, all(steadies))
    own_ranks = own_ranks or found_own
    empty = [number for number, item in enumerate(seen) if found_own and isinstance(item[0][0], str)]
    if empty:
        what = seen[empty[0]][0][0]
        error = "" if what == "end" else f" (reading it there fails with {what})"
        raise DataError(
            f"{_kind(dataset)} divides itself among {world_size} ranks and leaves nothing for rank {empty[0]}{error}: "
            "give it more shards, or train with fewer processes"
        )
    if found_own:
        astray = processes > 0 and views[0] != _seen_in_a_process(dataset, seed, context)
        if any(_gathered(astray, False)):
            raise DataError(
                f"{_kind(dataset)} gives each rank samples of its own, but not in a loader process, which does not "
                "know its rank: let it find out its rank when it is made, or set multiprocessing_context='fork'"
            )
    found = Division(
        rank, world_size, workers, own_ranks, own_workers=own_workers or by_worker, places=all(placed), note=note
    )
    if own_workers:
        return replace(found, way="workers")
    if shards is not None and (own_ranks or alike):
        return replace(found, way="shards", shards=shards)
    if by_worker and (own_ranks or alike):
        division = replace(found, way="workers" if own_ranks or world_size == 1 else "readers")
        lacking = any(_gives_nothing(dataset, seed, division.part(dataset, item).told) for item in range(workers))
        if not any(_gathered(lacking, alone)):
            return division
        found = replace(found, own_workers=False, too_few=True)
    return found


def has_own_batches(source: Any, world_size: int, seed: int) -> tuple[bool, str | None]:
    """Whether an iterable of batches, or a function that returns one, yields other batches on each rank; and a note.

    Raises:
        DataError: Some ranks read the same batches, others do not.
    """
    declared = getattr(source, "shards_itself", None)
    if world_size == 1 or declared is not None:
        return world_size > 1 and bool(declared), None
    views, again = ([first_samples(source, seed, None, LOOKED_AT // 4)] for _ in range(2))
    every = _gathered((views, views == again), False)
    return _compared(source, [item[0] for item in every], all(item[1] for item in every))


def _compared(source: Any, seen: list[list[list[int | str]]], steady: bool) -> tuple[bool, str | None]:
    """Compare the samples seen by each rank: whether ranks have their own, and what the user should know about it."""
    if len(seen) > 1 and any(NOT_COPIED in view for item in seen for view in item):
        once = isinstance(source, Iterator)
        return False, (
            f"{_kind(source)} cannot be copied, so it is not known whether each rank has its own samples: if so, "
            + ("pass a function that makes it." if once else "say so by shards_itself = True.")
        )
    if not steady:
        return False, (
            f"{_kind(source)} yields something else each time it is read from the same random state, so that samples "
            "may come twice or not at all: let it draw from `random`, `numpy.random` or `torch`, or from a generator "
            "with a fixed seed."
        )
    different = len({repr(item) for item in seen})
    if 1 < different < len(seen):
        raise DataError(
            f"{_kind(source)}: {len(seen)} ranks read {different} different streams, so some ranks would train on the "
            "samples of others; give every rank samples of its own, or all of them the same stream"
        )
    if different > 1:
        return True, "If that is not intended, give its shuffle the same seed on all ranks."
    first = seen[0][0] if seen[0] else []
    if len(seen) > 1 and len(set(first)) == 1 < len(first):
        return False, (
            f"Its first {len(first)} items are all alike, which does not show whether ranks have their own: if they "
            "do, say so by shards_itself = True."
        )
    return False, None


class _First(IterableDataset[list[int | str]]):
    """Yields the first samples that a process gets from a data set."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._read = (dataset, seed, None, LOOKED_AT)

    def __iter__(self) -> Iterator[list[int | str]]:
        yield first_samples(*self._read)


def _seen_in_a_process(dataset: Any, seed: int, context: Any) -> list[int | str]:
    """`first_samples` read in a worker process, which has no process group unless it was forked."""
    loader = DataLoader(_First(dataset, seed), batch_size=None, num_workers=1, multiprocessing_context=context)
    return list(next(iter(loader)))


def _gives_nothing(dataset: Any, seed: int, told: Told | None) -> bool:
    return isinstance(first_samples(dataset, seed, told, 1)[0], str)


def _kind(dataset: Any) -> str:
    return type(dataset).__name__


def _gathered(value: T, alone: bool) -> list[T]:
    """The values of all ranks, in rank order; only this rank's if they are not connected."""
    if alone or not (dist.is_available() and dist.is_initialized()):
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
