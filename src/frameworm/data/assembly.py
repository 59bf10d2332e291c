"""How settings, a data set and this process's place become a torch `DataLoader`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Subset, default_collate

from frameworm.data.sampling import OrderedSplitSampler, StepSampler, share_of
from frameworm.data.streams import StreamBatches
from frameworm.data.workers import SeededDataset, SharedEpoch, WorkerStart, as_it_is, base_of
from frameworm.errors import ConfigError, DataError

Auto = Literal["auto"]


@dataclass(frozen=True)
class LoaderSettings:
    """Everything about a loader except its data set and batch size; see `OptimizedDataLoader.create`."""

    num_workers: int | Literal["auto", "measure"] = "auto"
    pin_memory: bool | Auto = "auto"
    prefetch_factor: int = 2
    persistent_workers: bool | Auto = "auto"
    drop_last: bool = False
    distributed: bool | Auto = "auto"
    shuffle: bool = True
    seed: int = 0
    global_batch: int | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    sampler: Iterable[Any] | None = None
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    timeout_s: float = 0.0
    fill_empty: bool = True

    def __post_init__(self) -> None:
        workers = self.num_workers
        if isinstance(workers, str) and workers not in ("auto", "measure"):
            raise ConfigError(f"num_workers: {workers!r} is neither a number nor 'auto' nor 'measure'")
        if isinstance(workers, int) and workers < 0:
            raise ConfigError(f"num_workers: {workers} must be 0 or more")
        if self.prefetch_factor < 1:
            raise ConfigError(f"prefetch_factor: {self.prefetch_factor} must be 1 or more")
        if self.global_batch is not None and self.global_batch < 1:
            raise ConfigError(f"global_batch: {self.global_batch} must be 1 or more")
        if self.seed < 0:
            raise ConfigError(f"seed: {self.seed} must be 0 or more")


@dataclass(frozen=True)
class Placement:
    """This process among those that share the data set."""

    rank: int = 0
    world_size: int = 1
    accumulation: int = 1


def check_sized(dataset: Any) -> None:
    """Refuse a map-style data set that is empty or cannot tell its length."""
    try:
        size = len(dataset)
    except (TypeError, NotImplementedError):
        raise DataError(
            f"{type(dataset).__name__} has __getitem__ but no __len__, so its samples cannot be put in an order; give "
            "it a __len__, or make it a torch.utils.data.IterableDataset"
        ) from None
    if size == 0:
        raise DataError(f"{type(dataset).__name__} has no samples; check the folder or the filter it was made from")


def batches_per_step(batch_size: int, settings: LoaderSettings, placement: Placement) -> int:
    """Micro-batches of one rank in a whole step of a stream."""
    if settings.global_batch is None:
        return placement.accumulation
    return -(-settings.global_batch // (batch_size * placement.world_size))


def make_sampler(
    dataset: Any, batch_size: int, settings: LoaderSettings, placement: Placement, owns_samples: bool, fill_empty: bool
) -> StepSampler:
    """The plan of this rank's steps; `owns_samples`: the data set holds this rank's samples only."""
    rank, world_size = placement.rank, placement.world_size
    global_batch = settings.global_batch or batch_size * placement.accumulation * world_size
    if owns_samples:
        begin, end = share_of(global_batch, rank, world_size)
        rank, world_size, global_batch = 0, 1, max(1, end - begin)
    if settings.sampler is not None:
        return OrderedSplitSampler(
            settings.sampler,
            global_batch,
            batch_size,
            rank=rank,
            world_size=world_size,
            seed=settings.seed,
            drop_last=settings.drop_last,
            fill_empty=fill_empty,
        )
    return StepSampler(
        len(dataset),
        global_batch,
        batch_size,
        rank=rank,
        world_size=world_size,
        shuffle=settings.shuffle,
        seed=settings.seed,
        drop_last=settings.drop_last,
        fill_empty=fill_empty,
    )


def make_stream(
    dataset: Any,
    batch_size: int,
    settings: LoaderSettings,
    placement: Placement,
    owns_samples: bool,
    epoch: SharedEpoch,
) -> StreamBatches:
    """This rank's batches of an iterable data set."""
    shards_itself = bool(getattr(dataset, "shards_itself", False))
    return StreamBatches(
        dataset,
        batch_size,
        settings.collate_fn or default_collate,
        rank=0 if owns_samples else placement.rank,
        world_size=1 if owns_samples else placement.world_size,
        seed=settings.seed,
        epoch=epoch,
        drop_last=settings.drop_last,
        workers_split=not shards_itself and settings.worker_init_fn is None,
        own_seed=placement.rank if owns_samples else 0,
    )


