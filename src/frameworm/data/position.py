"""Where in an epoch a run stopped, and how to get any loader back there: by samples if the batch size has changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from frameworm.data.adopt import RankBatches
from frameworm.data.loader import OptimizedDataLoader
from frameworm.errors import DataError


@dataclass(frozen=True)
class Reading:
    """How the current epoch is read; stored in checkpoints, so that a resumed run can tell what has changed.

    Attributes:
        order: The order of the samples as text.
        micro_batch: Samples per forward pass on one rank; None if the loader does not tell.
        accumulation: Micro-batches per step.
        world_size: Number of processes.
        arranged_for: The global batch for which the order was arranged, if the loader plans its steps.
        first_step: Samples in the epoch's first step; None if the steps are planned.
        first_batch: Fingerprint of the epoch's first batch; None if the order follows from a seed.
        unsure: Name of a part that does not yield the same when read again; None if no such part is known.
        mixed: Earlier steps of this epoch had another size, so progress is counted in samples instead of steps.
    """

    order: str
    micro_batch: int | None
    accumulation: int
    world_size: int
    arranged_for: int | None = None
    mixed: bool = False
    first_step: int | None = None
    first_batch: int | None = None
    unsure: str | None = None

    def after(self, before: Reading) -> Reading:
        """This reading, for an epoch that was begun as `before`.

        Raises:
            DataError: The samples come in another order now.
        """
        if self.order != before.order:
            processes = f"{before.world_size} process{'es' * (before.world_size > 1)}"
            raise DataError(
                f"the run stopped in the middle of an epoch of {before.order}, and now there are {self.order}: some "
                f"would be trained twice and others not at all; resume with the data, the seed and the {processes} of "
                "that run"
            )
        if self.arranged_for is not None:  # a plan of steps depends only on the global batch
            alike = self.arranged_for == before.arranged_for
        else:
            alike = replace(before, mixed=False, first_step=None, first_batch=None, unsure=None) == self
        return replace(before, **self._batch(), mixed=before.mixed or not alike)

    def _batch(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("micro_batch", "accumulation", "world_size")}


def order_of(loader: Any) -> str:
    """The order in which a loader yields its samples, as text; loaders with equal texts should yield equal orders."""
    if isinstance(loader, OptimizedDataLoader):
        return loader.order
    if isinstance(loader, RankBatches):
        loader = loader.source
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        return f"batches of {type(loader).__name__}"
    batches: Any = loader.batch_sampler
    sampler = getattr(batches, "sampler", batches)
    if isinstance(sampler, SequentialSampler):
        return f"{len(sampler)} samples in the order of the data set"
    if isinstance(sampler, DistributedSampler):
        order = f"shuffled by seed {sampler.seed} of its sampler" if sampler.shuffle else "dealt out in order"
        return f"{len(sampler.dataset)} samples {order}"  # type: ignore[arg-type]
    try:
        count = f"{len(sampler)} "
    except TypeError:
        count = ""
    return f"{count}samples in the order that {type(sampler).__name__} draws"


@contextmanager
def skipping(loader: Any, samples: int) -> Iterator[None]:
    """Skip the first `samples` samples of the epoch, over all ranks, in an iterator made inside this block.

    A torch loader still makes its random draws; the skipped samples themselves are not read.

    Raises:
        DataError: It is unknown which of them are this rank's.
    """
    if isinstance(loader, RankBatches):
        loader.skip(samples)
        yield
        return
    assert isinstance(loader, DataLoader)
    batches: Any = loader.batch_sampler
    sampler = getattr(batches, "sampler", batches)
    if isinstance(sampler, DistributedSampler):  # rank r of n takes every n-th sample, starting at the r-th
        samples = max(0, -(-(samples - sampler.rank) // sampler.num_replicas))
    elif isinstance(getattr(sampler, "num_replicas", None), int):
        raise DataError(
            f"the order of {type(sampler).__name__} is not known for another batch size or number of processes: a run "
            "that stopped in the middle of an epoch can only be resumed with those it began with"
        )
    # torch guards this attribute against accidental changes. Iterators keep the value they find here.
    object.__setattr__(loader, "batch_sampler", _Rest(batches, samples))
    try:
        yield
    finally:
        object.__setattr__(loader, "batch_sampler", batches)


class _Rest:
    """A batch sampler without its first samples in the first epoch, complete in later ones."""

    def __init__(self, batches: Any, skip: int) -> None:
        self._batches = batches
        self._skip = skip

    def __iter__(self) -> Iterator[Any]:
        # Inside the generator, not before: torch's loader makes two iterators at first and draws from the second.
        skip, self._skip = self._skip, 0
        for batch in self._batches:
            if skip:
                batch = list(batch)
                skip, batch = max(0, skip - len(batch)), batch[skip:]
            if len(batch):
                yield batch

    def __len__(self) -> int:
        return len(self._batches)
