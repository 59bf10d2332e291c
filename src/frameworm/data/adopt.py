"""Adapt a user's own loader to a run of several processes, so that no rank trains on another's samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from frameworm.data.batches.sizes import batch_size_of
from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.prefetch import CudaDataLoader
from frameworm.data.samples.division import has_own_batches
from frameworm.data.samples.reader import has_state
from frameworm.data.samples.seeding import RandomState
from frameworm.data.samples.streams import is_stream
from frameworm.errors import ConfigError, DataError

SEED_LIMIT = 2**63


class RankBatches:
    """Every `world_size`-th batch of an iterable, starting at this rank's; ranks may end one batch apart.

    Args:
        source: The iterable, or a function that returns one.
        rank: This process.
        world_size: Number of processes.
        seed: Seed of a random state of the source's own, used instead of the process's, so that all ranks draw
            the same order; None: it draws from the state of the training loop.
    """

    def __init__(self, source: Any, rank: int, world_size: int, seed: int | None = None) -> None:
        self.source = source
        self.rank = rank
        self.world_size = world_size
        self._seed = seed
        self._epoch = 0
        self._state: RandomState | None = None
        self._skip = 0
        self._begin = rank
        self._random: Mapping[str, Any] | None = None

    def after_own(self, random: Mapping[str, Any] | None) -> None:
        """Tell the next iteration, and only that one, that the source is already behind this rank's last batch.

        Args:
            random: What the property `random` returned at that time.
        """
        self._begin = self.world_size - 1
        self._random = random

    @property
    def random(self) -> dict[str, Any] | None:
        """The source's random state as plain data; None if it has none of its own or has not been iterated yet."""
        return None if self._state is None else self._state.saved()

    def skip(self, samples: int) -> None:
        """Start the next iteration, and only that one, after the given number of samples of the source."""
        self._skip = samples

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and pass it on to the source if it has `set_epoch`."""
        self._epoch = epoch
        set_loader_epoch(self.source, epoch)

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        begin, self._begin = self._begin, self.rank
        random, self._random = self._random, None
        self._state = None if self._seed is None else RandomState(self._seed, self._epoch)
        if self._state is not None and random is not None:
            self._state.load(random)
        with self._state or nullcontext():
            batches = after_samples(iter(self.source if isinstance(self.source, Iterable) else self.source()), skip)
        own = islice(batches, begin, None, self.world_size)
        return own if self._state is None else _drawn(own, self._state)

    def __len__(self) -> int:
        return max(0, -(-(len(self.source) - self.rank) // self.world_size))


def _drawn(batches: Iterator[Any], state: RandomState) -> Iterator[Any]:
    """Yield batches, drawing each of them under the given random state."""
    while True:
        with state:
            found = list(islice(batches, 1))
        if not found:
            return
        yield found[0]


def after_samples(batches: Iterator[Any], samples: int) -> Iterator[Any]:
    """Skip the first `samples` samples and return the remaining batches.

    Raises:
        DataError: That point lies in the middle of a batch.
    """
    passed = 0
    while passed < samples:
        batch = next(batches, None)
        if batch is None:
            break
        passed += samples_in(batch)
    if passed > samples:
        raise in_a_batch(samples)
    return batches


def in_a_batch(samples: int) -> DataError:
    """The error for resuming at a point in the middle of one of the loader's batches."""
    return DataError(
        f"the run stopped after {samples} samples of the epoch, which is in the middle of one of this loader's "
        "batches; resume with the batch size it had, or one that divides that number"
    )


def samples_in(batch: Any) -> int:
    """Samples in a batch; a batch of unknown size counts as one."""
    size = batch_size_of(batch)
    return 1 if size is None else size


