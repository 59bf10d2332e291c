"""Random generators and counters inside a loader, found by walking its objects, whatever their classes."""

from __future__ import annotations

import functools
import random
import threading
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

from frameworm.torch_private.loaders import LIVE_ATTRIBUTES

MOST_OBJECTS = 20_000
MOST_ITEMS = 256  # visited per list or dict: a data set may hold millions of file names
_PLAIN = (bool, int, float, str, type(None))
_LEAVES = (complex, bytes, bytearray, torch.Tensor, np.ndarray, np.generic, torch.dtype, torch.device)
# Objects of running threads and processes: restoring a semaphore's count, for example, would let too many threads pass.
_RUNNING = ("_queue", "_thread", "asyncio", "concurrent", "multiprocessing", "queue", "subprocess", "threading")
_CODE = (types.ModuleType, type, types.CodeType, types.BuiltinFunctionType)


def is_generator(value: Any) -> bool:
    """Whether a value is a random number generator whose state can be read and set."""
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    return isinstance(value, (torch.Generator, np.random.Generator, np.random.RandomState))


def _package_of(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def process_generators() -> dict[str, Any]:
    """The generators behind the module functions of `random`, `numpy.random` and `torch` (CPU) in this process."""
    return {"python": random._inst, "numpy": mtrand._rand, "torch": torch.default_generator}


def read_state(generator: Any) -> dict[str, Any]:
    """A generator's state as plain data."""
    if isinstance(generator, torch.Generator):
        return {"torch": generator.get_state()}
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"python": [version, list(words), gauss]}
    if isinstance(generator, np.random.RandomState):
        return {"numpy": _plain(generator.get_state(legacy=False))}
    return {"numpy": _plain(generator.bit_generator.state)}


def write_state(generator: Any, state: dict[str, Any]) -> bool:
    """Set a generator to a state from `read_state`; False if the state is of another kind of generator."""
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(state["torch"])
        elif isinstance(generator, random.Random):
            version, words, gauss = state["python"]
            generator.setstate((version, tuple(words), gauss))
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(_arrays(state["numpy"]))
        else:
            generator.bit_generator.state = _arrays(state["numpy"])
    except (KeyError, ValueError, TypeError, RuntimeError):
        return False
    return True


def reseed(generator: Any, seed: int) -> None:
    """Seed any kind of generator."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(seed).state


class Held:
    """The generators and counters inside some objects.

    A counter is an attribute with a plain value that has changed since this object was made: a sampler that counts its
    epochs, for example, only draws the same order again with the same count.

    Args:
        roots: The objects, by name.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = dict(roots)
        self._first = self.walk().attributes

    def walk(self) -> Walk:
        """Find everything that the objects hold now."""
        return Walk(self._roots)

    def capture(self) -> dict[str, Any]:
        """The state of all generators, and the counters that have changed, as plain data."""
        walk = self.walk()
        states = {path: read_state(item) for path, item in walk.generators.items()}
        return {"generators": states, "counters": self.counters(walk)}

    def counters(self, walk: Walk) -> dict[str, Any]:
        """The counters that have changed, among the attributes found by a walk."""
        return {path: value for path, value in walk.read() if self._first.get(path, walk) != value}

    def restore(self, saved: Mapping[str, Any]) -> list[str]:
        """Restore what `capture` returned; returns the names of generators that are missing or of another kind."""
        walk = self.walk()
        for path, value in saved["counters"].items():
            walk.set(path, value)
        missing = []
        for path, state in saved["generators"].items():
            generator = walk.generators.get(path)
            if generator is None:  # may be created on first use
                generator = _made(state)
                if not walk.set(path, generator, only_empty=True):
                    missing.append(path)
            if not write_state(generator, state):
                missing.append(path)
        return missing


