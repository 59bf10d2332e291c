"""One reader of a stream: what it draws at random, whom the data set takes it for, and its place as plain data."""

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
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import get_worker_info

from frameworm.data.samples.held import MOST_ITEMS, Held, Walk
from frameworm.data.samples.seeding import RandomState

_SHARED_BYTES = 2**20
_DIGESTED = 2**14  # of the numbers or bytes of one part of a sample
_PLAIN = (type(None), bool, int, float, str, bytes, np.generic, torch.Tensor, torch.dtype)
NOT_COPIED = "not copied"
Told = tuple[int, int]  # number of a worker, and how many there are


class Reader:
    """Draws the samples of a data set; use it as a context, in which its random state and worker record hold.

    Args:
        dataset: The data set, or its part; or a function that opens it.
        entropy: Seeds what is drawn up to the first sample: the same for all that divide the data set among them, so
            that a data set that shuffles its files before it divides them shuffles alike everywhere.
        own: Seeds what is drawn after that; None: as before.
        told: The worker that `get_worker_info` reports to the data set; None: the loop's own process.
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
        self._outside = torch_worker._worker_info
        actual = get_worker_info()
        info = None
        if self._told is not None:
            number, count = self._told
            seed = 0 if actual is None else actual.seed
            info = torch_worker.WorkerInfo(id=number, num_workers=count, seed=seed, dataset=self.dataset)
        torch_worker._worker_info = info
        self._state.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._state.__exit__(*raised)
        torch_worker._worker_info = self._outside

    def open(self, place: Mapping[str, Any] | None = None) -> None:
        """Begin to read, or go on at a place; call it in the context."""
        if place is not None and "dataset" in place:
            self.dataset.load_state_dict(place["dataset"])
        self._source = iter(self.dataset if isinstance(self.dataset, Iterable) else self.dataset())
        self._holder = next((item for item in (self._source, self.dataset) if has_state(item)), None)
        if place is not None:
            if "iterator" in place:
                self._holder.load_state_dict(place["iterator"])
            self._own = None

    def take(self, count: int) -> Iterator[Any]:
        """The next samples; draw them in the context."""
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
        """Where it is, for `open`; what was drawn at random is `random`."""
        name = "iterator" if self._holder is self._source else "dataset"
        return {name: copy.deepcopy(self._holder.state_dict())}

    @property
    def random(self) -> dict[str, Any] | None:
        """The random state as plain data; None while nothing was drawn. Set it before the reader goes on."""
        return self._state.saved()

    @random.setter
    def random(self, saved: Mapping[str, Any] | None) -> None:
        if saved is not None:
            self._state.load(saved)


def has_state(item: Any) -> bool:
    """Whether something can say where it is and be put there again."""
    return all(callable(getattr(item, name, None)) for name in ("state_dict", "load_state_dict"))


def shards_of(dataset: Any) -> int | None:
    """The number of shards that a data set hands out by `shard(num_shards, index)`; None where it has no such method.

    Any complete division will do, so what else the method takes keeps its default.
    """
    number = getattr(dataset, "num_shards", None)
    shard = getattr(dataset, "shard", None)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1 or not callable(shard):
        return None
    if inspect.getattr_static(dataset, "shard", None) is None:
        return None  # forwarded by `__getattr__`: it would hand out shards of what is inside, without what is around it
    try:
        names = inspect.signature(shard).parameters
    except (TypeError, ValueError):
        return None
    return number if {"num_shards", "index"} <= set(names) else None


def first_samples(dataset: Any, seed: int, told: Told | None, count: int) -> list[int | str]:
    """Digests of what a reader gets first; with the name of the error, or the end, where the data set comes to one.

    A copy is read; where there can be none, only `NOT_COPIED` is found.
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
    except Exception as error:  # the user's own code: where it matters it fails again, and is heard
        found.append(type(error).__name__)
    return found


@contextmanager
def _looked_at(dataset: Any) -> Iterator[None]:
    """Put generators back to where they were that copies of a data set share with it, as those of a module."""
    around = Held({"dataset": dataset})
    before = around.capture()
    try:
        yield
    finally:
        around.restore(before)


def keeps_its_place(dataset: Any, seed: int) -> bool:
    """Whether a copy of a data set that is given another copy's state goes on exactly where that one was.

    A data set that shuffles in a buffer has a state, but the buffer is not in it. Reads some samples of copies, which
    may stop before the point where the state fails, so a resume checks again.
    """
    with _looked_at(dataset):
        return _goes_on(dataset, seed)


def _goes_on(dataset: Any, seed: int) -> bool:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # some warn that they may lose samples, which is what is found out here
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
    except Exception:  # as above
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
    """A number that tells different samples apart, and is the same in every process."""
    if isinstance(value, torch.Tensor):
        with suppress(Exception):  # sparse, quantised, on a meta device: what is around it tells
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
    """A copy that shares large arrays and the items of long lists with its original.

    Args:
        source: What to copy.
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
