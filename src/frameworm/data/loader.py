"""The host side of a loader: batches in the right order, on the right rank, ready in time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from frameworm.data.assembly import (
    Auto,
    LoaderSettings,
    Placement,
    Unmarked,
    batches_per_step,
    build_loader,
    checked_batching,
    divided,
    found_placement,
    make_resident,
    make_sampler,
    make_stream,
    refuse_torchs_own,
    stream_length,
    whole_groups,
)
from frameworm.data.batches.batching import Batching, arrangement, narrowed
from frameworm.data.batches.chunks import PackedBatches
from frameworm.data.batches.counts import TokenCounts
from frameworm.data.batches.equal_samples import Chunk, ResidentBatches
from frameworm.data.batches.packed import batches_of, packing_of
from frameworm.data.samples.division import Division
from frameworm.data.samples.sampling import StepSampler, StepShape
from frameworm.data.samples.seeding import mix, seeded
from frameworm.data.samples.skipping import SkippedLog, SkippedSample
from frameworm.data.samples.streams import Begin, Places, is_stream
from frameworm.data.samples.workers import (
    SharedEpoch,
    automatic_workers,
    base_of,
    measure_workers,
    usable_workers,
    worker_candidates,
)
from frameworm.errors import ConfigError, DataError


class OptimizedDataLoader:
    """A torch `DataLoader` whose steps are the same for any number of ranks, workers and micro-batches.

    Made by `create`. Iterating yields this rank's micro-batches of the current epoch. A data set may declare
    `assembles_batches = True` (its `__getitems__` returns a finished batch), `token_lengths` with
    `padded_length(lengths)` (for the token counts of `step_shape`), and `shards_itself = True` (it already holds only
    this rank's samples and, if iterable, this worker's). `batching="bucketed"` also uses `token_lengths`, or else finds
    the lengths with a `collate_fn` that pads; `batching="packed"` uses a method `packing()`.
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
        self._division: Division | None = None
        self._begin = Begin()
        self._places = Places(1)
        self._begun: Mapping[str, Any] | None = None
        self._generator = torch.Generator()
        self._tokens: TokenCounts | None = None
        self._packed: PackedBatches | None = None
        self._resident: ResidentBatches | None = None
        self.copied = False
        """Set by a consumer that holds each batch until it is copied to a device; allows reusable memory."""
        self._skipped = SkippedLog() if self.settings.on_error == "skip" and not self._is_stream else None
        if batch_size < 1:
            raise ConfigError(f"batch_size: {batch_size} must be 1 or more")
        if self._is_stream and self.settings.sampler is not None:
            raise ConfigError("sampler: an iterable data set decides its own order; leave the sampler out")
        self._batching = checked_batching(dataset, self.settings, self._is_stream)
        self._source = narrowed(dataset, self._batching, self.settings.most_widths)
        if self._batching == "packed":
            pin = bool(self.settings.pin_memory) and torch.cuda.is_available()
            self._packed = PackedBatches(packing_of(dataset), self.settings.epochs, self.settings.resident, pin)
        elif self.settings.resident is True:
            self._resident = make_resident(self._source, self.settings, self._choose_workers, self._skipped)

    @classmethod
    def create(
        cls,
        dataset: Any,
        batch_size: int,
        num_workers: int | Literal["auto", "measure"] | None = "auto",
        pin_memory: bool | Auto = "auto",
        prefetch_factor: int | None = 2,
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
        timeout: float | None = None,
        generator: torch.Generator | None = None,
        batch_sampler: Any = None,
        in_order: bool = True,
        fill_empty: bool = True,
        batching: Batching = "padded",
        mixed_lengths: bool = False,
        balance: bool | Auto = "auto",
        resident: bool | Auto = False,
        epochs: int = 1,
        most_widths: int | None = None,
        same_widths: bool = False,
        on_error: Literal["raise", "skip"] = "raise",
    ) -> OptimizedDataLoader:
        """Make a loader.

        Args:
            dataset: Map-style or iterable.
            batch_size: Samples per forward pass on one device (the micro-batch).
            num_workers: Worker processes. auto: none for data sets with `__getitems__`, else up to 4 as the usable CPUs
                allow; measure: time a few counts at the first iteration and keep the fastest (see `measured`).
            pin_memory: Page-lock batches, which needs a GPU. auto: if there is a GPU.
            prefetch_factor: Batches each worker prepares ahead; None: 2.
            persistent_workers: Keep workers between epochs. auto: yes.
            drop_last: Drop the last step of an epoch if it is short.
            distributed: auto: split among the ranks of torch.distributed if it is set up when iteration begins; True:
                require that; False: never split, the data set is this rank's own.
            shuffle: Draw a new order in every epoch (map-style data sets).
            seed: Seed of the order and of the workers' random state; the same on all ranks.
            global_batch: Samples per step over all ranks; default: batch_size x accumulation x world size.
            collate_fn: Makes a batch of a list of samples.
            sampler: Yields sample indices, instead of `shuffle`; all ranks split what it yields.
            worker_init_fn: Called in each worker at its start. With an iterable data set it is assumed to give each
                worker samples of its own.
            multiprocessing_context: How workers are started; default: the platform's way.
            timeout_s: Longest wait for a worker's batch; 0: no limit.
            timeout: torch's name for `timeout_s`.
            generator: Rejected: random choices follow from `seed`, so that they can be repeated.
            batch_sampler: Rejected: the batches of a step follow from `batch_size` and the number of ranks.
            in_order: Must be True: batches in any other order cannot be resumed.
            fill_empty: Ranks without samples in a step run a filler that does not count; False for evaluation.
            batching: How to batch texts of unequal length: padded, bucketed (similar lengths in one step) or packed
                (end to end; built in a thread, without workers or `collate_fn`).
            mixed_lengths: For bucketed: give each step a shorter and a longer half, which learns as well as random
                steps; for steps of several micro-batches.
            balance: Make steps of nearly equal token counts. auto: for packed.
            resident: Keep the samples on the device of the `CudaDataLoader` around this loader (or else on the host)
                and build batches there. For packed batches on a GPU, and for any map-style data set whose samples are
                fixed tensors of fixed shapes. auto: packed, if they are small relative to the GPU's memory.
            epochs: Number of epochs that will be read; packed examines the first eight to choose its capacity.
            most_widths: Most different widths of text batches; None: no limit if padded, 16 if bucketed.
            same_widths: Pad all ranks to the longest text that any of them has at that moment, as captured steps need.
            on_error: skip: a sample that raises is replaced by the next one; see `skipped_samples`.

        Raises:
            DataError: The data set is empty or has no length.
            ConfigError: A setting is out of range.
        """
        refuse_torchs_own(generator, batch_sampler, in_order)
        settings = LoaderSettings(
            num_workers="auto" if num_workers is None else num_workers,
            pin_memory=pin_memory,
            prefetch_factor=2 if prefetch_factor is None else prefetch_factor,
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
            timeout_s=timeout_s if timeout is None else timeout,
            fill_empty=fill_empty,
            batching=batching,
            mixed_lengths=mixed_lengths,
            balance=balance,
            resident=resident,
            epochs=epochs,
            most_widths=most_widths,
            same_widths=same_widths,
            on_error=on_error,
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
        """Set this process's part of each step; takes effect at the next iteration.

        Args:
            rank: This process.
            world_size: Number of processes.
            accumulation: Micro-batches per step; sets the global batch unless `create` was given one.
            fill_empty: Overrides the setting of `create`.
            local_world_size: Ranks on this machine, which share its CPUs; default: all of them.
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
        """The plan of the steps; None if it is not known beforehand (streams, and data that each rank holds itself)."""
        placement = self._ready()
        return None if self._owns_samples and placement.world_size > 1 else self._sampler

    @property
    def takes_turns(self) -> bool:
        """Whether ranks take turns at a stream, whose order then does not depend on the number of ranks."""
        return self._is_stream and self.division.one_order

    @property
    def division(self) -> Division:
        """How the readers of a stream divide it. All ranks that share it must ask, since they compare what they read.

        Raises:
            DataError: It cannot be divided so that each sample is read once.
        """
        placement = self._ready()
        if self._division is None:
            self._division = divided(self.dataset, self.settings, placement, self.num_workers)
            self._places = Places(self._division.workers)
        return self._division

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch; TypeError for a stream of unknown length."""
        placement = self._ready()
        if self._sampler is not None:
            return self._sampler.steps_per_epoch
        return -(-len(self) // batches_per_step(self.batch_size, self.settings, placement))

    @property
    def num_workers(self) -> int:
        """Worker processes; the first access resolves `auto`, and runs the measurement for `measure`."""
        if self._workers is None:
            self._workers = 0 if self.in_chunks else self._choose_workers()
        return self._workers

    @property
    def skipped_samples(self) -> list[SkippedSample]:
        """Samples that could not be read so far and were replaced by others (`on_error="skip"`)."""
        return [] if self._skipped is None else self._skipped.read()

    @property
    def packs(self) -> bool:
        """Whether batches are packed."""
        return self._packed is not None

    @property
    def shapes_alike(self) -> bool:
        """Whether the micro-batches of all ranks change their shapes at the same steps."""
        base = base_of(self.dataset)
        full = bool(getattr(base, "blocks_are_full", False))
        return self.in_chunks or full or (self._sampler is not None and self._sampler.lengths is not None)

    @property
    def in_chunks(self) -> bool:
        """Whether batches are built tens at a time, so that `chunks` can return them."""
        return self._packed is not None or self._resident is not None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        if epoch < 0:
            raise ConfigError(f"epoch: {epoch} must be 0 or more")
        self._epoch = epoch
        self._shared_epoch.value = epoch
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

    def seek(self, step: int) -> None:
        """Start the next iteration, and only that one, at a step; a stream is read up to there."""
        self._ready()
        if self._sampler is not None:
            self._sampler.seek(step)
        elif step < 0:
            raise ConfigError(f"step: {step} must be 0 or more")
        else:
            self._start = step

    def skip(self, samples: int, arranged_for: int | None = None) -> None:
        """Skip the first samples of the current epoch, counted over all ranks, and plan its steps from the rest.

        Args:
            samples: Number of samples to skip.
            arranged_for: The global batch for which the epoch's order was arranged, if the order depends on it.

        Raises:
            DataError: Each rank or worker reads its own samples, so it is not known which come first.
        """
        placement = self._ready()
        if not self.division.one_order if self._is_stream else self._owns_samples and placement.world_size > 1:
            raise DataError(
                "each reader of the data set has its own samples, so a run that stopped in the middle of an epoch can "
                "only be resumed with the batch size and number of processes it began with"
            )
        if self._sampler is None:
            self._begin, self._loader = Begin(self._epoch, samples), None
            return
        settings = self.settings
        arrange = None
        if arranged_for is not None:
            arrange = arrangement(
                self.dataset,
                self._batching,
                settings.balances,
                arranged_for,
                settings.seed,
                mixed_lengths=settings.mixed_lengths,
                ranks=placement.world_size,
                collate=settings.collate_fn,
            )
        self._sampler.skip(self._epoch, samples, arrange)
        self._plan_batches(self._sampler)

    @property
    def order(self) -> str:
        """The order of samples as text; loaders with the same text yield the same samples."""
        self._ready()
        if self._sampler is not None:
            return self._sampler.describe()
        how = "" if self.division.one_order else f" ({self.division})"
        return f"a stream read with seed {self.settings.seed}{how}"

    def place(self, batches: int) -> dict[str, Any] | None:
        """The readers' positions after `batches` batches of the current epoch, for `go_on`; None if unknown."""
        return self._places.after(batches) if self._is_stream else None

    def go_on(self, saved: Mapping[str, Any]) -> bool:
        """Start the next iteration, and only that one, at a `place`; False if it was saved by other readers."""
        begin = None
        if self._is_stream and self.division.places:
            begin = self._places.begin(self._epoch, saved, self.dataset)
        if begin is None:
            return False
        self._begin, self._begun, self._loader = begin, saved, None
        return True

    def step_shape(self, step: int) -> StepShape:
        """Size of a step of the current epoch on this rank, in samples and, if the data set declares them, tokens."""
        self._ready()
        if self._sampler is None or self._tokens is None:
            raise DataError("an iterable data set does not tell the shape of its steps beforehand")
        samples, global_samples, *_ = self._sampler.shape(step)
        return StepShape(samples, global_samples, *self._tokens.of(self._sampler, step))

    def close(self) -> None:
        """Stop the workers and the packing thread and free resident samples; iterating again restarts them."""
        self._loader = None
        for source in (self._packed, self._resident):
            if source is not None:
                source.close()

    def chunks(self, device: torch.device | None = None) -> Iterator[Any]:
        """The epoch's batches, tens at a time: packed, on a GPU if `resident` allows (DeviceError), or resident."""
        self._ready()
        assert self._sampler is not None
        start = self._sampler.take_start()
        if self._resident is not None:
            return self._resident.chunks(self._epoch, start, device or torch.device("cpu"))
        assert self._packed is not None, "only packed or resident batches come in chunks"
        return self._packed.chunks(self._epoch, start, device)

    def batches_of(self, chunk: Any) -> Iterator[Any]:
        """The batches of one chunk of `chunks`."""
        return chunk.batches() if isinstance(chunk, Chunk) else batches_of(chunk)

    def open_ahead(self, epoch: int, device: torch.device | None = None) -> None:
        """Build the first chunk of the next epoch ahead of time; `chunks` then begins with it."""
        if self._sampler is None or self._tokens is None or not self.in_chunks or epoch >= self.settings.epochs:
            return
        if self._resident is not None:
            self._resident.open_ahead(epoch, device or torch.device("cpu"))
        if self._packed is not None:
            self._packed.open_ahead(epoch, device)
            self._tokens.count(self._sampler, epoch)

    def __iter__(self) -> Iterator[Any]:
        placement = self._ready()
        if self.in_chunks:
            return (batch for chunk in self.chunks() for batch in self.batches_of(chunk))
        if self._loader is None:
            self._loader = self._build(self.num_workers)
        self._generator.manual_seed(mix(self.settings.seed, self._epoch, placement.rank))
        if self._sampler is not None:
            return Unmarked.of(self._loader)
        batches: Iterator[Any] = iter(self._loader)
        if self.division.places:
            batches = self._places.batches(batches, self._begun)
        if self._begun is not None:  # only once: the loader would otherwise start there again
            self._begun, self._begin, self._loader = None, Begin(), None
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
        return stream_length(len(self.dataset), self.batch_size, self.settings, placement, self.division.own_ranks)

    def _ready(self) -> Placement:
        """The current placement; plans the steps for it if it has changed."""
        if not self._told:
            wanted = found_placement(self.settings.distributed)
            if wanted != self._placement:
                self._place(wanted, self._fill_empty)
        assert self._placement is not None
        return self._placement

    def _place(self, placement: Placement, fill_empty: bool) -> None:
        if placement == self._placement and fill_empty == self._fill_empty:
            return
        self._sampler = None
        if not self._is_stream:
            self._sampler = make_sampler(
                self.dataset, self.batch_size, self.settings, placement, self._owns_samples, fill_empty, self._batching
            )
            self._sampler.set_epoch(self._epoch)
            if self._packed is not None and self._owns_samples and placement.world_size > 1:
                raise ConfigError("batching packed: ranks that hold samples of their own cannot agree on a shape")
            self._plan_batches(self._sampler)
        self._placement = placement
        self._fill_empty = fill_empty
        self._loader = None
        self._division = None
        self._start = 0
        if self.settings.num_workers == "auto":
            self._workers = None

    def _plan_batches(self, sampler: StepSampler) -> None:
        # A Subset passes on only the indices, and would lose `MicroBatch.longest`.
        if self.settings.same_widths and sampler.fill_empty and getattr(self._source, "reads_longest", False):
            sampler.lengths = self._source.token_lengths
        for source in (self._packed, self._resident):
            if source is not None:
                source.place(sampler)
        self._tokens = TokenCounts(self._source, None if self._packed is None else self._packed.plan.capacity)

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
        source = self._source
        if self._sampler is None:
            plain = Division(placement.rank, placement.world_size, max(1, workers))  # while worker counts are timed
            division = plain if self._workers is None else self.division
            source = make_stream(source, self.batch_size, self.settings, division, self._shared_epoch, self._begin)
        shared = (self._generator, self._shared_epoch, self._skipped)
        return build_loader(source, self._sampler, self.settings, workers, *shared, copied=self.copied)
