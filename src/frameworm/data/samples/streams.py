"""Iterable data sets in several ranks and workers: every sample once, and resumable, by state or by reading again."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from frameworm.data.samples.division import Division, Part
from frameworm.data.samples.held import Walk, read_state, reseed
from frameworm.data.samples.reader import Reader, copied, digest
from frameworm.data.samples.seeding import RandomState, mix, seed_process
from frameworm.data.samples.workers import SharedEpoch
from frameworm.torch_private.loaders import pin_memory

log = logging.getLogger("frameworm")
# Warnings of a resumed reader that could not restore its position from the data set's state.
FOUND = {
    "by reading": "the data set's state did not bring back the same samples, as where it shuffles in a buffer: the "
    "epoch was read again up to where the run had stopped",
    "otherwise": "the data set did not yield the same when the running epoch was read again: in this epoch some "
    "samples are trained twice and others not at all",
}
AHEAD = 8  # batches that may be read before the loop has trained on them, by a transfer to a device


def is_stream(dataset: Any) -> bool:
    """Whether samples can only be read in sequence."""
    return isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__getitem__")


@dataclass(frozen=True)
class Begin:
    """Where to begin an epoch that was partly read before.

    Attributes:
        epoch: The epoch it applies to; others start at the beginning.
        samples: Samples of the whole stream to skip, if the readers' positions are unknown.
        turn: The reader whose batch comes first.
        places: Position of each reader; None for one that had not started.
        dataset: A copy of the data set from before the epoch, to be read if its state fails; None: no copy.
    """

    epoch: int = 0
    samples: int = 0
    turn: int = 0
    places: tuple[Mapping[str, Any] | None, ...] = ()
    dataset: Any = None


@dataclass(slots=True)
class Placed:
    """A batch with its reader's position after it; or a placeholder without a batch at the beginning."""

    worker: int
    batch: Any = None
    place: dict[str, Any] | None = None
    found: str = "by its state"

    def pin_memory(self) -> Placed:
        """Called by torch's loader if `pin_memory` is set."""
        return Placed(self.worker, pin_memory(self.batch), self.place, self.found)


class Places:
    """Positions of a loader's readers after each of the last batches."""

    def __init__(self, readers: int) -> None:
        self._readers = readers
        self._known: deque[tuple[int, dict[str, Any]]] = deque(maxlen=AHEAD)

    def after(self, batches: int) -> dict[str, Any] | None:
        """The positions after `batches` batches of the epoch as plain data, for `begin`; None if unknown."""
        return next((place for number, place in self._known if number == batches), None)

    def begin(self, epoch: int, saved: Mapping[str, Any] | None, dataset: Any) -> Begin | None:
        """How to begin an epoch at saved positions; None if they belong to other readers."""
        if saved is None or len(saved["readers"]) != self._readers:
            return None
        spare = None
        with suppress(Exception):
            spare = copied(dataset)
        return Begin(epoch, turn=saved["turn"], places=tuple(saved["readers"]), dataset=spare)

    def batches(self, arriving: Iterator[Placed], begun: Mapping[str, Any] | None) -> Iterator[Any]:
        """Yield the batches without the readers' placeholders, and record positions."""
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
    """Digests of the states of the generators that some objects hold, by path."""
    return {path: digest(read_state(item)) for path, item in Walk(roots).generators.items()}


@dataclass(slots=True)
class _Where:
    """How far a reader has come in an epoch."""

    epoch: int
    worker: int
    made: int = 0  # batches
    turn: int = 0  # rounds
    ended: bool = False
    found: str = "by its state"  # how a resumed reader found its position


