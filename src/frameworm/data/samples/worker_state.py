"""Random state of torch's persistent workers: it survives an epoch, so a resumed run must restore it.

Workers that live for one epoch are seeded from the training loop's random state at their start, which is enough.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from frameworm.data.samples.held import Held, process_generators, read_state
from frameworm.torch_private.loaders import end_workers, live_iterator

_ROOM = 2**16
_LENGTH = 8


class PersistentWorkers:
    """Reads and sets the random state of a torch loader's persistent workers; does nothing for any other loader.

    Args:
        loader: Its `collate_fn` and `worker_init_fn` are replaced by wrappers.
    """

    def __init__(self, loader: Any) -> None:
        self._loader: Any = None
        self._restored = False
        self.note: str | None = None
        if not (isinstance(loader, DataLoader) and loader.persistent_workers and loader.num_workers):
            return
        if not isinstance(loader.collate_fn, _Recording):
            if live_iterator(loader) is not None:
                self.note = (
                    "the loader's persistent workers were started before the training: what they draw at random is "
                    "not saved, and a resumed run draws something else; pass a loader that has not been read"
                )
                return
            slots = _Slots(loader.num_workers)
            loader.worker_init_fn = _Starting(loader.worker_init_fn, loader.collate_fn, slots)
            loader.collate_fn = _Recording(loader.collate_fn, slots)
        self._loader = loader

    def capture(self) -> list[Any] | None:
        """The state of each worker, read while they are idle; None if there are no workers yet."""
        if self._loader is None or live_iterator(self._loader) is None:
            return None
        slots = self._loader.collate_fn.slots
        return [_unpacked(slots.read(worker)) for worker in range(self._loader.num_workers)]

    def restore(self, states: list[Any] | None) -> None:
        """Stop the workers; the next ones start with these states, or with fresh ones if None."""
        loader = self._loader
        if loader is None:
            return
        end_workers(loader)
        slots = loader.collate_fn.slots
        self._restored = states is not None and len(states) == loader.num_workers
        for worker in range(loader.num_workers):
            slots.write(worker, states[worker] if states is not None and self._restored else None)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Make the loader's next iterator in this block.

        Starting workers makes torch draw a seed. The original run did not draw it, because its workers kept running,
        and the order of samples comes from the same generator.
        """
        if not self._restored:
            yield
            return
        self._restored = False
        own, self._loader.generator = self._loader.generator, torch.Generator()
        try:
            yield
        finally:
            self._loader.generator = own


class _Slots:
    """A block of shared memory per worker."""

    def __init__(self, workers: int) -> None:
        self._memory = torch.zeros(workers, _ROOM, dtype=torch.uint8).share_memory_()

    def write(self, worker: int, state: Any) -> None:
        content = b"" if state is None else pickle.dumps(state)
        if len(content) > _ROOM - _LENGTH:
            content = b""
        data = len(content).to_bytes(_LENGTH, "little") + content
        self._memory[worker, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def read(self, worker: int) -> Any:
        memory = self._memory[worker].numpy()
        length = int.from_bytes(memory[:_LENGTH].tobytes(), "little")
        # Only our own processes write here, so unpickling is safe.
        return pickle.loads(memory[_LENGTH : _LENGTH + length].tobytes()) if length else None


class _Starting:
    """Runs the loader's `worker_init_fn`, then restores the worker's saved random state, if any."""

    def __init__(self, then: Callable[[int], None] | None, collate: Callable[[Any], Any], slots: _Slots) -> None:
        self._then = then
        self._collate = collate
        self._slots = slots

    def __call__(self, worker: int) -> None:
        if self._then is not None:
            self._then(worker)
        info = get_worker_info()
        assert info is not None, "called outside a worker"
        held = Held({**process_generators(), "dataset": info.dataset, "collate_fn": self._collate})
        state = self._slots.read(worker)
        if state is not None:
            held.restore(state)
        _in_this_worker.append(_Packer(held))


class _Recording:
    """Wraps the loader's `collate_fn`; saves the worker's random state after each batch."""

    def __init__(self, collate: Callable[[Any], Any], slots: _Slots) -> None:
        self.collate = collate
        self.slots = slots

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        info = get_worker_info()
        if info is not None and _in_this_worker:
            self.slots.write(info.id, _in_this_worker[-1].pack())
        return batch


class _Packer:
    """Serialises a worker's generators after each batch, fast enough not to delay it."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._walk = held.walk()
        self._packed: dict[str, bytes] = {}
        # NumPy is slow to export this state. It is exported once, and again only after something was drawn.
        self._untouched = {
            path: item._bit_generator
            for path, item in self._walk.generators.items()
            if isinstance(item, np.random.RandomState) and isinstance(item._bit_generator, np.random.MT19937)
        }
        self._memory = {path: _memory_of(bits) for path, bits in self._untouched.items()}

    def pack(self) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Generators and counters, as `Held.capture` returns them, for `_unpacked`."""
        for path, generator in self._walk.generators.items():
            bits = self._untouched.get(path)
            if bits is not None and path in self._packed:
                if _memory_of(bits) == self._memory[path]:
                    continue
                del self._untouched[path]
            if isinstance(generator, torch.Generator):  # torch pickles tensors slowly
                self._packed[path] = pickle.dumps(generator.get_state().numpy().tobytes())
            else:
                self._packed[path] = pickle.dumps(read_state(generator))
        return self._packed, self._held.counters(self._walk)


def _unpacked(packed: Any) -> dict[str, Any] | None:
    """The result that `Held.capture` would have returned."""
    if packed is None:
        return None
    states: dict[str, Any] = {}
    for path, content in packed[0].items():
        state = pickle.loads(content)
        if isinstance(state, bytes):
            state = {"torch": torch.frombuffer(bytearray(state), dtype=torch.uint8)}
        states[path] = state
    return {"generators": states, "counters": packed[1]}


def _memory_of(bits: np.random.MT19937) -> bytes:
    return ctypes.string_at(bits.ctypes.state_address, 4 * 624 + 4)  # its words, and the position in them


_in_this_worker: list[_Packer] = []
