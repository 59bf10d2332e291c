"""Where the samples of a rank's batches come from, so that results of several ranks can be put back in order.

A sample's place is a pair of numbers that sorts as the samples do in the data set; or, if the loader draws them in an
order that cannot be undone (a sampler, an iterable), in the order in which a single process would read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from frameworm.data.adopt import RankBatches, rebuilt
from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.prefetch import CudaDataLoader
from frameworm.data.samples.sampling import OrderedSplitSampler, StepSampler

Place = tuple[int, int]
Places = Callable[[int], list[Place]]  # maps the number of samples in a batch to their places


def unshuffled(loader: Any) -> Any:
    """The loader with its samples in data set order if it is a shuffling torch loader; any other loader as it is."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler or not isinstance(batches.sampler, RandomSampler):
        return loader
    sampler = batches.sampler
    if sampler.replacement or len(sampler) != len(loader.dataset):  # type: ignore[arg-type]
        return loader
    kept = range(len(sampler) // batches.batch_size * batches.batch_size) if batches.drop_last else None
    return rebuilt(loader, batches.batch_size, False, 0, sampler=kept)


def places_of(loader: Any, rank: int, world_size: int) -> Iterator[Places] | None:
    """The places of each batch that a rank will read in this epoch; None if they are unknown.

    Args:
        loader: The result of `adopt_loader` for evaluation, without fillers.
        rank: This process.
        world_size: Number of processes.
    """
    inner = loader.loader if isinstance(loader, CudaDataLoader) else loader
    if isinstance(inner, OptimizedDataLoader):
        if inner.sampler is not None:
            return _planned(inner.sampler)
        if world_size == 1:
            return _by_batch(0, 1)
        return _in_turns(rank, world_size, inner.batch_size) if inner.takes_turns else None
    if isinstance(inner, RankBatches):
        return _by_batch(inner.rank, inner.world_size)
    return _by_batch(0, 1) if world_size == 1 else None


def _planned(sampler: StepSampler) -> Iterator[Places]:
    drawn = isinstance(sampler, OrderedSplitSampler)
    for step in range(sampler.steps_per_epoch):
        begin = step * sampler.global_batch
        for piece, samples in zip(sampler.pieces(step), sampler.indices(step)):
            if piece.samples:
                numbers = range(begin + piece.start, begin + piece.stop) if drawn else samples.tolist()
                yield _fixed([(number, 0) for number in numbers])


def _fixed(places: list[Place]) -> Places:
    # A data set may assemble fewer samples than requested.
    return lambda size: places if size == len(places) else [(*places[0][:1], item) for item in range(size)]


def _by_batch(first: int, world_size: int) -> Iterator[Places]:
    for number in count(first, world_size):
        yield lambda size, number=number: [(number, item) for item in range(size)]  # type: ignore[misc]


def _in_turns(rank: int, world_size: int, batch_size: int) -> Iterator[Places]:
    for number in count():
        begin = number * batch_size * world_size + rank
        yield lambda size, begin=begin: [(begin + item * world_size, 0) for item in range(size)]  # type: ignore[misc]
