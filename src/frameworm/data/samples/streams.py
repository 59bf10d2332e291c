"""Iterable data sets in several ranks and workers: every sample once, read again or put back where the reader was."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from frameworm.data.samples.division import Division, Part
from frameworm.data.samples.held import Walk, read_state, reseed
from frameworm.data.samples.reader import Reader, copied, digest
from frameworm.data.samples.seeding import RandomState, mix, seed_process
from frameworm.data.samples.workers import SharedEpoch

log = logging.getLogger("frameworm")
# What a resumed reader tells that did not find its place by the data set's state.
FOUND = {
    "by reading": "the data set's state did not bring back the same samples, as where it shuffles in a buffer: the "
    "epoch was read again up to where the run had stopped",
    "otherwise": "the data set did not yield the same when the running epoch was read again: in this epoch some "
    "samples are trained twice and others not at all",
}
AHEAD = 8  # batches that are read before the loop has trained on them, by a transfer to a device


def is_stream(dataset: Any) -> bool:
    """Whether samples can only be had one after the other."""
    return isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__getitem__")


@dataclass(frozen=True)
class Begin:
    """Where an epoch begins that was read in part before.

    Attributes:
        epoch: The epoch it holds for; any other begins at its beginning.
        samples: Samples of the whole stream to leave out, if the readers have no places.
        turn: The reader whose batch comes first.
        places: Where each reader was; None for one that had not begun.
        dataset: A copy of the data set as it was before the epoch, to be read where its state fails; None: no copy.
    """

    epoch: int = 0
    samples: int = 0
    turn: int = 0
    places: tuple[Mapping[str, Any] | None, ...] = ()
    dataset: Any = None


@dataclass(slots=True)
class Placed:
    """A batch on its way from its reader, with the reader's place behind it; or, at the beginning, no batch."""

    worker: int
    batch: Any = None
    place: dict[str, Any] | None = None
    found: str = "by its state"

    def pin_memory(self) -> Placed:
        """What torch calls in a loader with `pin_memory`."""
        return Placed(self.worker, pin_memory(self.batch), self.place, self.found)


class Places:
    """Where the readers of a loader were after each of the last batches."""

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self._known: deque[tuple[int, dict[str, Any]]] = deque(maxlen=AHEAD)

    def after(self, batches: int) -> dict[str, Any] | None:
        """The places after so many batches of the epoch as plain data, for `begin`; None where they are not known."""
        return next((place for number, place in self._known if number == batches), None)

    def begin(self, epoch: int, saved: Mapping[str, Any] | None, dataset: Any) -> Begin | None:
        """How an epoch of a data set begins, as it is now; None if the places are of other readers."""
        if saved is None or len(saved["readers"]) != self._readers:
            return None
        spare = None
        with suppress(Exception):
            spare = copied(dataset)
        return Begin(epoch, turn=saved["turn"], places=tuple(saved["readers"]), dataset=spare)

    def batches(self, arriving: Iterator[Placed], begun: Mapping[str, Any] | None) -> Iterator[Any]:
        """The batches themselves, less what readers yield that do not come first."""
        number = 0 if begun is None else begun["batches"]
        readers = [None] * self._readers if begun is None else list(begun["readers"])
        self._known.clear()
        told: set[str] = set()
        for item in arriving:
            if item.place is None:
                continue
            if item.found in FOUND and item.found not in told:
                told.add(item.found)
                log.warning("%s", FOUND[item.found])
            number += 1
            readers[item.worker] = item.place
            turn = (item.worker + 1) % self._readers
            self._known.append((number, {"batches": number, "turn": turn, "readers": list(readers)}))
            yield item.batch


def _states(roots: Mapping[str, Any]) -> dict[str, int]:
    """What tells apart the states of the generators that some objects hold, by where they are."""
    return {path: digest(read_state(item)) for path, item in Walk(roots).generators.items()}