def adopt_loader(
    loader: Any,
    *,
    rank: int,
    world_size: int,
    accumulation: int = 1,
    seed: int = 0,
    fill_empty: bool = True,
    local_world_size: int | None = None,
) -> tuple[Any, str | None]:
    """Make a loader serve one rank of a run.

    Args:
        loader: An `OptimizedDataLoader`, a torch `DataLoader`, any iterable of batches, or a function that returns one.
        rank: This process.
        world_size: Number of processes.
        accumulation: Micro-batches per step.
        seed: Seed of the order if the loader has none of its own.
        fill_empty: As in `OptimizedDataLoader.create`; False for evaluation.
        local_world_size: Ranks on this machine.

    Returns:
        The loader to use, and a sentence for the log if it is not the given one. With one process, most loaders are
        used as they are.

    Raises:
        DataError: It cannot be split; the message says what to do instead.
        ConfigError: Its distributed sampler was made for other ranks.
    """
    if isinstance(loader, CudaDataLoader):
        inner, note = adopt_loader(
            loader.loader,
            rank=rank,
            world_size=world_size,
            accumulation=accumulation,
            seed=seed,
            fill_empty=fill_empty,
            local_world_size=local_world_size,
        )
        return (loader if inner is loader.loader else CudaDataLoader(inner, loader.device)), note
    if not isinstance(loader, Iterable) and not callable(loader):
        raise DataError(
            f"{type(loader).__name__} is not a loader: it cannot be iterated; pass a DataLoader, an "
            "OptimizedDataLoader, or any iterable of batches"
        )
    adopted, note = loader, None
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        adopted, note = _divide_stream(loader, rank, world_size, seed)
    elif world_size > 1 and not isinstance(loader, OptimizedDataLoader):
        if isinstance(loader, DataLoader):
            adopted, note = _split_torch_loader(loader, rank, world_size, seed, may_pad=fill_empty)
        else:
            adopted, note = _split_batches(loader, rank, world_size, seed)
    elif not isinstance(loader, Iterable):
        adopted = RankBatches(loader, 0, 1)
    if isinstance(adopted, OptimizedDataLoader):
        adopted.shard(rank, world_size, accumulation, fill_empty=fill_empty, local_world_size=local_world_size)
        if is_stream(adopted.dataset):
            note = _with_state(adopted.division.describe(), adopted)
    return adopted, note


