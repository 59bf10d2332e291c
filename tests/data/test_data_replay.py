"""A loader that cannot be replayed is found by reading copies of it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

from frameworm.data import replay
from frameworm.data.replay import fingerprint, why_not_replayed

DATA = TensorDataset(torch.arange(64))


class Drawn:
    """A sampler that draws its order by a function."""

    def __init__(self, draw: Callable[[Any], Iterator[int]]) -> None:
        self.items = list(range(64))
        self.rng = random.Random(1)
        self.epoch = 0
        self.draw = draw

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(self.draw(self))

    def __len__(self) -> int:
        return 64


def _in_place(sampler: Any) -> list[int]:
    random.shuffle(sampler.items)
    return list(sampler.items)


def _late(sampler: Any) -> Iterator[int]:
    left = list(range(64))
    while left:
        yield left.pop(int(torch.randint(len(left), (1,))))


class Stream(IterableDataset[Any]):
    def __init__(self, seeded: bool) -> None:
        self.rng = np.random.default_rng(1) if seeded else None

    def __iter__(self) -> Iterator[Any]:
        rng = self.rng if self.rng is not None else np.random.default_rng()
        return iter(torch.from_numpy(rng.random(64)))


class Classes(IterableDataset[int]):
    """Yields one of two values, as labels are: the first alone would often be the same."""

    def __iter__(self) -> Iterator[int]:
        return iter([0, *np.random.default_rng().integers(0, 2, 63).tolist()])


class SlowClasses(IterableDataset[int]):
    """Yields the same few values at first, and every other time others after them; each takes a while."""

    passes = itertools.count()

    def __iter__(self) -> Iterator[int]:
        changed = next(SlowClasses.passes) % 2
        for number in range(64):
            time.sleep(0.03)
            yield changed if number >= 5 else 0


def _unseeded_batches() -> Iterator[torch.Tensor]:
    yield torch.from_numpy(np.random.default_rng().random(4))


def _batches() -> Iterator[torch.Tensor]:
    yield torch.rand(4)


def _sampled(draw: Callable[[Any], Any]) -> Any:
    return DataLoader(DATA, 4, sampler=Drawn(draw))


REPLAYED: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(DATA, 4, shuffle=True),
    "generator": lambda: DataLoader(DATA, 4, sampler=RandomSampler(DATA, generator=torch.Generator())),
    "weighted": lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * 64, 64)),
    "own": lambda: _sampled(lambda it: it.rng.sample(range(64), 64)),
    "counted": lambda: _sampled(lambda it: random.Random(it.epoch).sample(range(64), 64)),
    "stream": lambda: DataLoader(Stream(seeded=True), 4),
    "function": lambda: _batches,
    "list": lambda: [torch.ones(2)],
}
NOT_REPLAYED: dict[str, tuple[Callable[[], Any], str]] = {
    "system": (lambda: _sampled(lambda it: random.SystemRandom().sample(range(64), 64)), "Drawn"),
    "in place": (lambda: _sampled(_in_place), "Drawn"),
    "late": (lambda: _sampled(_late), "Drawn"),
    "stream": (lambda: DataLoader(Stream(seeded=False), 4), "Stream"),
    "few values": (lambda: DataLoader(Classes(), 4), "Classes"),
    "few values, slowly": (lambda: DataLoader(SlowClasses(), 4), "SlowClasses"),
    "function": (lambda: _unseeded_batches, "_unseeded_batches"),
}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loader is left untested because the machine is busy."""
    monkeypatch.setattr(replay, "_SLOW_S", 60.0)


@pytest.mark.parametrize("kind", list(REPLAYED))
def test_what_can_be_replayed_is_not_named(kind: str) -> None:
    assert why_not_replayed(REPLAYED[kind]()) is None


@pytest.mark.parametrize("kind", list(NOT_REPLAYED))
def test_what_cannot_be_replayed_is_named(kind: str) -> None:
    make, name = NOT_REPLAYED[kind]
    problem = why_not_replayed(make())
    assert problem is not None
    assert problem[0] == name


def test_trying_changes_nothing() -> None:
    loader = _sampled(_in_place)
    sampler = loader.sampler
    before = (random.getstate(), sampler.rng.getstate(), torch.get_rng_state().tolist())
    why_not_replayed(loader)
    assert (sampler.epoch, sampler.items) == (0, list(range(64)))
    assert (random.getstate(), sampler.rng.getstate(), torch.get_rng_state().tolist()) == before


def test_nothing_is_taken_from_a_source_that_cannot_be_copied() -> None:
    class Queue:
        def __init__(self) -> None:
            self.left = iter(range(10))
            self.lock = __import__("threading").Lock()

        def __iter__(self) -> Iterator[int]:
            return self.left

    queue = Queue()
    assert why_not_replayed(queue) is None
    assert list(queue) == list(range(10))


def test_batches_are_told_apart() -> None:
    batch = {"a": torch.arange(4.0), "b": [torch.zeros(2, 2).to_sparse()]}
    assert fingerprint(batch) == fingerprint({"a": torch.arange(4.0)})
    assert fingerprint(batch) != fingerprint({"a": torch.arange(4.0) + 1})
    assert fingerprint([torch.arange(8).view(2, 4).t()]) != 0
