"""Find the modules and parameters that a loss function holds and that are not part of the model.

A loss may be a module, a function that reads one from its closure, its defaults or the globals of its file, a
`functools.partial`, a bound method, or an object with `__call__`. Parameters that the optimizer holds in addition to
the model's are always trained, even if the search does not find what uses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from frameworm.errors import ModelError
from frameworm.parallel.beside import Beside
from frameworm.parallel.strategy import check_trainable

_DEEPEST = 6
_MOST_NAMED = 3
_MOST_ITEMS = 100  # a longer list is data
_LOOKED_INTO = (nn.Module, Tensor, functools.partial, MethodType, list, tuple, set, frozenset, Mapping)


def find_beside(
    model: nn.Module, loss_fn: Callable[..., Any] | None, optimizer: torch.optim.Optimizer | None = None
) -> Beside:
    """Find what trains beside the model.

    Raises:
        ModelError: If the optimizer holds no parameter of the model and none of the loss.
    """
    search = _Search(model)
    if loss_fn is not None:
        search.visit("", loss_fn, _DEEPEST)
    found = Beside(model, search.modules, search.loose)
    if optimizer is None:
        return found
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known = {id(item) for item in (*model.parameters(), *found.parameters.values())}
    if not any(id(item) in known for item in held):
        check_trainable(model, found.parameters.values())  # raises a more specific error if it can
        raise ModelError(
            "the optimizer holds no parameter of this model (or of loss_fn), so nothing would be trained; build it "
            "from this model: AdamW(model.parameters())"
        )
    strangers = {f"#{number}": item for number, item in enumerate(held) if id(item) not in known}
    return Beside(model, search.modules, {**search.loose, **strangers}, {id(item) for item in held})


def untrained_note(model: nn.Module, beside: Beside, optimizer: torch.optim.Optimizer) -> str | None:
    """What the summary says about trainable parameters that the optimizer does not hold."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    both = (*model.named_parameters(), *beside.parameters.items())
    left_out = [name for name, item in both if item.requires_grad and id(item) not in held]
    if not left_out:
        return None
    named = ", ".join(left_out[:_MOST_NAMED]) + (" and others" if len(left_out) > _MOST_NAMED else "")
    return f"not trained, because the optimizer does not hold them: {named}"


class _Search:
    """Walks the objects that a function can reach, as deep as losses are usually written."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.loose: dict[str, Tensor] = {}
        self._seen: set[int] = {id(module) for module in model.modules()} | {id(item) for item in model.parameters()}

    def visit(self, place: str, item: Any, depth: int) -> None:
        """Visit one object and what it holds."""
        if id(item) in self._seen or depth == 0:
            return
        self._seen.add(id(item))
        if isinstance(item, nn.Module):
            self._keep(self.modules, place, item)
        elif isinstance(item, Tensor):
            if isinstance(item, nn.Parameter) or (item.requires_grad and item.is_leaf):
                self._keep(self.loose, place or "parameter", item)
        else:
            for name, held in _held_by(item):
                self.visit(f"{place}.{name}" if place and name else place or name, held, depth - 1)

    def _keep(self, found: dict[str, Any], place: str, item: Any) -> None:
        name, number = place, 2
        while name in self.modules or name in self.loose:
            name, number = f"{place}-{number}", number + 1
        found[name] = item


def _held_by(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function, or another callable, can reach, by name."""
    if isinstance(item, functools.partial):
        yield "", item.func
        yield from ((f"args-{place}", value) for place, value in enumerate(item.args))
        yield from item.keywords.items()
    elif isinstance(item, MethodType):
        yield "", item.__func__
        if isinstance(item.__self__, nn.Module):
            yield "", item.__self__
        else:
            yield from _attributes(item.__self__)
    elif isinstance(item, FunctionType):
        yield from _held_by_function(item)
    elif isinstance(item, Mapping):
        if len(item) <= _MOST_ITEMS:
            yield from ((str(name), value) for name, value in item.items())
    elif isinstance(item, (list, tuple, set, frozenset)):
        if len(item) <= _MOST_ITEMS:
            yield from ((str(place), value) for place, value in enumerate(item))
    elif _is_called(item):
        yield from _attributes(item)
        yield "", type(item).__call__


def _is_called(item: Any) -> bool:
    """Whether the item is an object with `__call__`."""
    return callable(item) and not isinstance(item, (type, FunctionType, MethodType, BuiltinFunctionType))


def _attributes(item: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(item, "__dict__", {}).items()
    for kind in type(item).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(item, name):
                yield name, getattr(item, name)


def _held_by_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    names = set(_names_in(function.__code__))
    for name, value in _reached(function, names):
        if isinstance(value, FunctionType):
            # Functions of the same file may read more; library functions do not refer to the user's modules.
            if value.__globals__ is function.__globals__:
                yield name, value
        elif isinstance(value, _LOOKED_INTO) or _is_called(value):
            yield name, value
        else:  # a Python module or a plain object: only the attributes that the function names
            held = getattr(value, "__dict__", {})
            yield from ((f"{name}.{part}", held[part]) for part in sorted(names & held.keys()))


def _reached(function: FunctionType, names: set[str]) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # an empty cell
    if hasattr(function, "__wrapped__"):
        yield "", function.__wrapped__
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    yield from zip(arguments[len(arguments) - len(defaults) :], defaults)
    yield from (function.__kwdefaults__ or {}).items()
    yield from ((name, function.__globals__[name]) for name in sorted(names & function.__globals__.keys()))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
