"""The transfer side of a loader: the next batch is copied to the device while this one is computed on."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import nullcontext
from itertools import chain
from time import perf_counter
from typing import Any

import torch

from frameworm.data.batches.sizes import fields_of
from frameworm.errors import DeviceError

# Below this a copy takes less time than the host spends on synchronising two streams: on steps of 5 ms with small
# batches, the second stream made the loop slower. The exact threshold has not been measured.
SMALL_BATCH_BYTES = 2**19


def move_batch(batch: Any, device: torch.device | str | int, non_blocking: bool = True) -> Any:
    """Move the tensors of a nested batch to a device; parts without tensors stay the same objects.

    Args:
        batch: Tensors in tuples, named tuples, lists, mappings (also HF encodings) or other objects: those with `.to`
            move themselves, others are shallow-copied with their tensors moved.
        device: The target device.
        non_blocking: Do not wait for copies from the host.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        # From host to device this is safe for pageable memory too, which the driver reads before it returns; asking
        # whether it is pinned would cost more than a small copy. From device to host, values could be read too early.
        return tensor.to(device, non_blocking=non_blocking and (tensor.is_cpu or tensor.is_pinned()))

    return map_tensors(batch, move, lambda item: _move_object(item, device, non_blocking))


def map_tensors(
    batch: Any, change: Callable[[torch.Tensor], torch.Tensor], move: Callable[[Any], Any] | None = None
) -> Any:
    """Apply a function to every tensor of a nested batch; unchanged parts stay the same objects.

    Args:
        batch: As for `move_batch`.
        change: Applied to each tensor.
        move: Applied to objects that have `.to`; None: they are treated like other objects.
    """
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        changed = {key: map_tensors(value, change, move) for key, value in batch.items()}
        if all(changed[key] is value for key, value in batch.items()):
            return batch
        return _like(batch, changed)
    if move is not None and callable(getattr(batch, "to", None)):
        return move(batch)
    if isinstance(batch, (tuple, list)):
        items = [map_tensors(item, change, move) for item in batch]
        if all(new is old for new, old in zip(items, batch)):
            return batch
        if hasattr(batch, "_fields"):
            return type(batch)(*items)
        return type(batch)(items)
    attributes = _attributes_of(batch)
    changed = {name: map_tensors(value, change, move) for name, value in attributes.items()}
    if all(changed[name] is value for name, value in attributes.items()):
        return batch
    clone = copy.copy(batch)
    for name, value in changed.items():
        object.__setattr__(clone, name, value)  # also works if the object is frozen
    return clone


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """All tensors of a nested batch in order; for other objects, those among their attributes."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (tuple, list)):
        for item in batch:
            yield from tensors_in(item)
    else:
        for value in _attributes_of(batch).values():
            yield from tensors_in(value)


class CudaDataLoader:
    """Yields a loader's batches on a device, copied one batch ahead on a separate stream.

    On the CPU it passes batches through. Everything else (length, `set_epoch`, `seek`, `step_shape`, `dataset`) is
    delegated to the inner loader. An error in the loader is raised in place of its batch, not one batch early.

    Args:
        loader: Any iterable of batches.
        device: The target device.
        prepare: Called with every batch before it is copied, or after it was built on the device.

    Attributes:
        copied_s: Seconds the host has spent in copies to a GPU; the consumer may reset it. A copy from page-locked
            memory is only enqueued; with other memory the host takes part, which is not a wait for the loader.

    Raises:
        DeviceError: There is no such GPU.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device | str | int,
        prepare: Callable[[Any], Any] | None = None,
    ) -> None:
        self.loader: Any = loader
        self.prepare = prepare
        self.device = _checked(device)
        self.copied_s = 0.0
        self._stream: torch.cuda.Stream | None = None
        self._lent: deque[tuple[torch.cuda.Event, Any]] = deque()
        if self.device.type == "cuda" and hasattr(loader, "copied"):
            loader.copied = True

    def __iter__(self) -> Iterator[Any]:
        prepared = self._prepared
        if getattr(self.loader, "in_chunks", False):
            if self.device.type == "cuda":
                return prepared(self._chunks_ahead())
            chunks = (move_batch(chunk, self.device) for chunk in self.loader.chunks(self.device))
            return prepared(batch for chunk in chunks for batch in self.loader.batches_of(chunk))
        # The inner iterator is made now rather than at the first batch, since making it may draw random numbers.
        batches = prepared(iter(self.loader))
        if self.device.type == "cuda":
            return self._to_gpu(batches)
        if self.device.type == "cpu":
            return (batch if _lies_on_host(batch) else move_batch(batch, self.device) for batch in batches)
        return (move_batch(batch, self.device) for batch in batches)

    def _prepared(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches if self.prepare is None else map(self.prepare, batches)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _to_gpu(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Copy batches on the caller's stream as long as they are small, then switch to copying ahead."""
        for batch in batches:
            if not _is_small(batch):
                yield from self._ahead(chain([batch], batches))
                return
            begin = perf_counter()
            copied = _copied(batch, self.device)
            self.hold(batch)
            self.copied_s += perf_counter() - begin
            yield copied

    def hold(self, batch: Any) -> None:
        """Keep a batch until its copies, the last ones enqueued on this stream, are done: its memory may be reused."""
        if not getattr(self.loader, "copied", False):
            return
        done = torch.cuda.Event()
        done.record()
        self._lent.append((done, batch))
        while self._lent[0][0].query():
            self._lent.popleft()
            if not self._lent:
                return

    def _ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        stream = self._side_stream()
        # One event serves all copies: the next is recorded only after the caller's stream waits for the previous one.
        arrived = torch.cuda.Event()
        upcoming = _Transfer(self, batches, stream, arrived)
        while True:
            transfer = upcoming
            batch = transfer.receive()
            if transfer.ended:
                return
            # Start the next copy before the caller computes on this batch; even if the caller synchronises with the
            # device in every step, the copy overlaps with the step.
            upcoming = _Transfer(self, batches, stream, arrived)
            del transfer
            yield batch
            del batch

    def open_ahead(self, epoch: int) -> None:
        """Let the loader build the first batches of the next epoch now, while the device is busy, if it can."""
        if self.device.type == "cuda" and getattr(self.loader, "in_chunks", False):
            with torch.cuda.stream(self._side_stream()):
                self.loader.open_ahead(epoch, self.device)

    def _chunks_ahead(self) -> Iterator[Any]:
        """Batches of chunks that are copied to the device whole, or built there on the side stream."""
        stream = self._side_stream()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            chunks = self.loader.chunks(self.device)
        return self._from_chunks(chunks, stream)

    def _from_chunks(self, chunks: Iterator[Any], stream: torch.cuda.Stream) -> Iterator[Any]:
        """Yield batches as views of chunks; all device memory they need belongs to the side stream."""
        arrived = torch.cuda.Event()
        upcoming = _Transfer(self, chunks, stream, arrived, made_aside=True)
        while True:
            chunk = upcoming.receive()
            if upcoming.ended:
                return
            following: _Transfer | None = None
            for batch in self.loader.batches_of(chunk):
                yield batch
                # Only after the first batch is out: the caller can start on it while the next chunk is made.
                if following is None:
                    following = _Transfer(self, chunks, stream, arrived, made_aside=True)
            assert following is not None, "a chunk holds at least one batch"
            upcoming = following

    def _side_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream


class _Transfer:
    """One batch being copied to the device, or the error raised in its place."""

    __slots__ = ("_arrived", "_batch", "_error", "_late", "_loader", "ended")

    def __init__(
        self,
        loader: CudaDataLoader,
        batches: Iterator[Any],
        stream: torch.cuda.Stream,
        arrived: torch.cuda.Event,
        made_aside: bool = False,
    ) -> None:
        self._loader = loader
        self._error: Exception | None = None
        self._batch: Any = None
        self._late = False
        self.ended = False
        self._arrived = arrived
        try:
            # A foreign loader that computes on the device does so in the caller's stream order; ours uses the side
            # stream.
            with torch.cuda.stream(stream) if made_aside else nullcontext():
                batch = next(batches)
        except StopIteration:
            self.ended = True
            return
        except Exception as error:
            self._error = error
            return
        if _hides_tensors(batch):
            # record_stream cannot protect tensors that cannot be found: copy them on the caller's own stream.
            self._batch, self._late = batch, True
            return
        begin = perf_counter()
        with torch.cuda.stream(stream):
            self._batch = move_batch(batch, loader.device)
            arrived.record(stream)
            loader.hold(batch)
        loader.copied_s += perf_counter() - begin

    def receive(self) -> Any:
        """The batch, safe to use on the caller's current stream."""
        if self._error is not None:
            raise self._error
        loader = self._loader
        if self._late:
            begin = perf_counter()
            moved = move_batch(self._batch, loader.device)
            loader.hold(self._batch)
            loader.copied_s += perf_counter() - begin
            return moved
        if not self.ended:
            current = torch.cuda.current_stream(loader.device)
            current.wait_event(self._arrived)
            for tensor in tensors_in(self._batch):
                if tensor.is_cuda:
                    # Its memory belongs to the side stream, which must not reuse it while the caller's stream still
                    # reads it.
                    tensor.record_stream(current)
        return self._batch


def _attributes_of(batch: Any) -> Mapping[str, Any]:
    """Attributes of an object that may hold tensors; not other plain objects, which may refer back to this one."""
    found = fields_of(batch)
    return {name: value for name, value in found.items() if _may_hold_tensors(value)} if found else found


def _may_hold_tensors(value: Any) -> bool:
    known = isinstance(value, (torch.Tensor, Mapping, tuple, list)) or dataclasses.is_dataclass(value)
    return known or callable(getattr(value, "to", None))


def _items(batch: Any) -> Iterable[Any]:
    """The items of a common kind of batch, else the batch itself; not recursive, since it runs in every step."""
    kind = type(batch)
    return batch.values() if kind is dict else batch if kind is tuple or kind is list else (batch,)


def _copied(batch: Any, device: torch.device) -> Any:
    """`move_batch` for a batch that passed `_is_small`, without further checks."""
    kind = type(batch)
    if kind is dict:
        return {name: item.to(device, non_blocking=True) for name, item in batch.items()}
    if kind is tuple or kind is list:
        return kind(item.to(device, non_blocking=True) for item in batch)
    return batch.to(device, non_blocking=True)


def _is_small(batch: Any) -> bool:
    """Whether a batch of a common kind is copied faster than a second stream can be synchronised."""
    size = 0
    for item in _items(batch):
        if not isinstance(item, torch.Tensor):
            return False
        size += item.nbytes
    return size <= SMALL_BATCH_BYTES


def _lies_on_host(batch: Any) -> bool:
    """Whether a batch of a common kind has nothing to move: a much cheaper check than trying."""
    for item in _items(batch):  # noqa: SIM110 - a generator would cost more than the checks themselves
        if not isinstance(item, torch.Tensor) or not item.is_cpu:
            return False
    return True


def _hides_tensors(batch: Any) -> bool:
    """Whether some object in the batch can be moved but exposes no tensors."""
    if isinstance(batch, torch.Tensor):
        return False
    if isinstance(batch, Mapping):
        return any(_hides_tensors(value) for value in batch.values())
    if isinstance(batch, (tuple, list)):
        return any(_hides_tensors(item) for item in batch)
    return callable(getattr(batch, "to", None)) and next(tensors_in(batch), None) is None


def _move_object(batch: Any, device: torch.device | str | int, non_blocking: bool) -> Any:
    pinned = getattr(batch, "is_pinned", None)
    if non_blocking and callable(pinned) and pinned():
        return batch.to(device, non_blocking=True)
    return batch.to(device)


def _like(batch: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    """The moved values in a mapping of the same type, with its other attributes."""
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return moved
    clone = copy.copy(batch)
    try:
        for key, value in moved.items():  # some types forbid `update`
            clone[key] = value
    except (TypeError, NotImplementedError):
        return moved
    return clone


def _checked(device: torch.device | str | int) -> torch.device:
    """The device with its index; DeviceError if it does not exist."""
    wanted = torch.device(device)
    if wanted.type != "cuda":
        return wanted
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise DeviceError(f"device {wanted} was asked for, but torch finds no GPU; use device 'cpu'")
    if str(wanted) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    if wanted.index >= count:
        raise DeviceError(f"device {wanted} was asked for, but there are only {count} GPUs, cuda:0 to cuda:{count - 1}")
    return wanted
