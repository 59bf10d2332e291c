"""Copy tensors to memory that another process can read, while training continues.

On a CPU the copy is made at once. On a GPU the tensors are first copied on the device, in stream order after the step
they belong to, which takes a moment; from there they go to the host in the background, through two page-locked buffers
on a separate stream. If the device has no room for the first copy, training waits for the transfer to the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from frameworm.engine.checkpoint.writer_client import SharedMemory
from frameworm.torch_private.tensors import foreach_copy_

_ALIGNMENT = 256
_BOUNCE_BYTES = 32 * 2**20
_DEVICE_SHARE = 0.8  # largest fraction of the device's memory in use, including the copy


class Staging:
    """Memory for one snapshot at a time, reused for the next.

    Args:
        device: The training device.
        memory: Where the copies go.
    """

    def __init__(self, device: torch.device, memory: SharedMemory | None = None) -> None:
        self.memory = memory or SharedMemory()
        self.used_bytes = 0
        self.waited_for_device = False  # there was no room on the device for the last snapshot
        self._device = device
        self._base = torch.empty(0, dtype=torch.uint8)
        self._views: dict[tuple[int, torch.dtype, torch.Size], torch.Tensor] = {}  # into the base, kept between saves
        self._on_device: list[tuple[torch.Tensor, int, torch.cuda.Event]] = []
        self._bounce: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """Begin a new snapshot; the previous one is no longer needed."""
        self.used_bytes = 0
        self.waited_for_device = False
        self._on_device.clear()

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Copy tensors as they are now and return their offsets; data is complete after `finish`.

        Raises:
            OSError: If there is not enough memory.
        """
        here = {name: item for name, item in tensors.items() if not item.is_cuda}
        there = {name: item for name, item in tensors.items() if item.is_cuda}
        begin = self.used_bytes
        places = self._places({**here, **there})
        ends_here = max((places[name] + item.nbytes for name, item in here.items()), default=begin)
        if self.memory.grow(self.used_bytes):
            self._views.clear()
            self._base = torch.frombuffer(self.memory.mapped, dtype=torch.uint8)
        self.memory.fill(begin, ends_here - begin)
        _copy_all(here, [self._kept_view(places[name], item) for name, item in here.items()])
        if there:
            self._copy_on_device(there, places)
        return places

    def _kept_view(self, place: int, like: torch.Tensor) -> torch.Tensor:
        key = (place, like.dtype, like.shape)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = _view(self._base, place, like)
        return view

    def finish(self) -> None:
        """Wait until all copies are in the shared memory. May be called by another thread."""
        for flat, place, ready in self._on_device:
            self.memory.fill(place, flat.nbytes)
            self._bring(flat, place, ready)
        self._on_device.clear()

    def _places(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        places = {}
        end = self.used_bytes
        for name, item in tensors.items():
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
            places[name] = end
            end += item.nbytes
        self.used_bytes = end
        return places

    def _copy_on_device(self, tensors: Mapping[str, torch.Tensor], places: dict[str, int]) -> None:
        """Copy in the order of the training stream, so that the next step may change the tensors."""
        first = min(places[name] for name in tensors)
        size_bytes = max(places[name] + item.nbytes for name, item in tensors.items()) - first
        flat = self._device_memory(size_bytes)
        if flat is None:
            self.waited_for_device = True
            self.memory.fill(first, size_bytes)
            for name, item in tensors.items():
                source = item.contiguous().reshape(-1).view(torch.uint8) if item.numel() else None
                if source is not None:
                    self._bring(source, places[name], _event_now())
            return
        _copy_all(tensors, [_view(flat, places[name] - first, item) for name, item in tensors.items()])
        self._on_device.append((flat, first, _event_now()))

    def _device_memory(self, size_bytes: int) -> torch.Tensor | None:
        free, total = torch.cuda.mem_get_info(self._device)
        idle = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        if total - free - idle + size_bytes > _DEVICE_SHARE * total:
            return None
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            return None

    def _bring(self, source: torch.Tensor, place: int, ready: torch.cuda.Event) -> None:
        """Copy from the device to the shared memory in pieces."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
            self._bounce = [torch.empty(_BOUNCE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        target = self._base.numpy()
        under_way: tuple[Any, int, int, torch.cuda.Event] | None = None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            for number, begin in enumerate(range(0, source.numel(), _BOUNCE_BYTES)):
                length = min(_BOUNCE_BYTES, source.numel() - begin)
                buffer = self._bounce[number % 2][:length]
                buffer.copy_(source[begin : begin + length], non_blocking=True)
                arrived = torch.cuda.Event()
                arrived.record(self._stream)
                if under_way is not None:
                    _take(target, *under_way)
                under_way = (buffer, place + begin, length, arrived)
        if under_way is not None:
            _take(target, *under_way)

    def close(self) -> None:
        """Release all memory."""
        self.begin()
        self._bounce.clear()
        self._views.clear()
        self._base = torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(OSError):
            self.memory.close()


def _copy_all(tensors: Mapping[str, torch.Tensor], targets: list[torch.Tensor]) -> None:
    """Copy with one call per dtype."""
    kinds: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for item, target in zip(tensors.values(), targets):
        if item.numel():
            copies, sources = kinds.setdefault(item.dtype, ([], []))
            copies.append(target)
            sources.append(item)
    for copies, sources in kinds.values():
        foreach_copy_(copies, sources)


def _take(target: Any, buffer: torch.Tensor, place: int, length: int, arrived: torch.cuda.Event) -> None:
    arrived.synchronize()
    target[place : place + length] = buffer.numpy()  # NumPy copies without holding the GIL


def _event_now() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


def _view(flat: torch.Tensor, place: int, like: torch.Tensor) -> torch.Tensor:
    """View a range of bytes as a tensor like `like`."""
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype, device=flat.device)
    return flat[place : place + like.nbytes].view(like.dtype).view(like.shape)