def set_loader_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch` on the loader, its samplers or its iterable data set, whichever has it first."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    dataset = getattr(loader, "dataset", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    for listener in (loader, *samplers, dataset if isinstance(dataset, IterableDataset) else None):
        set_epoch: Callable[[int], None] | None = getattr(listener, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
            return


def _divide_stream(loader: DataLoader[Any], rank: int, world_size: int, seed: int) -> tuple[Any, str | None]:
    """The torch loader over an iterable data set, or one of ours in its place.

    The given loader is kept if only one process reads the data and its position cannot be saved. Several readers may
    shuffle by the process's random state before they divide the samples, and that state must be the same for all.
    """
    ours = rebuilt(loader, loader.batch_size or 1, loader.drop_last, seed)
    ours.shard(rank, world_size)
    division = ours.division
    if loader.batch_size is None:
        if division.workers > 1 and not division.own_workers:
            raise DataError(
                f"each of {division.workers} workers of the DataLoader would read all of "
                f"{type(loader.dataset).__name__}, and with batch_size=None its batches cannot be dealt out: let it "
                "divide itself by get_worker_info(), set num_workers to 0 or 1, or set batch_size"
            )
        return (loader, division.describe()) if division.as_it_is else _turns(loader, rank, world_size, seed)
    return (loader if division.readers == 1 and not division.places else ours), None


def _with_state(note: str | None, loader: OptimizedDataLoader) -> str | None:
    """Add to the note how a resumed run uses the data set's state."""
    if loader.division.places:
        state = "A resumed run continues from the data set's saved state, if that brings back the same samples."
    elif has_state(loader.dataset):
        state = (
            f"The state of {type(loader.dataset).__name__} does not bring back the same samples (a shuffle buffer, for "
            "instance, is not in it), so a resumed run reads the epoch again up to where it stopped."
        )
    else:
        return note
    return state if note is None else f"{note} {state}"


def _split_torch_loader(
    loader: DataLoader[Any], rank: int, world_size: int, seed: int, may_pad: bool
) -> tuple[Any, str | None]:
    batch_sampler = loader.batch_sampler
    for sampler in (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        if _is_distributed(sampler):
            _check_ranks(sampler, rank, world_size)
            if not may_pad and type(sampler) is DistributedSampler and loader.batch_size is not None:
                return rebuilt(loader, loader.batch_size, False, seed), (
                    "The validation loader's DistributedSampler repeats samples to make the ranks even; every sample "
                    "is counted once instead."
                )
            return loader, None
    if batch_sampler is None:
        raise DataError(
            "the DataLoader has batch_size=None: its data set alone knows what a batch is, so samples cannot be split "
            "among ranks; set batch_size, or pass a sampler that yields this rank's batches only and has the "
            "attributes num_replicas and rank"
        )
    if type(batch_sampler) is not BatchSampler:
        raise DataError(
            f"the DataLoader's own batch_sampler ({type(batch_sampler).__name__}) cannot be split among ranks; pass "
            "sampler= and batch_size= instead, or let it yield this rank's batches only and give it the attributes "
            "num_replicas and rank"
        )
    return _split_samples(loader, batch_sampler, world_size, seed, evaluation=not may_pad)


def _split_samples(
    loader: DataLoader[Any], batches: BatchSampler, world_size: int, seed: int, *, evaluation: bool
) -> tuple[Any, str]:
    """One of our loaders over the same data set, in the order the given one would have used."""
    sampler, dataset = batches.sampler, loader.dataset
    shuffle = isinstance(sampler, RandomSampler)
    plain = isinstance(sampler, (RandomSampler, SequentialSampler)) and len(sampler) == len(dataset)  # type: ignore[arg-type]
    if plain and not getattr(sampler, "replacement", False):
        own, order = None, "a new order in every epoch" if shuffle else "the data set's order"
    else:
        own, order = sampler, f"the order its {type(sampler).__name__} draws"
    drop_last = batches.drop_last
    if evaluation and drop_last and own is None and not shuffle:
        # One process drops the samples left after its last full batch; several ranks must not drop more than that.
        own, drop_last = range(len(sampler) // batches.batch_size * batches.batch_size), False  # type: ignore[arg-type]
    generator = getattr(sampler, "generator", None) or loader.generator
    if isinstance(generator, torch.Generator):
        seed = _first_ranks(generator.initial_seed() % SEED_LIMIT)
    split = rebuilt(
        loader,
        batches.batch_size,
        drop_last,
        seed,
        shuffle=shuffle,
        sampler=own,
    )
    return split, (
        f"The given DataLoader has no distributed sampler: its samples are split among {world_size} ranks, "
        f"{batches.batch_size} per rank and micro-batch, in {order}."
    )


def rebuilt(
    loader: DataLoader[Any], batch_size: int, drop_last: bool, seed: int, shuffle: bool = False, sampler: Any = None
) -> OptimizedDataLoader:
    """One of our loaders with the data set, workers and collate function of a torch loader."""
    return OptimizedDataLoader.create(
        loader.dataset,
        batch_size,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        prefetch_factor=loader.prefetch_factor or 2,
        persistent_workers=loader.persistent_workers,
        drop_last=drop_last,
        shuffle=shuffle,
        seed=seed,
        # Ours recognises data sets that assemble their own batches; torch's default would stack those again.
        collate_fn=None if loader.collate_fn is default_collate else loader.collate_fn,
        sampler=sampler,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        timeout_s=loader.timeout,
    )


def _split_batches(loader: Any, rank: int, world_size: int, seed: int) -> tuple[Any, str]:
    own, note = has_own_batches(loader, world_size, seed)
    if own:
        loader = loader if isinstance(loader, Iterable) else RankBatches(loader, 0, 1)
        text = f"Each of {world_size} ranks reads batches of its own from the given {type(loader).__name__}."
        return loader, text if note is None else f"{text} {note}"
    split, text = _turns(loader, rank, world_size, seed)
    return split, text if note is None else f"{text} {note}"


def _turns(loader: Any, rank: int, world_size: int, seed: int) -> tuple[RankBatches, str]:
    return RankBatches(loader, rank, world_size, seed), (
        f"The samples inside the given {type(loader).__name__} cannot be reached: {world_size} ranks take turns at its "
        "batches, so a step covers as many batches as there are ranks."
    )


def _is_distributed(sampler: Any) -> bool:
    return isinstance(sampler, DistributedSampler) or (
        isinstance(getattr(sampler, "num_replicas", None), int) and isinstance(getattr(sampler, "rank", None), int)
    )


def _check_ranks(sampler: Any, rank: int, world_size: int) -> None:
    if (sampler.num_replicas, sampler.rank) != (world_size, rank):
        raise ConfigError(
            f"the loader's {type(sampler).__name__} was made for rank {sampler.rank} of {sampler.num_replicas}, but "
            f"this process is rank {rank} of {world_size}; make it with num_replicas={world_size}, rank={rank} or pass "
            "the DataLoader without a distributed sampler"
        )


def _first_ranks(seed: int) -> int:
    """Rank 0's seed, so that generators seeded differently on each rank cannot make ranks share samples."""
    if not (dist.is_available() and dist.is_initialized()):
        return seed
    seeds = [seed]
    dist.broadcast_object_list(seeds, src=0)
    return seeds[0]
