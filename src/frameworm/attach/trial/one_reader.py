"""One loader process that draws what the script's own process would have drawn for its samples.

torch gives each process of a loader a seed of its own, so a data set that augments at random yields other samples with
processes than without. A single process can yield the same: it goes on where the script's generators are when the
first batch of a pass is asked for, and with every batch they move on to where it has got to.

That holds as long as nobody else draws from the same generators in between. Dropout on a CPU does, and so might a
sampler: then samples differ, as the proof will find.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import DataLoader, _MultiProcessingDataLoaderIter

from frameworm.attach.patches import Patches
from frameworm.attach.trial.whole_batches import can_be_indexed
from frameworm.data.samples.held import Held, Walk, process_generators, read_state, write_state

_Function = Callable[..., Any]
_BOTH = (
    "frameworm: samples and training draw from the same random numbers here; with a loader process the samples are "
    "others than without"
)


class OneReader:
    """Lets single processes of loaders draw as if they were the script's own.

    Args:
        patches: Takes what is changed in torch.
    """

    def __init__(self, patches: Patches) -> None:
        self._datasets: list[Any] = []
        patches.set(DataLoader, "_get_iterator", self._opened)
        patches.set(_MultiProcessingDataLoaderIter, "_next_data", _moved_on)

    def reads_for(self, loader: Any) -> None:
        """A loader has been given its process; copies that a library makes of it count too."""
        if not can_be_indexed(loader.dataset, loader.collate_fn):  # nothing is drawn there
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
            iterator._dataset, iterator._collate_fn = own["dataset"], own["collate_fn"]
            iterator._index_sampler = own["batch_sampler"]
            iterator._frameworm_draws = here
            return iterator

        return get_iterator


def _moved_on(original: _Function) -> _Function:
    @functools.wraps(original)
    def next_data(iterator: Any) -> Any:
        found = original(iterator)
        if not isinstance(found, _Drawn):
            return found
        iterator._frameworm_draws.move_on(found)
        return found.batch

    return next_data


class _Here:
    """The generators of the script's process, by what they are found under."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self._walk, _ = _look_at(dataset, collate)
        self._known: dict[str, Any] = {}
        self._has_told = False

    def states(self) -> dict[str, Any]:
        """Where they are."""
        self._known = {path: _state(item) for path, item in self._walk.generators.items()}
        return self._known

    def move_on(self, drawn: _Drawn) -> None:
        """Follow the loader's process, where nothing was drawn here since."""
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
    """A data set in the loader's process, with what to make of its samples."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self._dataset, self._collate = dataset, collate
        self._walk: Walk | None = None
        self._held: Held | None = None
        self._known: dict[str, Any] = {}
        self._counted: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not there yet when it is unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, places: Any) -> Any:
        """The samples at some places."""
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
        """A batch, and what was drawn and counted for it."""
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
    """The first places of a pass, and where the generators are."""

    places: Any
    states: dict[str, Any]


@dataclass(frozen=True)
class _Drawn:
    """A batch, the generators that have moved for it, and counters that have changed."""

    batch: Any
    states: dict[str, Any]
    counters: dict[str, Any]

    def pin_memory(self) -> _Drawn:
        """What torch asks for where batches are page-locked."""
        return _Drawn(pin_memory(self.batch), self.states, self.counters)


class _Places:
    """A batch sampler that sends the generators' states along with its first batch, when that has been drawn."""

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
    """As plain data: a tensor would be sent by a file of its own."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return read_state(generator)


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    else:
        write_state(generator, state)
