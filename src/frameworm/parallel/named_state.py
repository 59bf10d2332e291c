"""An optimizer's state by the names of parameters, so that it fits any strategy and number of processes.

torch numbers the parameters of an optimizer in the order of its groups. Names survive what numbers do not: another way
to shard, or groups that list their parameters in another order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn


def names_in_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], groups: Iterable[Mapping[str, Any]]
) -> list[list[str]]:
    """The names of each group's parameters; one that the model does not have goes by its number."""
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
    """torch's state dict of an optimizer with names instead of numbers; its tensors are not copied."""
    by_number: dict[int, str] = {}
    groups = []
    for group, its_names in zip(state["param_groups"], names, strict=True):
        by_number.update(zip(group["params"], its_names, strict=True))
        groups.append({**group, "params": list(its_names)})
    return {"state": {by_number[number]: value for number, value in state["state"].items()}, "param_groups": groups}


def to_numbers(saved: Mapping[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """The inverse, for an optimizer with these names.

    Raises:
        ValueError: The groups are others.
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
    """A numbered state in which what has a parameter's shape also lies in memory as the parameter does."""
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
    """Whether an optimizer has taken a step; what some make when they are built (a step of 0) does not count."""
    return any(state and ("step" not in state or bool(state["step"])) for state in optimizer.state.values())
