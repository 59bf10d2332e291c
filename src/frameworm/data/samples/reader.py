"""One reader of a stream: its random state, the worker it appears as, and its position as plain data."""

from __future__ import annotations

import copy
import inspect
import logging
import types
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from frameworm.data.samples.held import MOST_ITEMS, Held, Walk
from frameworm.data.samples.seeding import RandomState
from frameworm.torch_private.loaders import make_worker_info, set_worker_info, worker_info

_SHARED_BYTES = 2**20
_DIGESTED = 2**14  # numbers or bytes digested per part of a sample
_PLAIN = (type(None), bool, int, float, str, bytes, np.generic, torch.Tensor, torch.dtype)
NOT_COPIED = "not copied"
Told = tuple[int, int]  # a worker's number, and the number of workers


class Reader:
    """Reads the samples of a data set; used as a context manager that sets its random state and worker info.

    Args:
        dataset: The data set or a part of it; or a function that returns it.
        entropy: Seed up to the first sample, the same for all readers that divide the data set, so that a data set that
            shuffles its files before dividing them shuffles the same way everywhere.
        own: Seed from then on; None: continue as before.
        told: The worker that `get_worker_info` reports to the data set; None: the main process.
    """

    def __init__(
        self, dataset: Any, entropy: tuple[int, ...], own: tuple[int, ...] | None = None, told: Told | None = None
    ) -> None:
        self.dataset = dataset
        self._state = RandomState(*entropy)
        self._own = own
        self._told = told
        self._outside: Any = None
        self._source: Iterator[Any] | None = None
        self._holder: Any = None

    def __enter__(self) -> Reader:
        self._outside = worker_info()
        actual = get_worker_info()
        info = None
        if self._told is not None:
            number, count = self._told
            seed = 0 if actual is None else actual.seed
            info = make_worker_info(number, count, seed, self.dataset)
        set_worker_info(info)
        self._state.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._state.__exit__(*raised)
        set_worker_info(self._outside)

    def open(self, place: Mapping[str, Any] | None = None) -> None:
        """Start reading, or continue at a place; call it inside the context."""
        if place is not None and "dataset" in place:
            self.dataset.load_state_dict(place["dataset"])
        self._source = iter(self.dataset if isinstance(self.dataset, Iterable) else self.dataset())
        self._holder = next((item for item in (self._source, self.dataset) if has_state(item)), None)
        if place is not None:
            if "iterator" in place:
                self._holder.load_state_dict(place["iterator"])
            self._own = None

    def take(self, count: int) -> Iterator[Any]:
        """The next samples; consume them inside the context."""
        source = self._source
        assert source is not None, "not open"
        own, self._own = self._own, self._own if not count else None
        if own is not None and count:
            for sample in islice(source, 1):
                self._state.reseed(*own)
                count -= 1
                yield sample
        yield from islice(source, count)

    def place(self) -> dict[str, Any]:
        """The current position, for `open`; the random state is `random`."""
        name = "iterator" if self._holder is self._source else "dataset"
        return {name: copy.deepcopy(self._holder.state_dict())}

    @property
    def random(self) -> dict[str, Any] | None:
        """The random state as plain data; None if nothing has been drawn. Set it before continuing at a place."""
        return self._state.saved()

    @random.setter
    def random(self, saved: Mapping[str, Any] | None) -> None:
        if saved is not None:
            self._state.load(saved)


def has_state(item: Any) -> bool:
    """Whether an object can save and restore its position."""
    return all(callable(getattr(item, name, None)) for name in ("state_dict", "load_state_dict"))


def shards_of(dataset: Any) -> int | None:
    """The number of shards that a data set offers through `shard(num_shards, index)`; None if it has no such method.

    Any complete division will do, so other parameters of the method keep their defaults.
    """
    number = getattr(dataset, "num_shards", None)
    shard = getattr(dataset, "shard", None)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1 or not callable(shard):
        return None
    if inspect.getattr_static(dataset, "shard", None) is None:
        return None  # forwarded by `__getattr__`: its shards would lack the wrapper around the inner data set
    try:
        names = inspect.signature(shard).parameters
    except (TypeError, ValueError):
        return None
    return number if {"num_shards", "index"} <= set(names) else None