class Walk:
    """Objects found by following the attributes and items of some roots, breadth first."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.generators: dict[str, Any] = {}
        self.attributes: dict[str, Any] = {}
        self.visited: list[Any] = []  # all objects except plain values
        self._owners: dict[str, Any] = {}
        seen: set[int] = set()
        todo = deque(roots.items())
        while todo and len(seen) < MOST_OBJECTS:
            path, value = todo.popleft()
            if isinstance(value, (*_PLAIN, *_CODE)) or id(value) in seen:
                continue
            seen.add(id(value))
            self.visited.append(value)
            if isinstance(value, (*_LEAVES, threading.Thread)) or _package_of(value) in _RUNNING:
                continue
            if is_generator(value):
                self.generators[path] = value
            elif isinstance(value, dict):
                todo.extend((f"{path}[{key!r}]", item) for key, item in islice(dict.items(value), MOST_ITEMS))
            elif isinstance(value, (list, tuple, deque)):
                todo.extend((f"{path}[{place}]", item) for place, item in enumerate(islice(value, MOST_ITEMS)))
            else:
                todo.extend(self._follow(path, value))

    def _follow(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, types.FunctionType):
            yield from _of_function(path, value)
            return
        if isinstance(value, types.MethodType):
            yield f"{path}.__self__", value.__self__
            return
        if isinstance(value, functools.partial):
            yield from ((f"{path}.func", value.func), (f"{path}.args", value.args), (f"{path}.kwargs", value.keywords))
        for name, item in _globals_of(type(value)).items():
            yield f"{path}.{name}", item
        self._owners[path] = value
        for name, item in _attributes(value):
            if isinstance(item, _PLAIN):
                self.attributes[f"{path}.{name}"] = item
            else:
                yield f"{path}.{name}", item

    def read(self) -> Iterator[tuple[str, Any]]:
        """The current values of plain attributes."""
        for owner_path, owner in self._owners.items():
            for name, item in _attributes(owner):
                if isinstance(item, _PLAIN):
                    yield f"{owner_path}.{name}", item

    def set(self, path: str, value: Any, only_empty: bool = False) -> bool:
        """Set an attribute; returns False if its object does not exist or refuses.

        Args:
            path: Path of the attribute from a root.
            value: The new value.
            only_empty: Do not overwrite an attribute that is not None.
        """
        owner_path, _, name = path.rpartition(".")
        owner = self._owners.get(owner_path)
        if owner is None or (only_empty and getattr(owner, name, None) is not None):
            return False
        with suppress(AttributeError, TypeError, ValueError):
            setattr(owner, name, value)
            return True
        return False


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object, read without running any code of its class."""
    with suppress(AttributeError, TypeError):
        for name, item in list(object.__getattribute__(value, "__dict__").items()):
            if name not in LIVE_ATTRIBUTES:
                yield name, item
    for kind in type(value).__mro__:
        for name in _slots(kind):
            with suppress(AttributeError):
                yield name, object.__getattribute__(value, name)


@functools.lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__"))


def _globals_of(kind: type) -> dict[str, Any]:
    """Generators that are attributes of a class, or module globals used by its methods."""
    found = {}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("builtins", "torch", "numpy", "frameworm"):
            continue
        for name, item in vars(base).items():
            if is_generator(item):
                found[name] = item
            function = getattr(item, "__func__", item)
            if isinstance(function, types.FunctionType):
                found.update(_named_by(function))
    return found


def _of_function(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with suppress(ValueError):  # an empty cell
            yield f"{path}.{name}", cell.cell_contents
    for place, item in enumerate(function.__defaults__ or ()):
        yield f"{path}.default{place}", item
    for name, item in _named_by(function).items():
        yield f"{path}.{name}", item


def _named_by(function: types.FunctionType) -> dict[str, Any]:
    """Generators among the globals used by a function."""
    around = function.__globals__
    return {name: around[name] for name in function.__code__.co_names if is_generator(around.get(name))}


def _made(state: Mapping[str, Any]) -> Any:
    """A new generator of the kind that a state belongs to."""
    if "torch" in state:
        return torch.Generator()
    if "python" in state:
        return random.Random()
    kind: Any = getattr(np.random, str(state["numpy"].get("bit_generator")), None)
    known = isinstance(kind, type) and issubclass(kind, np.random.BitGenerator)
    return np.random.Generator(kind() if known else np.random.PCG64())


def _plain(state: Any) -> Any:
    """NumPy's state with its arrays as bytes."""
    if isinstance(state, np.ndarray):
        return {"dtype": str(state.dtype), "bytes": state.tobytes()}
    return {key: _plain(item) for key, item in state.items()} if isinstance(state, Mapping) else state


def _arrays(state: Any) -> Any:
    if not isinstance(state, Mapping):
        return state
    if set(state) == {"dtype", "bytes"}:
        return np.frombuffer(state["bytes"], dtype=state["dtype"]).copy()
    return {key: _arrays(item) for key, item in state.items()}
