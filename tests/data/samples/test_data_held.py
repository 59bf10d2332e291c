"""Generators and counters are found wherever a loader keeps them, and set again in another process's copy of it."""

from __future__ import annotations

import functools
import queue
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, random_split

from frameworm.data.samples.held import Held, Walk, read_state, reseed, write_state

SHARED = np.random.default_rng(9)


def _generators() -> list[Any]:
    return [
        torch.Generator().manual_seed(1),
        random.Random(1),
        np.random.default_rng(1),
        np.random.Generator(np.random.Philox(1)),
        np.random.Generator(np.random.MT19937(1)),
        np.random.RandomState(1),
    ]


def _draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand(1, generator=generator))
    return float(generator.random())


@pytest.mark.parametrize("place", range(6))
def test_a_generator_goes_on_where_its_state_was_read(place: int) -> None:
    generator, other = _generators()[place], _generators()[place]
    _draw(generator)
    assert write_state(other, read_state(generator))
    assert _draw(generator) == _draw(other)


@pytest.mark.parametrize("place", range(6))
def test_a_seed_decides_what_a_generator_draws(place: int) -> None:
    generator, other = _generators()[place], _generators()[place]
    _draw(generator)
    for item in (generator, other):
        reseed(item, 2**62 + 5)
    assert _draw(generator) == _draw(other)


def test_the_state_of_another_kind_is_not_taken() -> None:
    assert not write_state(random.Random(), read_state(np.random.default_rng()))


class Slotted:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = random.Random(2)


class OfClass:
    rng = random.Random(4)


class Names:
    def draw(self) -> float:
        return float(SHARED.random())


def _holders() -> dict[str, Any]:
    rng = np.random.default_rng(3)

    def closure() -> float:
        return float(rng.random())

    return {
        "slots": Slotted(),
        "closure": closure,
        "partial": functools.partial(print, [random.Random(3)]),
        "module": Names(),
        "class": OfClass(),
        "method": Slotted().__init__,
        "dict": {"a": {"b": (torch.Generator(),)}},
    }


@pytest.mark.parametrize("name", list(_holders()))
def test_generators_are_found_in_any_holder(name: str) -> None:
    assert len(Walk({"it": _holders()[name]}).generators) == 1


def test_a_generator_that_several_hold_is_found_once() -> None:
    generator = torch.Generator()
    part, _ = random_split(TensorDataset(torch.arange(8)), [4, 4], generator=generator)
    found = Walk({"loader": DataLoader(part, 2, shuffle=True, generator=generator)}).generators
    assert list(found.values()) == [generator]


def test_the_system_s_randomness_has_no_state() -> None:
    assert not Walk({"it": [random.SystemRandom()]}).generators


class Counting:
    def __init__(self) -> None:
        self.epoch, self.size = 0, 4
        self.rng: Any = None

    def draw(self) -> float:
        self.epoch += 1
        if self.rng is None:
            self.rng = np.random.default_rng(self.epoch)
        return float(self.rng.random())


def test_counters_and_generators_made_late_are_restored_in_a_new_object() -> None:
    held = Held({"it": (first := Counting())})
    first.draw()
    saved = held.capture()
    assert saved["counters"] == {"it.epoch": 1}
    second = Counting()
    second.size = 5  # what the run has not changed is the user's
    assert Held({"it": second}).restore(saved) == []
    assert (second.draw(), second.epoch, second.size) == (first.draw(), 2, 5)


def test_locks_and_threads_are_left_as_they_are() -> None:
    class Reading:
        def __init__(self) -> None:
            self.free = threading.BoundedSemaphore(3)
            self.thread = threading.Thread(target=print)
            self.words: queue.Queue[str] = queue.Queue(5)
            self.read = 0

    begun, now = Reading(), Reading()
    held = Held({"it": begun})
    begun.free.acquire()
    begun.read = 7
    saved = held.capture()
    assert saved["counters"] == {"it.read": 7}
    assert Held({"it": now}).restore(saved) == []
    assert now.read == 7


def test_what_is_not_there_any_more_is_named() -> None:
    saved = Held({"it": Slotted()}).capture()
    assert Held({"it": object()}).restore(saved) == ["it.rng"]
