"""torch's DataLoader from inside: its iterators, its worker processes and how it fetches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.data._utils.fetch as fetch
import torch.utils.data._utils.worker as worker
import torch.utils.data.dataloader as dataloader
from torch.utils.data._utils.pin_memory import pin_memory as pin_memory

from frameworm.torch_private.lookup import attribute

# `pin_memory` copies a nested batch to page-locked memory as torch's loader does; needed when frameworm is imported.
# As (owner, name) for a patch: what makes an iterator, and what brings the next batch of one with worker processes.
OPENS_ITERATOR = (dataloader.DataLoader, "_get_iterator")
NEXT_OF_WORKERS = (dataloader._MultiProcessingDataLoaderIter, "_next_data")
# Of a loader's own: its live iterator, and what it starts processes with. A copy of a loader leaves these out.
LIVE_ATTRIBUTES = ("_iterator", "_DataLoader__multiprocessing_context", "_DataLoader__initialized")


def any_iterator() -> type:
    """The class of all iterators of loaders, whose `__next__` a watch wraps."""
    found: type = attribute(dataloader, "_BaseDataLoaderIter")
    return found


def map_fetcher() -> type:
    """The class whose `fetch` reads the samples of a batch by their places."""
    found: type = attribute(fetch, "_MapDatasetFetcher")
    return found


def live_iterator(loader: Any) -> Any:
    """The iterator that a loader with persistent workers keeps; None before its first pass."""
    return attribute(loader, "_iterator")


def forget_iterator(loader: Any) -> None:
    """Let a loader start new workers in its next pass."""
    attribute(loader, "_iterator")
    loader._iterator = None


def end_workers(loader: Any) -> None:
    """Stop the persistent workers of a loader, if it has started them."""
    iterator = live_iterator(loader)
    if iterator is not None:
        attribute(iterator, "_shutdown_workers")()
        forget_iterator(loader)


def unmarked_next(iterator: Any) -> Callable[[], Any] | None:
    """An iterator's next batch without the mark that torch leaves for profilers; None: there is only the usual way."""
    found: Callable[[], Any] | None = getattr(iterator, "_next_data", None)
    return found


def dataset_of(iterator: Any) -> Any:
    """What an iterator of a loader reads from."""
    return attribute(iterator, "_dataset")


def collate_of(iterator: Any) -> Any:
    """What an iterator of a loader puts batches together with."""
    return attribute(iterator, "_collate_fn")


def order_of(iterator: Any) -> Any:
    """The sampler that an iterator of a loader asks what to read next."""
    return attribute(iterator, "_index_sampler")


def workers_of(iterator: Any) -> int:
    """Processes that read for an iterator."""
    return int(attribute(iterator, "_num_workers"))


def is_pinned(iterator: Any) -> bool:
    """Whether an iterator copies batches to page-locked memory."""
    return bool(attribute(iterator, "_pin_memory"))


def set_source(iterator: Any, dataset: Any, collate: Any, order: Any) -> None:
    """What an iterator says that it reads, once its workers have been given something else."""
    dataset_of(iterator), collate_of(iterator), order_of(iterator)
    iterator._dataset, iterator._collate_fn, iterator._index_sampler = dataset, collate, order


def worker_info() -> Any:
    """What `get_worker_info` answers in this process."""
    return attribute(worker, "_worker_info")


def set_worker_info(info: Any) -> None:
    """Change `worker_info`: a data set read here then takes the share of one worker."""
    attribute(worker, "_worker_info")
    worker._worker_info = info


def make_worker_info(number: int, count: int, seed: int, dataset: Any) -> Any:
    """What `get_worker_info` answers in one of `count` workers."""
    return worker.WorkerInfo(id=number, num_workers=count, seed=seed, dataset=dataset)