def build_loader(
    source: Any,
    sampler: StepSampler | None,
    settings: LoaderSettings,
    workers: int,
    generator: torch.Generator,
    epoch: SharedEpoch,
) -> DataLoader[Any]:
    """The torch loader of a map-style data set with its sampler, or of a stream without one."""
    common: dict[str, Any] = {
        "num_workers": workers,
        "pin_memory": bool(settings.pin_memory) and torch.cuda.is_available(),
        "generator": generator,
        "timeout": settings.timeout_s if workers else 0,
    }
    if workers:
        common["worker_init_fn"] = WorkerStart(settings.worker_init_fn)
        common["prefetch_factor"] = settings.prefetch_factor
        common["persistent_workers"] = bool(settings.persistent_workers)
        common["multiprocessing_context"] = settings.multiprocessing_context
    if sampler is None:
        return DataLoader(source, batch_size=None, collate_fn=as_it_is, **common)
    collate = settings.collate_fn
    if collate is None:
        collate = as_it_is if getattr(base_of(source), "assembles_batches", False) else default_collate
    if workers:
        source = SeededDataset(source, settings.seed, epoch)
    return DataLoader(source, batch_sampler=sampler, collate_fn=collate, **common)


def token_lengths(dataset: Any) -> npt.NDArray[Any] | None:
    """Real tokens per sample, through any subsets, or None when the data set does not say."""
    if isinstance(dataset, Subset):
        lengths = token_lengths(dataset.dataset)
        return None if lengths is None else lengths[np.asarray(dataset.indices)]
    lengths = getattr(dataset, "token_lengths", None)
    return None if lengths is None else np.asarray(lengths)


class TokenCounts:
    """Tokens of each step, looked up rather than gathered: this runs once per training step."""

    def __init__(self, dataset: Any) -> None:
        self._lengths = token_lengths(dataset)
        self._padded_length: Callable[[npt.NDArray[Any]], int] | None = getattr(base_of(dataset), "padded_length", None)
        self._order: npt.NDArray[Any] | None = None
        self._in_order: npt.NDArray[Any] = np.empty(0, dtype=np.int64)
        self._before: npt.NDArray[Any] = np.empty(0, dtype=np.int64)

    def of(self, sampler: StepSampler, step: int) -> tuple[int | None, int | None]:
        """Real and padded tokens of this rank's part of a step; None where the data set does not say."""
        order = sampler.order()
        if self._lengths is None or order.dtype == object:
            return None, None
        if order is not self._order:
            self._order = order
            self._in_order = self._lengths[order]
            self._before = np.concatenate(([0], np.cumsum(self._in_order, dtype=np.int64)))
        tokens = padded = 0
        begin = step * sampler.global_batch
        for piece in sampler.pieces(step):
            start, stop = begin + piece.start, begin + piece.stop
            if piece.samples:
                tokens += self._before.item(stop) - self._before.item(start)
            if self._padded_length is not None:
                padded += (stop - start) * int(self._padded_length(self._in_order[start:stop]))
        return tokens, None if self._padded_length is None else padded


def whole_groups(batches: Iterator[Any], size: int) -> Iterator[Any]:
    """The batches without an incomplete last group."""
    while len(group := list(islice(batches, size))) == size:
        yield from group
