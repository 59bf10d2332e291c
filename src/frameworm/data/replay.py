"""Checks whether a loader read again from the same random state yields the same samples, as resuming requires."""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from frameworm.data.adopt import RankBatches
from frameworm.data.loader import OptimizedDataLoader
from frameworm.data.prefetch import CudaDataLoader, tensors_in
from frameworm.data.samples.held import Held, process_generators
from frameworm.data.samples.reader import copied
from frameworm.data.samples.streams import is_stream
from frameworm.data.stateful import PlacedLoader

_ITEMS = 64  # when items are indices or batches of indices
_SAMPLES = 32  # when items are samples or batches of them: at most this many within the time limit
_FEWEST = 8  # also from a slow source, since items with few possible values, such as labels, may agree by chance
_SOON_S = 0.1
_SLOW_S = 0.5
_FINGERPRINT_BYTES = 2**20


def users_parts(loader: Any, name: str) -> dict[str, Any]:
    """The user-defined parts of a loader, by name."""
    if isinstance(loader, (CudaDataLoader, PlacedLoader)):
        return users_parts(loader.loader, name)
    if isinstance(loader, RankBatches):
        return users_parts(loader.source, name)
    if not isinstance(loader, OptimizedDataLoader):
        return {name: loader}
    parts = {part: getattr(loader.settings, part) for part in ("sampler", "collate_fn", "worker_init_fn")}
    return {f"{name}.{part}": value for part, value in {"dataset": loader.dataset, **parts}.items()}


def drawn_order(loader: Any) -> tuple[Any, bool] | None:
    """What decides the order of a loader's samples, and whether it yields samples; None if nothing random decides.

    For a map-style data set that is a sampler, which can be compared without reading samples. Anything else must be
    read.
    """
    if isinstance(loader, RankBatches):
        loader = loader.source
    if isinstance(loader, OptimizedDataLoader):
        if loader.settings.sampler is not None:
            return loader.settings.sampler, False
        return (loader.dataset, True) if is_stream(loader.dataset) else None
    if isinstance(loader, DataLoader):
        if is_stream(loader.dataset):
            return loader.dataset, True
        batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        both = (batches, getattr(batches, "sampler", batches))
        # Torch's own samplers draw from a generator, all at once; there is nothing to test.
        return None if all(type(item).__module__.startswith("torch.") for item in both) else (batches, False)
    return None if isinstance(loader, (list, tuple)) else (loader, True)


def reads_data(loader: Any) -> bool:
    """Whether reading an item of `drawn_order` reads samples."""
    found = drawn_order(loader)
    return found is not None and found[1]


def why_not_replayed(loader: Any) -> tuple[str, str] | None:
    """The part that cannot be replayed, and why; None if no problem is found.

    Tested on two copies, so that nothing is taken from the loader itself: one is read twice, as in two epochs; the
    other is restored to the state before the second epoch, as in a resumed run, and must yield the same. A loader that
    cannot be copied, or takes long, is not tested.
    """
    found = drawn_order(loader)
    if found is None:
        return None
    source, samples = found
    shared = [] if samples else [getattr(loader, "dataset", None)]
    count = _SAMPLES if samples else _ITEMS
    around = Held({**process_generators(), "source": source})
    before = around.capture()
    try:
        gone_on, resumed = (copied(source, shared) for _ in range(2))
        goes_on, begins = (Held({**process_generators(), "source": item}) for item in (gone_on, resumed))
        began = time.perf_counter()
        epoch = _opened(gone_on)
        first = list(islice(epoch, 1))
        drawn = torch.default_generator.get_state()
        if not samples:
            list(islice(epoch, count - 1))
        draws_late = not samples and first and not torch.equal(drawn, torch.default_generator.get_state())
        state = goes_on.capture()
        if time.perf_counter() - began > _SLOW_S:
            return None
        expected = _soon(_opened(gone_on), count)
        begins.restore(state)
        again = list(islice(_opened(resumed), len(expected)))
    except Exception:  # from the user's code; if it fails in training too, it is reported there
        return None
    finally:
        around.restore(before)
    if draws_late:
        return _name(source), "draws its order bit by bit, from the random state that the model draws from too"
    if not _same(expected, again):
        return _name(source), "does not yield the same samples when it is read again from the same random state"
    return None


def fingerprint(batch: Any) -> int:
    """A number that differs between different batches."""
    found = 0
    for tensor in islice(tensors_in(batch), 16):
        with suppress(Exception):  # sparse, quantised or meta tensors; the others are enough
            part = tensor.detach().flatten()[: _FINGERPRINT_BYTES // max(1, tensor.element_size())]
            found = zlib.crc32(part.cpu().contiguous().view(torch.uint8).numpy().tobytes(), found)
    return found


def _name(source: Any) -> str:
    batches = getattr(source, "sampler", None)
    inner = source if batches is None else batches
    return getattr(inner, "__qualname__", type(inner).__name__)


def _opened(source: Any) -> Iterator[Any]:
    return iter(source if isinstance(source, Iterable) else source())


def _soon(items: Iterator[Any], count: int) -> list[Any]:
    """Up to `count` items within a time limit; a few from a slow source, and always at least one."""
    began, found = time.perf_counter(), []
    for item in islice(items, count):
        found.append(item)
        if time.perf_counter() - began > (_SOON_S if len(found) >= _FEWEST else _SLOW_S):
            break
    return found


def _same(first: Any, second: Any) -> bool:
    """Whether two nested values are equal; values that cannot be compared count as equal."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.shape == second.shape and bool(torch.equal(torch.nan_to_num(first), torch.nan_to_num(second)))
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.tobytes() == second.tobytes()
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second))
    if type(first) is not type(second):
        return False
    if hasattr(first, "__dict__") and (dataclasses.is_dataclass(first) or "__eq__" not in vars(type(first))):
        return _same(vars(first), vars(second))
    try:
        return bool(first == second)
    except Exception:
        return True
