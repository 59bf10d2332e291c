"""The host side of one loader: batches in the right order, on the right rank, ready in time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from frameworm.data.assembly import (
    Auto,
    LoaderSettings,
    Placement,
    TokenCounts,
    batches_per_step,
    build_loader,
    check_sized,
    make_sampler,
    make_stream,
    whole_groups,
)
from frameworm.data.sampling import StepSampler, StepShape
from frameworm.data.seeding import mix, seeded
from frameworm.data.streams import is_stream
from frameworm.data.workers import (
    SharedEpoch,
    automatic_workers,
    measure_workers,
    usable_workers,
    worker_candidates,
)
from frameworm.errors import ConfigError, DataError, EnvironmentSetupError


class OptimizedDataLoader:
    """A torch `DataLoader` whose steps are the same for any number of ranks, workers and micro-batches.

    Made by `create`. Iterating yields this rank's micro-batches of the current epoch. A data set may declare
    `assembles_batches = True` (its `__getitems__` returns a finished batch), `token_lengths` with
    `padded_length(lengths)` (fills the token counts of `step_shape`), and `shards_itself = True` (it already holds
    only this rank's samples, and an iterable one this worker's).
    """

    def __init__(self, dataset: Any, batch_size: int, settings: LoaderSettings | None = None) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.settings = settings if settings is not None else LoaderSettings()
        self.measured: dict[int, float] | None = None
        self._is_stream = is_stream(dataset)
        self._owns_samples = self.settings.distributed is False or bool(getattr(dataset, "shards_itself", False))
        self._placement: Placement | None = None
        self._told = False
        self._local_world_size: int | None = None
        self._fill_empty = self.settings.fill_empty
        self._sampler: StepSampler | None = None
        self._loader: DataLoader[Any] | None = None
        self._workers: int | None = None
        self._epoch = 0
        self._shared_epoch = SharedEpoch()
        self._start = 0
        self._generator = torch.Generator()
        self._tokens: TokenCounts | None = None
        if batch_size < 1:
            raise ConfigError(f"batch_size: {batch_size} must be 1 or more")
        if self._is_stream and self.settings.sampler is not None:
            raise ConfigError("sampler: an iterable data set decides its own order; leave the sampler out")
        if not self._is_stream:
            check_sized(dataset)

    @classmethod
    def create(
        cls,
        dataset: Any,
        batch_size: int,
        num_workers: int | Literal["auto", "measure"] | None = "auto",
        pin_memory: bool | Auto = "auto",
        prefetch_factor: int = 2,
        persistent_workers: bool | Auto = "auto",
        drop_last: bool = False,
        distributed: bool | Auto = "auto",
        *,
        shuffle: bool = True,
        seed: int = 0,
        global_batch: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        sampler: Iterable[Any] | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        timeout_s: float = 0.0,
        fill_empty: bool = True,
    ) -> OptimizedDataLoader:
        """Make a loader.

        Args:
            dataset: Map-style or iterable.
            batch_size: Samples per forward pass on one device (the micro-batch).
            num_workers: Loader processes. auto: none for data sets with `__getitems__`, else up to 4 as the usable
                CPUs allow; measure: times a few counts at the first iteration and keeps the fastest (see `measured`).
            pin_memory: Page-locked batches; without a GPU there are none. auto: when there is a GPU.
            prefetch_factor: Batches each worker prepares ahead.
            persistent_workers: Keep workers between epochs. auto: yes.
            drop_last: Leave out the last step of an epoch when it is short.
            distributed: auto: split among the ranks of torch.distributed if it is set up when iteration begins; True:
                it must be; False: never, the data set is this rank's own.
            shuffle: A new order in every epoch (map-style data sets).
            seed: Seed of the order and of the workers' random state; the same on all ranks.
            global_batch: Samples per step over all ranks; otherwise batch_size x accumulation x world size.
            collate_fn: Makes a batch of a list of samples.
            sampler: Yields sample indices instead of `shuffle`; all ranks split what it draws.
            worker_init_fn: Called in each worker at its start. With an iterable data set it is taken to give each
                worker samples of its own.
            multiprocessing_context: How workers are started; the platform's way unless given.
            timeout_s: Longest to wait for a worker's batch; 0 waits for ever.
            fill_empty: Let ranks without samples in a step run one that does not count; off for evaluation.

        Raises:
            DataError: The data set is empty or has no length.
            ConfigError: A setting is out of range.
        """
        settings = LoaderSettings(
            num_workers="auto" if num_workers is None else num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            drop_last=drop_last,
            distributed=distributed,
            shuffle=shuffle,
            seed=seed,
            global_batch=global_batch,
            collate_fn=collate_fn,
            sampler=sampler,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            timeout_s=timeout_s,
            fill_empty=fill_empty,
        )
        return cls(dataset, batch_size, settings)

    create_dataloader = create

    def shard(
        self,
        rank: int,
        world_size: int,
        accumulation: int = 1,
        *,
        fill_empty: bool | None = None,
        local_world_size: int | None = None,
    ) -> None:
        """Say which part of each step is this process's; takes effect at the next iteration.

        Args:
            rank: This process.
            world_size: Number of processes.
            accumulation: Micro-batches per step; sets the global batch unless one was given to `create`.
            fill_empty: Changes that setting of `create`.
            local_world_size: Ranks on this machine, which share its CPUs; all of them unless given.
        """
        if accumulation < 1:
            raise ConfigError(f"accumulation: {accumulation} must be 1 or more")
        self._told = True
        self._local_world_size = local_world_size
        self._place(Placement(rank, world_size, accumulation), self._fill_empty if fill_empty is None else fill_empty)

    @property
    def global_batch(self) -> int:
        """Samples per step over all ranks."""
        placement = self._ready()
        return self.settings.global_batch or self.batch_size * placement.accumulation * placement.world_size

    @property
    def sampler(self) -> StepSampler | None:
        """What plans the steps; None when they are not known beforehand (streams, and data each rank holds itself)."""
        placement = self._ready()
        return None if self._owns_samples and placement.world_size > 1 else self._sampler

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch; TypeError for a stream of unknown length."""
        placement = self._ready()
        if self._sampler is not None:
            return self._sampler.steps_per_epoch
        return -(-len(self) // batches_per_step(self.batch_size, self.settings, placement))

    @property
    def num_workers(self) -> int:
        """Loader processes; the first look at it decides auto, and takes the measurement if one was asked for."""
        if self._workers is None:
            self._workers = self._choose_workers()
        return self._workers

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        if epoch < 0:
            raise ConfigError(f"epoch: {epoch} must be 0 or more")
        self._epoch = epoch
        self._shared_epoch.value = epoch
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

    def seek(self, step: int) -> None:
        """Let the next iteration, and only that one, begin at a step; a stream is read up to there and dropped."""
        self._ready()
        if self._sampler is not None:
            self._sampler.seek(step)
        elif step < 0:
            raise ConfigError(f"step: {step} must be 0 or more")
        else:
            self._start = step

    def step_shape(self, step: int) -> StepShape:
        """Size of a step of the current epoch on this rank, in samples and, where the data set tells, tokens."""
        self._ready()
        sampler = self._sampler
        if sampler is None:
            raise DataError("an iterable data set does not tell the shape of its steps beforehand")
        if self._tokens is None:
            self._tokens = TokenCounts(self.dataset)
        samples, global_samples, *_ = sampler.shape(step)
        return StepShape(samples, global_samples, *self._tokens.of(sampler, step))

    def close(self) -> None:
        """Stop the workers; the next iteration starts new ones."""
        self._loader = None

    def __iter__(self) -> Iterator[Any]:
        placement = self._ready()
        if self._loader is None:
            self._loader = self._build(self.num_workers)
        self._generator.manual_seed(mix(self.settings.seed, self._epoch, placement.rank))
        batches: Iterator[Any] = iter(self._loader)
        if self._sampler is not None:
            return batches
        per_step = batches_per_step(self.batch_size, self.settings, placement)
        start, self._start = self._start, 0
        if self.settings.drop_last and per_step > 1:
            batches = whole_groups(batches, per_step)
        return islice(batches, start * per_step, None)

    def __len__(self) -> int:
        """This rank's micro-batches in an epoch; TypeError for a stream of unknown length."""
        placement = self._ready()
        if self._sampler is not None:
            return len(self._sampler)
        rank, world_size = (0, 1) if self._owns_samples else (placement.rank, placement.world_size)
        rounds, rest = divmod(len(self.dataset), world_size * self.batch_size)
        if self.settings.drop_last:
            per_step = batches_per_step(self.batch_size, self.settings, placement)
            return rounds // per_step * per_step
        return rounds + (rest > rank)

    def _ready(self) -> Placement:
        """The placement in force, with the sampler that goes with it."""
        if not self._told:
            wanted = self._found_placement()
            if wanted != self._placement:
                self._place(wanted, self._fill_empty)
        assert self._placement is not None
        return self._placement

    def _found_placement(self) -> Placement:
        distributed = self.settings.distributed
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

    def _place(self, placement: Placement, fill_empty: bool) -> None:
        if placement == self._placement and fill_empty == self._fill_empty:
            return
        self._sampler = None
        if not self._is_stream:
            self._sampler = make_sampler(
                self.dataset, self.batch_size, self.settings, placement, self._owns_samples, fill_empty
            )
            self._sampler.set_epoch(self._epoch)
        self._placement = placement
        self._fill_empty = fill_empty
        self._loader = None
        self._start = 0
        if self.settings.num_workers == "auto":
            self._workers = None

    def _choose_workers(self) -> int:
        chosen = self.settings.num_workers
        if isinstance(chosen, int):
            return chosen
        local_world_size = self._local_world_size or self._ready().world_size
        if chosen == "auto":
            return automatic_workers(self.dataset, local_world_size)
        with seeded(self.settings.seed):
            self.measured = measure_workers(worker_candidates(usable_workers(local_world_size) + 1), self._build)
        return min(self.measured, key=self.measured.__getitem__)

    def _build(self, workers: int) -> DataLoader[Any]:
        placement = self._ready()
        source = self.dataset
        if self._sampler is None:
            source = make_stream(
                source, self.batch_size, self.settings, placement, self._owns_samples, self._shared_epoch
            )
        return build_loader(source, self._sampler, self.settings, workers, self._generator, self._shared_epoch)
