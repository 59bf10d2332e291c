"""Copies of loaders to experiment on: the given one keeps its position, its epoch and its workers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.prefetch import CudaDataLoader
from frameworm.errors import DataError
from frameworm.hardware.host import usable_cpus


def copy_loader(loader: Any, num_workers: int | None = None) -> Any:
    """A loader of the same batches, from the beginning of its epoch.

    Args:
        loader: What `Trainer.train` takes. A loader of an unknown kind is used as it is.
        num_workers: Loader processes of the copy; None: as many as the given one has.

    Raises:
        DataError: It can be read only once, or has no workers to choose.
    """
    if isinstance(loader, Iterator):
        raise DataError(
            "the loader is an iterator: reading it would use its batches up; give the DataLoader or list behind it"
        )
    if isinstance(loader, CudaDataLoader):
        return copy_loader(loader.loader, num_workers)
    if isinstance(loader, OptimizedDataLoader):
        settings = loader.settings
        settings = dataclasses.replace(
            settings,
            num_workers=loader.num_workers if num_workers is None else num_workers,
            sampler=_copied(settings.sampler, {id(loader.dataset): loader.dataset}),
        )
        twin = OptimizedDataLoader(loader.dataset, loader.batch_size, settings)
        twin.set_epoch(loader._epoch)
        return twin
    if isinstance(loader, DataLoader):
        return _copy_torch_loader(loader, num_workers)
    if num_workers is not None:
        raise DataError(f"{type(loader).__name__} has no worker processes to choose")
    return loader


def workers_of(loader: Any) -> int | None:
    """Worker processes of a loader; None when it is of a kind that has none."""
    inner = loader.loader if isinstance(loader, CudaDataLoader) else loader
    if isinstance(inner, OptimizedDataLoader):
        return None if inner.in_chunks else inner.num_workers
    return inner.num_workers if isinstance(inner, DataLoader) else None


def other_workers(loader: Any, local_world_size: int) -> int | None:
    """A number of workers worth trying: as many as cores, fewer where there are too many, or twice."""
    now = workers_of(loader)
    if now is None:
        return None
    cores = max(1, usable_cpus() // max(1, local_world_size))
    if now == 0:
        return cores
    return max(1, cores - 1) if now > cores else 2 * now


def batches_ahead(loader: Any) -> int:
    """Batches that may lie ready after a pause, and say nothing about how fast they come."""
    workers = workers_of(loader) or 0
    inner = loader.settings if isinstance(loader, OptimizedDataLoader) else loader
    return workers * int(getattr(inner, "prefetch_factor", None) or 2)


def _copy_torch_loader(loader: DataLoader[Any], num_workers: int | None) -> DataLoader[Any]:
    twin = copy.copy(loader)
    memo = {id(loader.dataset): loader.dataset}
    changed: dict[str, Any] = {
        "_iterator": None,
        # One memo: a batch sampler draws from the same sampler and generator as its loader.
        "generator": _copied(loader.generator, memo),
        "sampler": _copied(loader.sampler, memo),
        "batch_sampler": _copied(loader.batch_sampler, memo),
    }
    if num_workers is not None:
        changed["num_workers"] = num_workers
        changed["prefetch_factor"] = (loader.prefetch_factor or 2) if num_workers else None
        changed["persistent_workers"] = num_workers > 0
        if not num_workers:
            changed["timeout"] = 0
    twin.__dict__.update(changed)  # a DataLoader refuses to be changed in the usual way
    return twin


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A copy that draws the same and leaves the original alone; what the memo holds is not copied."""
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # holds something that cannot be copied: share it
        return value


def end_workers(loader: Any) -> None:
    """Stop the processes of a copy."""
    if isinstance(loader, OptimizedDataLoader):
        loader.close()
    elif isinstance(loader, DataLoader):
        loader._iterator = None
