"""Worker processes: how many there are, how they are seeded, and what they share with the training loop."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, Subset, get_worker_info

from frameworm.data.samples.held import Walk, reseed
from frameworm.data.samples.seeding import mix, seed_process
from frameworm.launch.parent import call_after_parent

MOST_AUTOMATIC_WORKERS = 4
MEASURED_BATCHES = 48
MEASURED_S = 1.0


def base_of(dataset: Any) -> Any:
    """The data set behind nested subsets."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def usable_workers(local_world_size: int) -> int:
    """Worker processes that each rank of this machine may start while leaving every rank a core for its loop."""
    from frameworm.hardware.host import usable_cpus

    return max(0, usable_cpus() // max(1, local_world_size) - 1)


def automatic_workers(dataset: Any, local_world_size: int) -> int:
    """The default worker count: none for data sets that assemble whole batches without Python per sample."""
    if hasattr(base_of(dataset), "__getitems__"):
        return 0
    return min(MOST_AUTOMATIC_WORKERS, usable_workers(local_world_size))


def worker_candidates(most: int) -> list[int]:
    """Counts worth timing: 0, then powers of two up to `most`."""
    candidates = [0]
    count = 1
    while count <= most:
        candidates.append(count)
        count *= 2
    return candidates


def measure_workers(
    candidates: Sequence[int],
    batches_of: Callable[[int], Iterable[Any]],
    *,
    batches: int = MEASURED_BATCHES,
    limit_s: float = MEASURED_S,
) -> dict[int, float]:
    """Seconds per batch for each worker count, without the start of the processes.

    Args:
        candidates: Worker counts to try.
        batches_of: Returns a new loader for a count.
        batches: Most batches to draw per count.
        limit_s: Most seconds to spend per count after the first batches.
    """
    return {count: _seconds_per_batch(iter(batches_of(count)), max(1, count), batches, limit_s) for count in candidates}


def _seconds_per_batch(drawn: Iterator[Any], ahead: int, batches: int, limit_s: float) -> float:
    began = time.perf_counter()
    # Leave out each worker's first batch, which was made while the processes started.
    early = sum(1 for _ in zip(range(ahead), drawn))
    started = time.perf_counter()
    count = 0
    for _ in drawn:
        count += 1
        if count >= batches or time.perf_counter() - started > limit_s:
            break
    now = time.perf_counter()
    if count == 0:
        return (now - began) / max(early, 1)
    return (now - started) / count


def as_it_is(batch: Any) -> Any:
    """Collate function for samples that are complete batches already."""
    return batch


class SharedEpoch:
    """The epoch in shared memory, so that workers that survive an epoch can read it."""

    def __init__(self) -> None:
        self._value = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def value(self) -> int:
        """The current epoch."""
        return int(self._value.item())

    @value.setter
    def value(self, epoch: int) -> None:
        self._value.fill_(epoch)


class SeededDataset(Dataset[Any]):
    """The user's data set as workers read it: reseeded for every batch.

    That includes generators held by the data set. The state depends on seed, epoch and the batch's first sample, so
    not on which worker draws the batch, how many workers there are, or whether the run was resumed.
    """

    def __init__(self, inner: Any, seed: int, epoch: SharedEpoch) -> None:
        self.inner = inner
        self._seed = seed
        self._epoch = epoch
        self._many: Callable[[list[Any]], Any] | None = getattr(inner, "__getitems__", None)
        self._held: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.inner)

    def __getitems__(self, indices: list[Any]) -> Any:
        first = indices[0]
        if not isinstance(first, int):
            first = zlib.crc32(repr(first).encode())
        if self._held is None:  # here, because only the worker has this copy of the data set
            self._held = list(Walk({"dataset": self.inner}).generators.values())
        seed_process(self._seed, self._epoch.value, abs(first))
        for place, generator in enumerate(self._held):
            reseed(generator, mix(self._seed, self._epoch.value, abs(first), place))
        if self._many is not None:
            return self._many(indices)
        return [self.inner[index] for index in indices]


class WorkerStart:
    """Runs first in every worker: shows the user's `worker_init_fn` the user's own data set."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        # Torch also watches the worker's parent, but that may be the fork server; and a worker that exits normally
        # waits until all its batches have been read, which no longer happens.
        call_after_parent(lambda: os._exit(1))
        info = get_worker_info()
        assert info is not None, "called outside a worker"
        # torch guards this attribute; users expect the data set they passed, not the wrapper around it.
        object.__setattr__(info, "dataset", info.dataset.inner)  # type: ignore[attr-defined]
        if self._then is not None:
            self._then(worker_id)
