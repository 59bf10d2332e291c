"""An optimizer's state by parameter names, so that it fits any strategy and number of processes.

torch numbers the parameters of an optimizer in the order of its groups. Names stay valid where numbers do not: with
another sharding, or if groups list their parameters in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


def names_in_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], groups: Iterable[Mapping[str, Any]]
) -> list[list[str]]:
    """The names of each group's parameters; those that are not in the model are named by their number."""
    names: dict[int, str] = {}
    for name, parameter in named_parameters:
        names.setdefault(id(parameter), name)
    found: list[list[str]] = []
    number = 0
    for group in groups:
        found.append([])
        for parameter in group["params"]:
            found[-1].append(names.get(id(parameter), f"#{number}"))
            number += 1
    return found


def to_names(state: Mapping[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """Replace the numbers in an optimizer's state dict by names; tensors are not copied."""
    by_number: dict[int, str] = {}
    groups = []
    for group, its_names in zip(state["param_groups"], names, strict=True):
        by_number.update(zip(group["params"], its_names, strict=True))
        groups.append({**group, "params": list(its_names)})
    return {"state": {by_number[number]: value for number, value in state["state"].items()}, "param_groups": groups}


def to_numbers(saved: Mapping[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """The inverse of `to_names`, for an optimizer with these names.

    Raises:
        ValueError: The groups do not match.
    """
    groups = saved["param_groups"]
    if len(groups) != len(names):
        raise ValueError(f"it has {len(groups)} parameter groups, this one {len(names)}")
    numbers: dict[str, int] = {}
    numbered = []
    count = 0
    for place, (group, its_names) in enumerate(zip(groups, names)):
        given = group["params"]
        if len(given) != len(its_names):
            raise ValueError(f"group {place} has {len(given)} parameters, this one {len(its_names)}")
        own = list(range(count, count + len(its_names)))
        count += len(its_names)
        missing = sorted(set(its_names) - set(given))
        if missing:
            raise ValueError(f"group {place} has no {missing[0]}")
        numbers.update(zip(its_names, own))
        numbered.append({**group, "params": own})
    return {"state": {numbers[key]: value for key, value in saved["state"].items()}, "param_groups": numbered}


def laid_out(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Give tensors of a numbered state the memory layout of their parameters, if they have the same shape."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def lay_out(value: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or parameter.is_contiguous():
            return value
        return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)

    arranged = {
        number: {key: lay_out(value, parameters[number]) for key, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": arranged}


def holds_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has taken a step; state created at construction (a step of 0) does not count."""
    return any(state and ("step" not in state or bool(state["step"])) for state in optimizer.state.values())
