"""Turn settings, a data set and this process's rank into a torch `DataLoader`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, default_collate

from frameworm.data.batches.batching import Batching, arrangement, batching_of
from frameworm.data.batches.equal_samples import (
    Draws,
    ResidentBatches,
    UnfitError,
    batch_maker,
    fetcher,
    look_at_samples,
    unfit,
)
from frameworm.data.batches.one_block import BlockLoader, InOneBlock
from frameworm.data.samples.division import Division, divide
from frameworm.data.samples.sampling import OrderedSplitSampler, StepSampler, range_of_rank
from frameworm.data.samples.skipping import SkippedLog, SkippingDataset
from frameworm.data.samples.streams import Begin, StreamBatches
from frameworm.data.samples.workers import SeededDataset, SharedEpoch, WorkerStart, as_it_is, base_of
from frameworm.errors import ConfigError, DataError, EnvironmentSetupError
from frameworm.torch_private.execution import profiler_enabled
from frameworm.torch_private.loaders import unmarked_next

Auto = Literal["auto"]
LONG_READ_S = 2.0  # a data set that takes longer than this to read is read by worker processes


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
    batching: Batching = "padded"
    mixed_lengths: bool = False
    balance: bool | Auto = "auto"
    resident: bool | Auto = False
    epochs: int = 1
    most_widths: int | None = None
    same_widths: bool = False
    on_error: Literal["raise", "skip"] = "raise"

    @property
    def balances(self) -> bool:
        """Whether steps are arranged to have nearly equal token counts."""
        if self.balance == "auto":
            return self.batching == "packed" and self.shuffle and self.sampler is None
        return self.balance

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
        if self.epochs < 1:
            raise ConfigError(f"epochs: {self.epochs} must be 1 or more")
        if self.batching not in ("padded", "bucketed", "packed"):
            raise ConfigError(f"batching: {self.batching!r} is not one of padded, bucketed, packed")
        if self.balances and self.batching == "bucketed":
            raise ConfigError("balance: bucketed steps differ in length by intent; leave balance off, or use packed")


@dataclass(frozen=True)
class Placement:
    """The rank of this process among those that share the data set."""

    rank: int = 0
    world_size: int = 1
    accumulation: int = 1


def found_placement(distributed: bool | Auto) -> Placement:
    """This process's rank in torch.distributed, or a world of one if `distributed` is off."""
    if distributed is False:
        return Placement()
    if dist.is_available() and dist.is_initialized():
        return Placement(dist.get_rank(), dist.get_world_size())
    if distributed is True:
        raise EnvironmentSetupError(
            "the loader was created with distributed=True, but torch.distributed is not set up; call setup_ddp "
            "first, start with torchrun, or use distributed='auto'"
        )
    return Placement()


def check_sized(dataset: Any) -> None:
    """Raise DataError if a map-style data set is empty or has no length."""
    try:
        size = len(dataset)
    except (TypeError, NotImplementedError):
        raise DataError(
            f"{type(dataset).__name__} has __getitem__ but no __len__, so its samples cannot be put in an order; give "
            "it a __len__, or make it a torch.utils.data.IterableDataset"
        ) from None
    if size == 0:
        raise DataError(f"{type(dataset).__name__} has no samples; check the folder or the filter it was made from")


def checked_batching(dataset: Any, settings: LoaderSettings, stream: bool) -> Batching:
    """The batching that is actually used; raises ConfigError or DataError if the data set does not allow it."""
    if stream:
        if settings.batching != "padded" or settings.balances:
            raise ConfigError(
                f"batching {settings.batching}: the lengths of a stream are not known beforehand; use padded without "
                "balance, or a map-style data set"
            )
        if settings.resident is True:
            raise ConfigError(
                "resident: a stream cannot be read by index; leave resident off, or use a map-style data set"
            )
        return "padded"
    check_sized(dataset)
    batching = batching_of(
        dataset,
        settings.batching,
        balance=settings.balances,
        shuffle=settings.shuffle,
        own_sampler=settings.sampler is not None,
        collate=settings.collate_fn,
    )
    if batching == "packed" and settings.collate_fn is not None:
        raise ConfigError("batching packed: batches come finished, so collate_fn has nothing to do; leave it out")
    return batching


def batches_per_step(batch_size: int, settings: LoaderSettings, placement: Placement) -> int:
    """Micro-batches per rank in a full step of a stream."""
    if settings.global_batch is None:
        return placement.accumulation
    return -(-settings.global_batch // (batch_size * placement.world_size))


def stream_length(
    size: int, batch_size: int, settings: LoaderSettings, placement: Placement, owns_samples: bool
) -> int:
    """This rank's number of micro-batches in a stream of known length."""
    rank, world_size = (0, 1) if owns_samples else (placement.rank, placement.world_size)
    rounds, rest = divmod(size, world_size * batch_size)
    if settings.drop_last:
        per_step = batches_per_step(batch_size, settings, placement)
        return rounds // per_step * per_step
    return rounds + (rest > rank)


def make_sampler(
    dataset: Any,
    batch_size: int,
    settings: LoaderSettings,
    placement: Placement,
    owns_samples: bool,
    fill_empty: bool,
    batching: Batching,
) -> StepSampler:
    """Plan this rank's steps.

    Args:
        dataset: The samples.
        batch_size: Most samples per forward pass.
        settings: The loader's settings.
        placement: This process.
        owns_samples: The data set holds only this rank's samples.
        fill_empty: Give ranks without samples a filler batch, so that all ranks run the same number of batches.
        batching: The batching actually used.
    """
    rank, world_size = placement.rank, placement.world_size
    global_batch = settings.global_batch or batch_size * placement.accumulation * world_size
    if owns_samples:
        begin, end = range_of_rank(global_batch, rank, world_size)
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
        arrange=arrangement(
            dataset,
            batching,
            settings.balances,
            global_batch,
            settings.seed,
            mixed_lengths=settings.mixed_lengths,
            ranks=world_size,
            collate=settings.collate_fn,
        ),
    )


