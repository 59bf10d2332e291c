"""Set the switches of a script's loaders: processes, page-locked memory, batches without needless padding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data.dataloader as dataloader

from frameworm.attach.padding import trimmed
from frameworm.attach.patches import Patches
from frameworm.attach.trial.one_reader import OneReader
from frameworm.attach.trial.switches import Switches
from frameworm.attach.trial.whole_batches import at_once
from frameworm.torch_private.loaders import map_fetcher

_Function = Callable[..., Any]


def intercept_loading(switches: Switches, patches: Patches) -> None:
    """Set the switches in training loaders, which are recognised by reading in a non-sequential order."""
    reader = OneReader(patches) if switches.workers == 1 else None
    if switches.workers or switches.pin_memory or switches.trim_padding:
        patches.set(dataloader.DataLoader, "__init__", functools.partial(_with_loading, switches, reader))
    if switches.whole_batches:
        patches.set(map_fetcher(), "fetch", at_once)


def _with_loading(switches: Switches, reader: OneReader | None, original: _Function) -> _Function:
    @functools.wraps(original)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not can_have_processes(self):
            return
        # A loader cannot be changed after its first pass.
        if switches.workers and self.num_workers == 0:
            # New processes in each pass, torch's default: they see what the script has changed in its data set since,
            # and a shuffle in this process draws what it would have drawn.
            self.num_workers = switches.workers
            self.prefetch_factor = 2
            if reader is not None:
                reader.reads_for(self)
        if switches.pin_memory and torch.cuda.is_available():
            self.pin_memory = True
        if switches.trim_padding and getattr(self.collate_fn, "func", None) is not _trimming:  # libraries copy loaders
            self.collate_fn = functools.partial(_trimming, self.collate_fn)

    return initialise


def _trimming(collate: _Function, samples: Any) -> Any:
    return trimmed(collate(samples))


def can_have_processes(loader: Any) -> bool:
    """Whether a loader reads single samples in a non-sequential order, as training loaders do."""
    return reads_in_own_order(loader.dataset, loader.batch_sampler)


def reads_in_own_order(dataset: Any, batch_sampler: Any) -> bool:
    """Whether samples are read in a non-sequential order; see `can_have_processes`."""
    if batch_sampler is None or isinstance(dataset, torch.utils.data.IterableDataset):
        return False
    return not isinstance(getattr(batch_sampler, "sampler", None), torch.utils.data.SequentialSampler)
