"""How to call a function, by its signature, and descriptions of the values it is given."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from frameworm.data.batches.sizes import TARGET_KEYS


def _signature(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def first_parameter(function: Callable[..., Any]) -> str | None:
    """Return the name of the first parameter."""
    parameters = _signature(function)
    return parameters[0].name if parameters else None


def parameter_names(function: Callable[..., Any]) -> set[str]:
    """Return the names of all parameters except *args and **kwargs."""
    return {item.name for item in _signature(function) if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)}


def takes_target_first(function: Callable[..., Any]) -> bool:
    """Whether the parameter names indicate (target, output), the order of scikit-learn and Keras."""
    targets = {"y_true", *TARGET_KEYS} - {"y"}  # y may also name an output
    first, second, *_ = [*(item.name for item in _signature(function)), "", ""]
    return first in targets and second != "" and second not in targets


def takes_any_keyword(function: Callable[..., Any]) -> bool:
    """Whether the function takes **kwargs."""
    return any(item.kind is item.VAR_KEYWORD for item in _signature(function))


def positional_parameters(function: Callable[..., Any]) -> tuple[int, float]:
    """Return how many positional arguments a function requires, and how many it accepts."""
    found = _signature(function)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [item for item in found if item.kind in kinds]
    unlimited = not found or any(item.kind is item.VAR_POSITIONAL for item in found)
    return sum(item.default is item.empty for item in places), math.inf if unlimited else len(places)


def names_after(function: Callable[..., Any], taken: int) -> set[str]:
    """Return the parameters that can be passed by name after `taken` positional arguments."""
    found = _signature(function)
    places = [item.name for item in found if item.kind is item.POSITIONAL_OR_KEYWORD]
    before = sum(item.kind is item.POSITIONAL_ONLY for item in found)
    return {*places[max(0, taken - before) :], *(item.name for item in found if item.kind is item.KEYWORD_ONLY)}


def is_sequence(value: Any) -> bool:
    """Whether a value is a sequence other than a string."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def describe(value: Any) -> str:
    """Describe a value of a batch or an output."""
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping with keys {', '.join(map(str, value))}"
    if is_sequence(value):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