def divided(dataset: Any, settings: LoaderSettings, placement: Placement, workers: int) -> Division:
    """Divide a stream among its readers; every rank that shares the stream must call this."""
    return divide(
        dataset,
        rank=placement.rank,
        world_size=placement.world_size,
        workers=workers,
        seed=settings.seed,
        own_ranks=settings.distributed is False,
        own_workers=workers > 1 and settings.worker_init_fn is not None,
        context=settings.multiprocessing_context,
        processes=workers,
    )


def make_stream(
    dataset: Any, batch_size: int, settings: LoaderSettings, division: Division, epoch: SharedEpoch, begin: Begin
) -> StreamBatches:
    """This rank's batches of an iterable data set."""
    return StreamBatches(
        dataset,
        batch_size,
        settings.collate_fn or default_collate,
        division=division,
        seed=settings.seed,
        epoch=epoch,
        drop_last=settings.drop_last,
        begin=begin,
        prepared=settings.worker_init_fn is not None,
    )


def build_loader(
    source: Any,
    sampler: Iterable[list[int]] | None,
    settings: LoaderSettings,
    workers: int,
    generator: torch.Generator,
    epoch: SharedEpoch,
    skipped: SkippedLog | None = None,
    *,
    copied: bool = False,
) -> DataLoader[Any]:
    """The torch loader of a map-style data set and its sampler, or of a stream.

    Args:
        source: The data set.
        sampler: Its batches; None for a stream.
        settings: The loader's settings.
        workers: Worker processes.
        generator: Seeds the workers.
        epoch: The epoch, shared with the workers.
        skipped: Log of samples that could not be read; None: an unreadable sample is an error.
        copied: Each batch will be copied to a device and held until the copy is done.
    """
    pins = bool(settings.pin_memory) and torch.cuda.is_available()
    page_locks = pins and copied and workers > 0 and sampler is not None
    common: dict[str, Any] = {
        "num_workers": workers,
        "pin_memory": pins and not page_locks,
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
    if skipped is not None:
        source = SkippingDataset(source, skipped)
    if workers:
        source = SeededDataset(source, settings.seed, epoch)
        # Torch's pinning thread copies each batch, and torch tracks when the pinned copy has been read.
        together = InOneBlock(collate, lends=not common["pin_memory"])
        loader = BlockLoader(source, batch_sampler=sampler, collate_fn=together, **common)
        loader.page_locks = page_locks
        return loader
    return DataLoader(source, batch_sampler=sampler, collate_fn=collate, **common)


def make_resident(
    source: Any, settings: LoaderSettings, workers: Callable[[], int], skipped: SkippedLog | None
) -> ResidentBatches:
    """Batches of a map-style data set that are assembled on the device.

    Args:
        source: The data set.
        settings: The loader's settings.
        workers: Returns how many worker processes may read the data set if reading it is slow.
        skipped: As for `build_loader`.

    Raises:
        ConfigError: The samples do not allow it.
    """
    collate = batch_maker(source, settings.collate_fn)
    fetch = fetcher(source if skipped is None else SkippingDataset(source, skipped), collate)
    try:
        samples = look_at_samples(source, collate, fetch)
    except UnfitError as error:
        raise unfit(error) from error

    def read(at_once: int) -> Iterable[Any]:
        slow = samples.per_sample_s * samples.count > LONG_READ_S
        plain = replace(settings, pin_memory=False, persistent_workers=False, collate_fn=collate)
        batches = BatchSampler(range(samples.count), at_once, drop_last=False)
        return build_loader(source, batches, plain, workers() if slow else 0, torch.Generator(), SharedEpoch(), skipped)

    return ResidentBatches(samples, fetch, read, lambda: Draws(source, collate))


class Unmarked(Iterator[Any]):
    """Batches of a torch loader without workers, without the profiler annotation that torch puts around each.

    That annotation costs more than assembling a small batch. It is kept while a profiler is running.
    """

    def __init__(self, batches: Any, unmarked: Callable[[], Any]) -> None:
        self._batches, self._next = batches, unmarked

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Iterator[Any]:
        """Iterate a loader of map-style data."""
        batches: Any = iter(loader)
        unmarked = unmarked_next(batches) if loader.num_workers == 0 else None
        return batches if unmarked is None else cls(batches, unmarked)

    def __next__(self) -> Any:
        return next(self._batches) if profiler_enabled() else self._next()


def whole_groups(batches: Iterator[Any], size: int) -> Iterator[Any]:
    """Drop an incomplete last group of batches."""
    while len(group := list(islice(batches, size))) == size:
        yield from group


def refuse_torchs_own(generator: Any, batch_sampler: Any, in_order: bool) -> None:
    """Raise ConfigError for arguments of a torch DataLoader that this loader decides itself."""
    if generator is not None:
        raise ConfigError(
            "generator: this loader draws by its seed, so that ranks agree and a run can be resumed; give "
            "seed=generator.initial_seed() instead"
        )
    if batch_sampler is not None:
        raise ConfigError(
            "batch_sampler: this loader makes the batches of a step itself, from batch_size and the number of ranks; "
            "give sampler= for the order, or pass a torch DataLoader(batch_sampler=...) to train()"
        )
    if not in_order:
        raise ConfigError("in_order=False: a run whose batches come in any order cannot be resumed; leave it out")