def first_samples(dataset: Any, seed: int, told: Told | None, count: int) -> list[int | str]:
    """Digests of the first samples a reader gets, followed by "end" or the error's name if there are fewer.

    Reads a copy; if the data set cannot be copied, the result is `NOT_COPIED`.
    """
    found: list[int | str] = []
    try:
        spare = copied(dataset)
    except Exception:
        return [NOT_COPIED]
    try:
        reader = Reader(spare, (seed, 0), told=told)
        with _looked_at(dataset), reader:
            reader.open()
            found.extend(digest(sample) for sample in reader.take(count))
        if len(found) < count:
            found.append("end")
    except Exception as error:  # from the user's code: if it matters, it is raised again later
        found.append(type(error).__name__)
    return found


@contextmanager
def _looked_at(dataset: Any) -> Iterator[None]:
    """Restore generators, such as module globals, that copies of a data set share with it."""
    around = Held({"dataset": dataset})
    before = around.capture()
    try:
        yield
    finally:
        around.restore(before)


def keeps_its_place(dataset: Any, seed: int) -> bool:
    """Whether a copy of a data set, given another copy's state, continues exactly where that one was.

    A data set that shuffles in a buffer has a state, but without the buffer. This reads a few samples of copies, which
    may be too few to reveal a difference, so resuming checks again.
    """
    with _looked_at(dataset):
        return _goes_on(dataset, seed)


def _goes_on(dataset: Any, seed: int) -> bool:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # some warn that they may lose samples, which is tested here
    try:
        for taken in (1, 3):
            first, second = (Reader(copied(dataset), (seed, 0)) for _ in range(2))
            with first:
                first.open()
                if first._holder is None:
                    return False
                read = [digest(sample) for sample in first.take(taken)]
                place = first.place()
            drawn = first.random
            if not is_plain(place):
                return False
            with first:
                expected = [digest(sample) for sample in first.take(4)]
            with second:
                second.open(place)
            second.random = drawn
            with second:
                if [digest(sample) for sample in second.take(4)] != expected:
                    return False
            if len(read) < taken:
                break
    except Exception:  # from the user's code, as in `first_samples`
        return False
    finally:
        logging.disable(before)
    return True


def is_plain(value: Any) -> bool:
    """Whether a checkpoint can hold a value: tensors, arrays and plain data in dicts, lists and tuples."""
    if isinstance(value, dict):
        return all(isinstance(key, _PLAIN) and is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(is_plain(item) for item in value)
    return isinstance(value, _PLAIN) or (type(value) is np.ndarray and value.dtype.kind in "biuf")


def digest(value: Any, found: int = 0) -> int:
    """A number that differs between different samples and is the same in every process."""
    if isinstance(value, torch.Tensor):
        with suppress(Exception):  # sparse, quantised or meta tensors; other parts of the sample must do
            value = value.detach().flatten()[:_DIGESTED].cpu().view(torch.uint8).numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = value.ravel()[:_DIGESTED].tobytes()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return zlib.crc32(memoryview(value)[:_DIGESTED], found)
    if isinstance(value, (str, int, float, complex, bool, type(None), np.generic)):
        return zlib.crc32(f"{type(value).__name__} {value!r}".encode("utf-8", "surrogatepass"), found)
    found = zlib.crc32(type(value).__name__.encode(), found)
    if isinstance(value, Mapping):
        for key, item in value.items():
            found = digest(item, digest(key, found))
        return found
    if isinstance(value, (list, tuple, deque)) or (isinstance(value, np.ndarray) and value.ndim):
        for item in value:
            found = digest(item, found)
        return found
    if callable(getattr(value, "tobytes", None)):  # an image
        return zlib.crc32(value.tobytes()[:_DIGESTED], found)
    inside = getattr(value, "__dict__", None)
    return digest({name: item for name, item in inside.items() if not callable(item)}, found) if inside else found


def copied(source: Any, shared: Iterable[Any] = ()) -> Any:
    """A deep copy that shares large arrays and the items of long lists with the original.

    Args:
        source: The object to copy.
        shared: Objects that the copy shares with it.
    """
    memo: dict[int, Any] = {id(item): item for item in shared}
    for item in Walk({"source": source}).visited:
        if id(item) in memo:
            continue
        if isinstance(item, (torch.Tensor, np.ndarray)) and item.nbytes > _SHARED_BYTES:
            memo[id(item)] = item
        elif isinstance(item, (list, dict, deque)) and len(item) > MOST_ITEMS:
            memo[id(item)] = copy.copy(item)
    if isinstance(source, types.FunctionType) and source.__closure__:
        cells = tuple(types.CellType(copy.deepcopy(cell.cell_contents, memo)) for cell in source.__closure__)
        return types.FunctionType(source.__code__, source.__globals__, source.__name__, source.__defaults__, cells)
    return copy.deepcopy(source, memo)
