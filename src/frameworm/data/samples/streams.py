"""Iterable data sets in several ranks and workers: every sample once, in an order that depends on neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import IterableDataset, get_worker_info

from frameworm.data.samples.held import Walk, reseed
from frameworm.data.samples.seeding import RandomState, mix, seed_process
from frameworm.data.samples.workers import SharedEpoch


def is_stream(dataset: Any) -> bool:
    """Whether samples can only be had one after the other."""
    return isinstance(dataset, IterableDataset) or not hasattr(type(dataset), "__getitem__")


class StreamBatches(IterableDataset[Any]):
    """One rank's batches of a stream.

    The stream is read in rounds of world_size x batch_size samples. Of each round a rank takes every world_size-th
    sample, and worker w of n assembles rounds w, w + n, ... So every reader draws the whole stream (which must come
    out the same everywhere: it is drawn under random state that follows from seed and epoch) and keeps its part. A
    data set for which that is too slow shards itself and says so by `shards_itself = True`.

    Args:
        inner: The user's data set; its `set_epoch`, if any, is called.
        batch_size: Samples per batch on one rank.
        collate: Makes a batch of a list of samples.
        rank: This process.
        world_size: Number of processes among which the stream is split.
        seed: Seed of whatever the data set draws.
        epoch: The epoch, shared with the loop.
        drop_last: Leave out the last round when it is short.
        workers_split: Whether workers take different rounds; otherwise the data set, or the user's `worker_init_fn`,
            gives each worker its own samples.
        own_seed: A number that is different for streams that should draw different things.
        skip: Epoch and number of samples of the whole stream that are left out at its beginning.
    """

    def __init__(
        self,
        inner: Any,
        batch_size: int,
        collate: Callable[[list[Any]], Any],
        *,
        rank: int,
        world_size: int,
        seed: int,
        epoch: SharedEpoch,
        drop_last: bool,
        workers_split: bool,
        own_seed: int = 0,
        skip: tuple[int, int] = (0, 0),
    ) -> None:
        self.inner = inner
        self._batch_size = batch_size
        self._collate = collate
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._epoch = epoch
        self._drop_last = drop_last
        self._workers_split = workers_split
        self._own_seed = own_seed
        self._skip = skip
        self._place: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Any]:
        # All of this happens here rather than at the first batch: by then the loop may have moved to the next epoch.
        worker, workers = self._worker_place()
        epoch = self._epoch.value
        set_epoch = getattr(self.inner, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        drawn_by = 0 if self._workers_split else 1 + worker
        state = RandomState(self._seed, epoch, self._own_seed, drawn_by)
        if self._place is not None:
            # What collate functions draw; in the loop's own process they share its random state, as always.
            seed_process(self._seed, epoch, self._rank, worker, 1)
            # Workers may live on from epoch to epoch; what the data set's own generators draw must not depend on that.
            for place, generator in enumerate(Walk({"dataset": self.inner}).generators.values()):
                reseed(generator, mix(self._seed, epoch, self._own_seed, drawn_by, place))
        with state:
            samples = iter(self.inner)
        skip = self._skip[1] if self._skip[0] == epoch else 0
        return self._rounds(samples, state, skip, worker, workers if self._workers_split else 1)

    def _rounds(
        self, samples: Iterator[Any], state: RandomState, skip: int, worker: int, workers: int
    ) -> Iterator[Any]:
        with state:
            next(islice(samples, skip, skip), None)
        size = self._world_size * self._batch_size
        turn = 0
        while True:
            mine = workers == 1 or turn % workers == worker
            kept: list[Any] = []
            count = 0
            with state:
                for sample in islice(samples, size):
                    if mine and count % self._world_size == self._rank:
                        kept.append(sample)
                    count += 1
            if kept and (count == size or not self._drop_last):
                yield self._collate(kept)
            if count < size:
                return
            turn += 1

    def _worker_place(self) -> tuple[int, int]:
        """Number of this worker and of all; (0, 1) in the loop's own process."""
        if self._place is None:
            info = get_worker_info()
            if info is None:
                return 0, 1
            self._place = (info.id, info.num_workers)
            if self._workers_split:
                # A data set that splits itself by get_worker_info, as torch's manual suggests, would be split twice.
                torch_worker._worker_info = None
        return self._place