@dataclass(slots=True)
class _Where:
    """How far a reader has come in an epoch."""

    epoch: int
    worker: int
    made: int = 0  # batches
    turn: int = 0  # rounds
    ended: bool = False
    found: str = "by its state"  # how a resumed reader found its place


def _told(samples: list[Any]) -> int:
    """A number that tells the samples of different batches apart, by a few of them."""
    return digest([len(samples), *samples[:: max(1, len(samples) // 4)]])


class StreamBatches(IterableDataset[Any]):
    """One rank's batches of a stream.

    A reader reads its part of the data set in rounds of ranks x batch_size samples, for as many ranks as take turns at
    it. Of each round a rank takes every ranks-th sample, and of n workers that take turns the w-th assembles rounds w,
    w + n, ... So a part has one order of samples for all its readers; it is drawn under random state that
    follows from seed and epoch.

    Args:
        inner: The user's data set; its `set_epoch`, or its part's, is called if there is one.
        batch_size: Samples per batch on one rank.
        collate: Makes a batch of a list of samples.
        division: How readers divide the data set.
        seed: Seed of whatever the data set draws.
        epoch: The epoch, shared with the loop.
        drop_last: Leave out the last round when it is short.
        begin: Where to begin.
        prepared: A `worker_init_fn` runs in each worker before.
    """

    def __init__(
        self,
        inner: Any,
        batch_size: int,
        collate: Callable[[list[Any]], Any],
        *,
        division: Division,
        seed: int,
        epoch: SharedEpoch,
        drop_last: bool,
        begin: Begin,
        prepared: bool = False,
    ) -> None:
        self.inner = inner
        self._batch_size = batch_size
        self._collate = collate
        self._division = division
        self._seed = seed
        self._epoch = epoch
        self._drop_last = drop_last
        self._begin = begin
        self._prepared = prepared
        self._born = _states({"dataset": inner})
        self._seeds: dict[str, tuple[int, int]] | None = None

    def __iter__(self) -> Iterator[Any]:
        # All of this happens here rather than at the first batch: by then the loop may have moved to the next epoch.
        info = get_worker_info()
        worker = 0 if info is None else info.id
        epoch = self._epoch.value
        begin = self._begin if self._begin.epoch == epoch else Begin()
        place = begin.places[worker] if begin.places else None
        if place is None:
            reader, part = self._opened(worker, info is not None)
            with reader:
                for _ in reader.take(begin.samples):
                    pass
            where = _Where(epoch, worker)
        else:
            where = _Where(epoch, worker, place["made"], place["turn"], place["ended"])
            reader, part = self._at(place, where, info is not None)
        rounds = self._rounds(reader, part, where, info is not None)
        return self._late(rounds, worker) if worker < begin.turn else rounds

    def _opened(self, worker: int, helped: bool, place: Mapping[str, Any] | None = None) -> tuple[Reader, Part]:
        """A reader at the beginning of the epoch or at a place, and what it reads."""
        epoch, division = self._epoch.value, self._division
        part = division.part(self.inner, worker)
        set_epoch = getattr(part.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        if helped:
            # Workers may live on from epoch to epoch; what the data set's own generators draw must not depend on that.
            seeds = self._seeds = self._seeds or self._own_seeds(worker)
            for number, (path, generator) in enumerate(Walk({"dataset": part.dataset}).generators.items()):
                reseed(generator, mix(self._seed, epoch, number, *seeds.get(path, ())))
        alone = part.ranks == part.workers == 1 and division.readers > 1
        own = (self._seed, epoch, 1, division.rank, worker) if alone else None
        reader = Reader(part.dataset, (self._seed, epoch), own, part.told)
        with reader:
            reader.open(None if place is None else place["reader"])
        if place is not None:
            reader.random = place["random"]
        return reader, part

    def _own_seeds(self, worker: int) -> dict[str, tuple[int, int]]:
        """For each of the data set's generators, what makes it another than those of other ranks and workers.

        Where all had the same, as one that shuffles files before they are divided, they must go on alike.
        """
        own_ranks = self._division.own_ranks and self._division.world_size > 1
        now = _states({"dataset": self.inner}) if self._prepared else self._born
        return {
            path: (born if own_ranks else 0, 0 if now.get(path) == born else worker + 1)
            for path, born in self._born.items()
        }

    def _at(self, place: Mapping[str, Any], where: _Where, helped: bool) -> tuple[Reader, Part]:
        """A reader at a place, and what it reads.

        The data set is put one batch before the place, and that batch must be the one that was read then: a state that
        lacks what is in a shuffle buffer, for example, brings back others. Then the epoch is read again up to there.
        """
        spare = self._begin.dataset
        before = None if spare is None else place["from"]  # what cannot be copied cannot be tried
        turn = 0 if before is None else before["turn"]
        if before is None and spare is not None:  # its counters may have been restored to where the run stopped
            self._put_back(spare)
        reader, part = self._opened(where.worker, helped, before)
        if self._read_up_to(reader, part, (turn, place["turn"])) == place["check"]:
            return reader, part
        where.found = "otherwise"
        if before is not None:
            del reader, part  # what a generator does at its end, it does to what it has read
            self._put_back(spare)
            reader, part = self._opened(where.worker, helped)
            if self._read_up_to(reader, part, (0, place["turn"])) == place["check"]:
                where.found = "by reading"
        return reader, part

    def _put_back(self, spare: Any) -> None:
        """Let the data set be what its copy is: the object stays, for the next epoch is read from it too."""
        try:
            vars(self.inner).clear()
            vars(self.inner).update(vars(spare))
        except TypeError:  # without a dictionary
            self.inner = spare

    def _read_up_to(self, reader: Reader, part: Part, turns: tuple[int, int]) -> int:
        """Read some rounds and return what tells this reader's samples of the last."""
        kept: list[Any] = []
        for turn in range(*turns):
            kept = self._round(reader, part, turn)[0]
        return _told(kept)

    @staticmethod
    def _late(rounds: Iterator[Any], worker: int) -> Iterator[Any]:
        """The rounds of a reader whose next batch is not the first: torch asks the readers in order of their number."""
        yield Placed(worker)
        yield from rounds

    def _round(self, reader: Reader, part: Part, turn: int) -> tuple[list[Any], int]:
        """This reader's samples of a round, and how many the round has."""
        mine = turn % part.workers == part.worker
        kept: list[Any] = []
        count = 0
        with reader:
            for sample in reader.take(part.ranks * self._batch_size):
                if mine and count % part.ranks == part.rank:
                    kept.append(sample)
                count += 1
        return kept, count

    def _rounds(self, reader: Reader, part: Part, where: _Where, helped: bool) -> Iterator[Any]:
        size = part.ranks * self._batch_size
        before: dict[str, Any] | None = None
        if self._division.places and where.made:
            before = self._spot(reader, where.turn)
        while not where.ended:
            kept, count = self._round(reader, part, where.turn)
            where.turn += 1
            where.ended = count < size
            if not kept or (where.ended and self._drop_last):
                continue
            where.made += 1
            if not self._division.places:
                yield self._collated(kept, where, helped)
                continue
            place = {
                "from": before,
                "check": _told(kept),
                "turn": where.turn,
                "made": where.made,
                "ended": where.ended,
            }
            before = self._spot(reader, where.turn)
            yield Placed(where.worker, self._collated(kept, where, helped), place, where.found)

    @staticmethod
    def _spot(reader: Reader, turn: int) -> dict[str, Any]:
        with reader:
            place = reader.place()
        return {"reader": place, "random": reader.random, "turn": turn}

    def _collated(self, samples: list[Any], where: _Where, helped: bool) -> Any:
        """A batch. What it takes at random follows from its number, if it may be made without those before it."""
        seeds = (self._seed, where.epoch, self._division.rank, where.worker, where.made, 1)
        if helped:
            seed_process(*seeds)
        elif self._division.places:
            with RandomState(*seeds):
                return self._collate(samples)
        return self._collate(samples)  # in the loop's own process it shares the loop's random state, as always
