"""From batches to steps: which micro-batches belong together, and how many samples all ranks have in them.

Our own loaders know the shape of every step beforehand. A foreign loader's batches are grouped by count; with several
ranks, sizes are agreed on before each step, so that no rank waits for one that has run out.
"""

from __future__ import annotations

import collections.abc
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from time import perf_counter
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from frameworm.data.adopt import RankBatches, after_samples, in_a_batch, set_loader_epoch
from frameworm.data.batches.sizes import UNKNOWN, batch_size_of, common_length
from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.position import Reading, order_of, skipping
from frameworm.data.prefetch import CudaDataLoader
from frameworm.data.replay import fingerprint, reads_data, why_not_replayed
from frameworm.data.samples.skipping import SkippedSample
from frameworm.data.samples.streams import is_stream
from frameworm.data.samples.worker_state import PersistentWorkers
from frameworm.data.stateful import Place, PlacedLoader, Untouched, placed
from frameworm.errors import DataError

log = logging.getLogger("frameworm")
OverRanks = Callable[[float], float]
SizedBatch = tuple[Any, int | None]
LONG_S = 0.5  # if the first batch took longer, it is not read again to check whether it stays the same


@dataclass(slots=True)
class StepBatch:
    """The micro-batches of one step on this rank."""

    batches: list[Any]
    samples: list[int]  # per micro-batch; 0 for a filler that only keeps this rank in step with the others
    global_samples: int
    tokens: int | None = None
    padded_tokens: int | None = None

    local_samples: int = field(init=False)

    def __post_init__(self) -> None:
        self.local_samples = sum(self.samples)


