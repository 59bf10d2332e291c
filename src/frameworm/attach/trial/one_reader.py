"""One loader process that draws the random numbers that the script's own process would have drawn.

torch seeds every loader process differently, so a data set with random augmentation yields other samples with processes
than without. A single process can yield the same: it starts from the state of the script's generators when the first
batch of a pass is requested, and with every batch they advance to its state.

That holds as long as nothing else draws from the same generators in between. Dropout on a CPU does, and so might a
sampler: then samples differ, and the proof detects it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from frameworm.attach.patches import Patches
from frameworm.attach.trial.whole_batches import can_be_indexed
from frameworm.data.samples.held import Held, Walk, process_generators, read_state, write_state
from frameworm.torch_private.loaders import NEXT_OF_WORKERS, OPENS_ITERATOR, pin_memory, set_source

_Function = Callable[..., Any]
_BOTH = (
    "frameworm: samples and training draw from the same random numbers here; with a loader process the samples differ"
)


class OneReader:
    """Makes a loader's single process draw as the script's own process would.

    Args:
        patches: Records the changes to torch.
    """

    def __init__(self, patches: Patches) -> None:
        self._datasets: list[Any] = []
        patches.set(*OPENS_ITERATOR, self._opened)
        patches.set(*NEXT_OF_WORKERS, _moved_on)

    def reads_for(self, loader: Any) -> None:
        """Register a loader that was given a process; copies that a library makes of it count too."""
        if not can_be_indexed(loader.dataset, loader.collate_fn):  # such a data set draws nothing
            self._datasets.append(loader.dataset)

    def _opened(self, original: _Function) -> _Function:
        @functools.wraps(original)
        def get_iterator(loader: Any) -> Any:
            if loader.num_workers != 1 or not any(loader.dataset is item for item in self._datasets):
                return original(loader)
            held = vars(loader)
            own = {name: held[name] for name in ("dataset", "collate_fn", "batch_sampler")}
            here = _Here(own["dataset"], own["collate_fn"])
            there = _There(own["dataset"], own["collate_fn"])
            held.update(dataset=there, collate_fn=there.collate, batch_sampler=_Places(own["batch_sampler"], here))
            try:
                iterator = original(loader)
            finally:
                held.update(own)
            set_source(iterator, own["dataset"], own["collate_fn"], own["batch_sampler"])
            iterator.frameworm_draws = here
            return iterator

        return get_iterator


def _moved_on(original: _Function) -> _Function:
    @functools.wraps(original)
    def next_data(iterator: Any) -> Any:
        found = original(iterator)
        if not isinstance(found, _Drawn):
            return found
        iterator.frameworm_draws.move_on(found)
        return found.batch

    return next_data


class _Here:
    """The generators in the script's process, by path."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self._walk, _ = _look_at(dataset, collate)
        self._known: dict[str, Any] = {}
        self._has_told = False

    def states(self) -> dict[str, Any]:
        """Return their states."""
        self._known = {path: _state(item) for path, item in self._walk.generators.items()}
        return self._known

    def move_on(self, drawn: _Drawn) -> None:
        """Advance generators to the loader process's states, unless something was drawn here since."""
        for path, state in drawn.states.items():
            generator = self._walk.generators.get(path)
            if generator is None:
                continue
            if _state(generator) == self._known.get(path):
                _set(generator, state)
            elif not self._has_told:
                print(_BOTH, file=sys.stderr)
                self._has_told = True
            self._known[path] = state
        for path, value in drawn.counters.items():
            self._walk.set(path, value)


class _There:
    """A data set in the loader's process, with its collate function."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self._dataset, self._collate = dataset, collate
        self._walk: Walk | None = None
        self._held: Held | None = None
        self._known: dict[str, Any] = {}
        self._counted: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not set yet during unpickling
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, places: Any) -> Any:
        """Return the samples at some indices."""
        if isinstance(places, _First):
            self._walk, self._held = _look_at(self._dataset, self._collate)
            for path, state in places.states.items():
                if path in self._walk.generators:
                    _set(self._walk.generators[path], state)
            self._known, places = places.states, places.places
        if getattr(self._dataset, "__getitems__", None):
            return self._dataset.__getitems__(places)
        return [self._dataset[place] for place in places]

    def collate(self, samples: Any) -> _Drawn:
        """Return a batch, with the generators and counters that changed for it."""
        batch = self._collate(samples)
        assert self._walk is not None
        assert self._held is not None
        states = {path: _state(item) for path, item in self._walk.generators.items()}
        counters = self._held.counters(self._walk)
        drawn = _Drawn(
            batch,
            {path: state for path, state in states.items() if self._known.get(path) != state},
            {path: value for path, value in counters.items() if self._counted.get(path, self) != value},
        )
        self._known, self._counted = states, counters
        return drawn


@dataclass(frozen=True)
class _First:
    """The first indices of a pass, and the generators' states."""

    places: Any
    states: dict[str, Any]


@dataclass(frozen=True)
class _Drawn:
    """A batch, with the states of generators and counters that changed for it."""

    batch: Any
    states: dict[str, Any]
    counters: dict[str, Any]

    def pin_memory(self) -> _Drawn:
        """Page-lock the batch; called by torch."""
        return _Drawn(pin_memory(self.batch), self.states, self.counters)


class _Places:
    """A batch sampler that adds the generators' states to its first batch, once that has been drawn."""

    def __init__(self, sampler: Any, here: _Here) -> None:
        self._sampler, self._here = sampler, here

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        for number, places in enumerate(self._sampler):
            yield places if number else _First(places, self._here.states())


def _look_at(dataset: Any, collate: Any) -> tuple[Walk, Held]:
    held = Held({**process_generators(), "dataset": dataset, "collate": collate})
    walk = held.walk()
    for path, item in list(walk.generators.items()):
        if isinstance(item, torch.Generator) and item.device.type != "cpu":
            del walk.generators[path]
    return walk, held


def _state(generator: Any) -> Any:
    """Return a generator's state as plain data, as a tensor would be sent through a separate file."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return read_state(generator)


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    else:
        write_state(generator, state)
