"""Random state derived from a few numbers, separate from the process's own."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand


def mix(*entropy: int) -> int:
    """One 63-bit seed from several numbers; similar numbers give unrelated seeds."""
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


def seed_process(*entropy: int) -> None:
    """Seed Python, NumPy and torch (CPU) in this process."""
    seed = mix(*entropy)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


class RandomState:
    """A random state that replaces the process's inside a `with` block and is kept between blocks."""

    def __init__(self, *entropy: int) -> None:
        self._outside = _read()
        try:
            mtrand.set_bit_generator(np.random.MT19937(0))
            seed_process(*entropy)
            self._state = _read()
        finally:
            _write(self._outside)
        self._unused = (self._state[0], self._state[1].state["state"], self._state[2])

    def reseed(self, *entropy: int) -> None:
        """Reseed the state of the current `with` block."""
        seed_process(*entropy)

    def saved(self) -> dict[str, object] | None:
        """The state between two `with` blocks as plain data; None if nothing has been drawn yet."""
        python, bits, torch_cpu = self._state
        numpy, first = bits.state["state"], self._unused[1]
        drawn = numpy["pos"] != first["pos"] or not np.array_equal(numpy["key"], first["key"])
        if not drawn and python == self._unused[0] and torch.equal(torch_cpu, self._unused[2]):
            return None
        version, words, gauss = python
        return {
            "python": [version, np.array(words, np.uint32).tobytes(), gauss],
            "numpy": [numpy["key"].astype(np.uint32).tobytes(), int(numpy["pos"])],
            "torch": torch_cpu.numpy().tobytes(),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore a state from `saved`."""
        version, words, gauss = saved["python"]
        key, position = saved["numpy"]
        bits = np.random.MT19937(0)
        bits.state = {"bit_generator": "MT19937", "state": {"key": np.frombuffer(key, np.uint32), "pos": position}}
        torch_cpu = torch.frombuffer(bytearray(saved["torch"]), dtype=torch.uint8)
        self._state = ((version, tuple(np.frombuffer(words, np.uint32).tolist()), gauss), bits, torch_cpu)

    def __enter__(self) -> None:
        self._outside = _read()
        _write(self._state)

    def __exit__(self, *raised: object) -> None:
        self._state = _read()
        _write(self._outside)


@contextmanager
def seeded(*entropy: int) -> Iterator[None]:
    """Run a block under a state seeded with these numbers, then restore the process's own."""
    with RandomState(*entropy):
        yield


_State = tuple[tuple[Any, ...], Any, torch.Tensor]


def _read() -> _State:
    # NumPy's generator is swapped as a whole: copying its state may take longer than reading a batch.
    return random.getstate(), mtrand.get_bit_generator(), torch.get_rng_state()


def _write(state: _State) -> None:
    python, numpy, torch_cpu = state
    random.setstate(python)
    mtrand.set_bit_generator(numpy)
    torch.set_rng_state(torch_cpu)