def _told(samples: list[Any]) -> int:
    """A digest of a batch's samples, computed from a few of them."""
    return digest([len(samples), *samples[:: max(1, len(samples) // 4)]])


class StreamBatches(IterableDataset[Any]):
    """One rank's batches of a stream.

    A reader reads its part of the data set in rounds of ranks x batch_size samples, where `ranks` is the number of
    ranks that share the part. A rank takes every ranks-th sample of a round, and of n workers that take turns worker w
    assembles rounds w, w + n, ... So all readers of a part see one order of samples, which is drawn under a random
    state that depends on seed and epoch.

    Args:
        inner: The user's data set; its `set_epoch`, or its part's, is called if there is one.
        batch_size: Samples per batch on one rank.
        collate: Makes a batch of a list of samples.
        division: How readers divide the data set.
        seed: Seed of the data set's random draws.
        epoch: The epoch, shared with the training loop.
        drop_last: Drop the last round if it is short.
        begin: Where to begin.
        prepared: A `worker_init_fn` runs in each worker first.
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
        # All of this happens now rather than at the first batch: by then the loop may have moved to the next epoch.
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
        """A reader at the beginning of the epoch or at a place, and the part it reads."""
        epoch, division = self._epoch.value, self._division
        part = division.part(self.inner, worker)
        set_epoch = getattr(part.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        if helped:
            # Workers may survive epochs; draws of the data set's own generators must not depend on that.
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
        """For each of the data set's generators, numbers that distinguish it from those of other ranks and workers.

        Generators that were equal everywhere, as for shuffling files before they are divided, must stay equal.
        """
        own_ranks = self._division.own_ranks and self._division.world_size > 1
        now = _states({"dataset": self.inner}) if self._prepared else self._born
        return {
            path: (born if own_ranks else 0, 0 if now.get(path) == born else worker + 1)
            for path, born in self._born.items()
        }

    def _at(self, place: Mapping[str, Any], where: _Where, helped: bool) -> tuple[Reader, Part]:
        """A reader restored to a place, and the part it reads.

        The data set is restored to one batch before the place, and that batch must equal the one read then: a state
        without the content of a shuffle buffer, for example, yields other samples. In that case the epoch is read again
        up to there.
        """
        spare = self._begin.dataset
        before = None if spare is None else place["from"]  # without a copy the state cannot be tried
        turn = 0 if before is None else before["turn"]
        if before is None and spare is not None:  # its counters may have been restored to where the run stopped
            self._put_back(spare)
        reader, part = self._opened(where.worker, helped, before)
        if self._read_up_to(reader, part, (turn, place["turn"])) == place["check"]:
            return reader, part
        where.found = "otherwise"
        if before is not None:
            del reader, part  # closing its generator now keeps cleanup code off the restored data set
            self._put_back(spare)
            reader, part = self._opened(where.worker, helped)
            if self._read_up_to(reader, part, (0, place["turn"])) == place["check"]:
                where.found = "by reading"
        return reader, part

    def _put_back(self, spare: Any) -> None:
        """Reset the data set to its copy, keeping the object, from which the next epoch is read too."""
        try:
            vars(self.inner).clear()
            vars(self.inner).update(vars(spare))
        except TypeError:  # it has no __dict__
            self.inner = spare

    def _read_up_to(self, reader: Reader, part: Part, turns: tuple[int, int]) -> int:
        """Read some rounds and return a digest of this reader's samples of the last one."""
        kept: list[Any] = []
        for turn in range(*turns):
            kept = self._round(reader, part, turn)[0]
        return _told(kept)

    @staticmethod
    def _late(rounds: Iterator[Any], worker: int) -> Iterator[Any]:
        """Put a placeholder before the rounds of a reader that is not first: torch asks the readers by number."""
        yield Placed(worker)
        yield from rounds

    def _round(self, reader: Reader, part: Part, turn: int) -> tuple[list[Any], int]:
        """This reader's samples of a round, and the total number of samples in the round."""
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
        """Collate a batch, under a seed of its own if it may be made without the batches before it."""
        seeds = (self._seed, where.epoch, self._division.rank, where.worker, where.made, 1)
        if helped:
            seed_process(*seeds)
        elif self._division.places:
            with RandomState(*seeds):
                return self._collate(samples)
        return self._collate(samples)  # in the main process it shares the training loop's random state
