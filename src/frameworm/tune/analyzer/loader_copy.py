"""Copies of loaders for experiments: the original keeps its position, its epoch and its workers."""

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
from frameworm.torch_private.loaders import forget_iterator


def copy_loader(loader: Any, num_workers: int | None = None) -> Any:
    """A loader of the same batches, at the beginning of its epoch.

    Args:
        loader: As for `Trainer.train`. A loader of unknown kind is used as it is.
        num_workers: Worker processes of the copy; None: as many as the original has.

    Raises:
        DataError: It can be read only once, or its number of workers cannot be chosen.
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
    """Worker processes of a loader; None if its kind has none."""
    inner = loader.loader if isinstance(loader, CudaDataLoader) else loader
    if isinstance(inner, OptimizedDataLoader):
        return None if inner.in_chunks else inner.num_workers
    return inner.num_workers if isinstance(inner, DataLoader) else None


def other_workers(loader: Any, local_world_size: int) -> int | None:
    """A number of workers worth trying: as many as cores, fewer if there are too many, or twice as many."""
    now = workers_of(loader)
    if now is None:
        return None
    cores = max(1, usable_cpus() // max(1, local_world_size))
    if now == 0:
        return cores
    return max(1, cores - 1) if now > cores else 2 * now


def batches_ahead(loader: Any) -> int:
    """Batches that may be prefetched during a pause, and say nothing about the loader's speed."""
    workers = workers_of(loader) or 0
    inner = loader.settings if isinstance(loader, OptimizedDataLoader) else loader
    return workers * int(getattr(inner, "prefetch_factor", None) or 2)


def _copy_torch_loader(loader: DataLoader[Any], num_workers: int | None) -> DataLoader[Any]:
    twin = copy.copy(loader)
    memo = {id(loader.dataset): loader.dataset}
    changed: dict[str, Any] = {
        "_iterator": None,
        # One memo, because a batch sampler draws from the same sampler and generator as its loader.
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
    twin.__dict__.update(changed)  # a DataLoader rejects ordinary assignment
    return twin


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A copy that draws the same without affecting the original; objects in the memo are shared."""
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # it cannot be copied, so share it
        return value


def end_workers(loader: Any) -> None:
    """Stop the processes of a copied loader."""
    if isinstance(loader, OptimizedDataLoader):
        loader.close()
    elif isinstance(loader, DataLoader):
        forget_iterator(loader)