class StepSource:
    """Yields the steps of one epoch at a time, starting at any step."""

    def __init__(
        self,
        loader: Any,
        *,
        accumulation: int,
        rank: int = 0,
        world_size: int = 1,
        sum_over_ranks: OverRanks | None = None,
        max_over_ranks: OverRanks | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.loader = loader
        self._inner = loader.loader if isinstance(loader, CudaDataLoader) else loader
        known = placed(self._inner)
        if known is not None:
            self.loader = CudaDataLoader(known, loader.device, loader.prepare) if self._inner is not loader else known
        ours = isinstance(self._inner, OptimizedDataLoader) and is_stream(self._inner.dataset)
        self.place = Place(self._inner if ours else known)
        """The loader's position in the current epoch, if it can tell."""
        self._accumulation = accumulation
        self._rank = rank
        self._world_size = world_size
        self._sum_over_ranks = sum_over_ranks
        planned = isinstance(self._inner, OptimizedDataLoader) and self._inner.sampler is not None
        self._planned: OptimizedDataLoader | None = self._inner if planned else None
        # torch's distributed sampler gives every rank equally many samples, so ranks need not communicate.
        samplers = (getattr(self._inner, "sampler", None), getattr(self._inner, "batch_sampler", None))
        self._even = any(
            isinstance(item, DistributedSampler) for item in (*samplers, getattr(samplers[1], "sampler", None))
        )
        self.steps_per_epoch = self._count_steps()
        """Steps in an epoch, the same on all ranks; None if unknown beforehand."""
        self.reading = self._describe()
        """How the current epoch is read."""
        if world_size > 1 and self._planned is None and not self._even:
            # One rank may have a batch more than another; the rank with the most batches ends the epoch.
            assert max_over_ranks is not None
            most = max_over_ranks(math.inf if self.steps_per_epoch is None else float(self.steps_per_epoch))
            self.steps_per_epoch = None if math.isinf(most) else int(most)
        if self.steps_per_epoch == 0:
            raise DataError(self.why_empty(0))
        self.steps_in_epoch = self.steps_per_epoch
        """Steps in the current epoch, which differ if it was begun with another batch size; None if unknown."""
        self._first_step = 0
        self.workers = PersistentWorkers(self._inner)
        self.notes: list[str] = []
        """What the user should know about the batches and about reading them again."""
        self._unknown_size = False
        self._warn = warn
        self._asked: tuple[str | None] | None = None
        if self.workers.note is not None:
            self._tell(self.workers.note)

    def _describe(self) -> Reading:
        planned = self._planned
        return Reading(
            order_of(self._inner),
            getattr(self._inner, "batch_size", None),
            self._accumulation,
            self._world_size,
            None if planned is None else planned.global_batch,
        )

    def why_empty(self, epoch: int) -> str:
        """Why an epoch (numbered from 0) has no steps, as far as the loader tells."""
        loader = self._inner.source if isinstance(self._inner, RankBatches) else self._inner
        text = f"nothing to train on in epoch {epoch + 1}: the training loader ({type(loader).__name__}) gave no batch"
        if getattr(loader, "drop_last", False):
            size = getattr(loader, "batch_size", None)
            return f"{text}; drop_last=True leaves out a batch of fewer than {size} samples, so set it to False"
        if epoch:
            return f"{text}, though it did before; give one that can be read in every epoch, such as a list"
        return text

    @property
    def copies(self) -> CudaDataLoader | None:
        """The loader whose `copied_s` is the time spent on copies to the device; None if there are none."""
        copies = isinstance(self.loader, CudaDataLoader) and self.loader.device.type != "cpu"
        return self.loader if copies else None

    @property
    def shapes_alike(self) -> bool:
        """Whether the batches of all ranks are known to change their shapes at the same steps."""
        return self._world_size == 1 or (self._planned is not None and self._planned.shapes_alike)

    @property
    def num_workers(self) -> int | None:
        """Worker processes; None if the loader's kind has none."""
        inner = self._inner.source if isinstance(self._inner, RankBatches) else self._inner
        if isinstance(inner, OptimizedDataLoader):
            return None if inner.in_chunks else inner.num_workers
        return inner.num_workers if isinstance(inner, DataLoader) else None

    def sample_ids(self, step: int) -> list[list[Any]] | None:
        """This rank's samples in a step (from 0) of the current epoch, by micro-batch; None if unknown."""
        sampler = None if self._planned is None else self._planned.sampler
        step -= self._first_step
        if sampler is None or not 0 <= step < sampler.steps_per_epoch:
            return None
        return [indices.tolist() for indices in sampler.indices(step)]

    @property
    def skipped_samples(self) -> list[SkippedSample]:
        """Samples that could not be read and were skipped."""
        inner = self._inner
        return inner.skipped_samples if isinstance(inner, OptimizedDataLoader) else []

    def _count_steps(self) -> int | None:
        """Steps that this rank's loader has in an epoch; None if it does not tell."""
        if self._planned is not None:
            return self._planned.steps_per_epoch
        try:
            if isinstance(self._inner, OptimizedDataLoader):
                return self._inner.steps_per_epoch
            return -(-len(self._inner) // self._accumulation)
        except TypeError:
            return None

    def continue_reading(self, before: dict[str, Any] | None) -> bool:
        """Prepare to continue an epoch that was partly read before; returns whether the batch size has changed.

        Args:
            before: `reading` of the run that stopped, as plain data; None if its checkpoint does not hold it.

        Raises:
            DataError: The samples come in another order now.
        """
        if before is not None:
            self.reading = self._describe().after(Reading(**before))
        return self.reading.mixed

    def epoch(self, epoch: int, start: int = 0, samples: int | None = None) -> Iterator[StepBatch]:
        """The steps of an epoch (numbered from 0), starting at step `start`.

        A foreign loader is read from its beginning, so that it repeats its random draws.

        Args:
            epoch: The epoch.
            start: Steps that have been trained already.
            samples: Samples in those steps, over all ranks, used if their batch size was different; None: it was not.
        """
        set_loader_epoch(self._inner, epoch)
        if not start:
            self.reading = self._describe()
        self._first_step, self.steps_in_epoch = 0, self.steps_per_epoch
        changed = start > 0 and samples is not None and self.reading.mixed
        if not start or changed:
            self.place.restore(None)
        if self.place.go_on():
            return self._from_place()
        if changed:
            assert samples is not None
            return self._after_samples(start, samples)
        if self._planned is not None:
            return self._planned_steps(start)
        began = perf_counter()
        with self.workers.starting():
            steps = self._group(sized(self.loader), self._even)
        first = next(steps, None)
        if first is None:
            return steps
        # Only needed for checkpoints; and those hold rank 0's fingerprint, which differs from those of other ranks.
        seen = None if self._warn is None or self._rank else fingerprint(first.batches)
        if not start:
            unsure = self._unsure(perf_counter() - began)
            self.reading = replace(self.reading, first_step=first.global_samples, first_batch=seen, unsure=unsure)
            return chain((first,), steps)
        if samples is not None and self.reading.first_step not in (None, first.global_samples):
            return self._seek(steps, first.global_samples, samples)
        if self.reading.unsure or (seen is not None and self.reading.first_batch not in (None, seen)):
            self._tell(
                f"{self.reading.unsure or self._loader_name()} did not yield the same when the running epoch was read "
                "again: in this epoch some samples are trained twice and others not at all"
            )
        for _ in range(start - 1):
            next(steps, None)
        return steps

    def _from_place(self) -> Iterator[StepBatch]:
        """The steps from a saved place, opened only when the first is requested: by then the run is fully restored."""
        with Untouched(), self.workers.starting():
            steps = self._group(sized(self.loader), self._even)
        yield from steps

    def _seek(self, steps: Iterator[StepBatch], passed: int, trained: int) -> Iterator[StepBatch]:
        """Read on until all trained samples have passed; used when only the first step's size shows a change."""
        self.reading, self.steps_in_epoch = replace(self.reading, mixed=True), None
        while passed < trained and (step := next(steps, None)) is not None:
            passed += step.global_samples
        if passed > trained:
            raise in_a_batch(trained)
        return steps

    def _unsure(self, first_s: float) -> str | None:
        """Name a part that does not yield the same when read again; tested once, and only if that takes little time."""
        if self._warn is None or (reads_data(self._inner) and first_s > LONG_S):
            return self.reading.unsure
        if self._asked is None:
            problem = why_not_replayed(self._inner)
            self._asked = (None if problem is None else problem[0],)
            if problem is not None:
                self._tell(
                    f"{' '.join(problem)}: a run that is resumed in the middle of an epoch trains some samples twice "
                    "and others not at all; let it draw from a generator that it holds, and shuffle copies"
                )
        return self._asked[0]

    def _tell(self, text: str) -> None:
        self.notes.append(text)
        if self._warn is not None:
            self._warn(text)

    def _loader_name(self) -> str:
        return type(self._inner.source if isinstance(self._inner, RankBatches) else self._inner).__name__

    def _after_samples(self, start: int, samples: int) -> Iterator[StepBatch]:
        """The remaining steps of an epoch in which the batch size has changed."""
        inner, self._first_step, self.steps_in_epoch = self._inner, start, None
        if isinstance(inner, OptimizedDataLoader):
            inner.skip(samples, self.reading.arranged_for)
            if self._planned is None:
                return self._group(sized(self.loader), False)
            self.steps_in_epoch = start + self._planned.steps_per_epoch
            return self._planned_steps(0)
        if isinstance(inner, RankBatches) or getattr(inner, "batch_sampler", None) is not None:
            with self.workers.starting(), skipping(inner, samples):
                batches = sized(self.loader, samples)
                # A loader may draw its order with its first batch, from the current random state.
                return self._group(chain(_take(batches, 1), batches), False)
        with self.workers.starting():
            return self._group(_sized(after_samples(iter(self.loader), samples), iter(())), False)

    def _group(self, batches: Iterator[SizedBatch], even: bool) -> Iterator[StepBatch]:
        """Group micro-batches into steps; `even` means that the ranks have equally many samples in each."""
        alone = self._accumulation == 1 and (self._world_size == 1 or even)
        return self._single_steps(batches) if alone else self._grouped_steps(batches, even)

    def open_ahead(self, epoch: int) -> None:
        """Prepare an epoch's first batches as far as possible; call it before the last step of the previous epoch."""
        if self._planned is not None and isinstance(self.loader, CudaDataLoader):
            self.loader.open_ahead(epoch)

    def _planned_steps(self, start: int) -> Iterator[StepBatch]:
        planned = self._planned
        assert planned is not None
        if start >= planned.steps_per_epoch:
            return iter(())
        if start:
            planned.seek(start)
        # The iterator is made now rather than at the first step, since making it draws random numbers.
        return self._read_plan(planned, iter(self.loader), start)

    def _read_plan(self, planned: OptimizedDataLoader, batches: Iterator[Any], start: int) -> Iterator[StepBatch]:
        for index in range(start, planned.steps_per_epoch):
            shape = planned.step_shape(index)
            yield StepBatch(
                [next(batches) for _ in shape.samples],
                list(shape.samples),
                shape.global_samples,
                shape.tokens,
                shape.padded_tokens,
            )

    def _single_steps(self, batches: Iterator[SizedBatch]) -> Iterator[StepBatch]:
        """`_grouped_steps` for the common case, at less cost: one batch per step, and no need to ask other ranks."""
        for batch, size in batches:
            samples = 1 if size is None or self._unknown_size else size
            if size is None:
                self._say_unknown(batch)
            if samples == 0:
                return
            self.place.batches += 1
            yield StepBatch([batch], [samples], samples * self._world_size)

    def _grouped_steps(self, batches: Iterator[SizedBatch], even: bool) -> Iterator[StepBatch]:
        last: Any = None
        while True:
            group, samples, total = self._agree(_take(batches, self._accumulation), even)
            if total == 0:
                return
            self.place.batches += len(group)
            if group:
                last = group[-1]
            elif last is None:
                raise DataError("this rank's loader is empty while other ranks have batches; give every rank some data")
            else:
                group, samples = [last], [0]
            yield StepBatch(group, samples, total)

    def _agree(self, taken: list[SizedBatch], even: bool) -> tuple[list[Any], list[int], int]:
        """A step's batches, their sample counts, and the total over all ranks.

        Once any rank has had a batch of unknown size, all batches get the same weight.
        """
        group = [batch for batch, _ in taken]
        alone = self._world_size == 1 or even
        if not self._unknown_size:
            sizes = [size for _, size in taken if size is not None]
            local = float(sum(sizes)) if len(sizes) == len(taken) else math.nan
            total = local * self._world_size if alone else self._over_ranks(local)
            if not math.isnan(total):
                return group, sizes, int(total)
            self._say_unknown(next((batch for batch, size in taken if size is None), None))
        total = len(group) * self._world_size if alone else self._over_ranks(float(len(group)))
        return group, [1] * len(group), int(total)

    def _over_ranks(self, value: float) -> float:
        assert self._sum_over_ranks is not None
        return self._sum_over_ranks(value)

    def _say_unknown(self, batch: Any) -> None:
        if not self._unknown_size:
            self._unknown_size = True
            effect = "micro-batches weigh the same, and each counts as one"
            self.notes.append(UNKNOWN.format(kind=type(batch).__name__, effect=effect))
            if self._rank == 0:
                log.warning("%s", self.notes[-1])


def sized(loader: Any, skipped: int = 0) -> Iterator[SizedBatch]:
    """The batches of a loader with their sample counts: from the batch itself, else from the loader's plan, else None.

    The loader's iterator is made now rather than at the first batch, since making it may draw random numbers.

    Args:
        loader: Any loader.
        skipped: Samples at the beginning of the epoch that the loader skips.
    """
    inner = loader.loader if isinstance(loader, CudaDataLoader) else loader
    inner = inner.loader if isinstance(inner, PlacedLoader) else inner
    return _sized(iter(loader), _planned_sizes(inner, skipped))


def _sized(batches: Iterator[Any], plan: Iterator[int]) -> Iterator[SizedBatch]:
    for batch in batches:
        size, planned = batch_size_of(batch), next(plan, None)
        if planned is not None and size != planned and (size is None or common_length(batch) == planned):
            size = planned
        yield batch, size


def _planned_sizes(loader: Any, skipped: int) -> Iterator[int]:
    """Sample counts of the batches that a loader with a plan is going to draw; empty for others."""
    if isinstance(loader, OptimizedDataLoader) and loader.sampler is not None:
        for step in range(loader.steps_per_epoch):
            yield from loader.step_shape(step).samples
    elif isinstance(loader, DataLoader) and type(loader.batch_sampler) is BatchSampler:
        sampler, full = loader.batch_sampler.sampler, loader.batch_sampler.batch_size
        if isinstance(sampler, collections.abc.Sized):
            yield from (min(full, left) for left in range(len(sampler) - skipped, 0, -full))


def close_loader(loader: Any) -> None:
    """Stop the workers of our own loader now; left to garbage collection, each would take seconds to end."""
    inner = loader.loader if isinstance(loader, CudaDataLoader) else loader
    if isinstance(inner, OptimizedDataLoader):
        inner.close()


def _take(batches: Iterable[SizedBatch], count: int) -> list[SizedBatch]:
    taken: list[SizedBatch] = []
    for batch in batches:
        taken.append(batch)
        if len(taken) == count:
            break
    return taken
