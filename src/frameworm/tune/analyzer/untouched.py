"""Save and bitwise restore all state of a model, an optimizer and random generators that experiments may change."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from frameworm.numerics.randomness import random_state, restore_random_state


class _Values:
    """A tensor and a copy of its values in host memory, so that experiments have as much device memory as training."""

    def __init__(self, live: torch.Tensor) -> None:
        self._live = live
        self._data = live.data
        self._kept = live.detach().to("cpu", copy=True)

    @torch.no_grad()
    def restore(self) -> torch.Tensor:
        """Restore the tensor's memory and values, and return it."""
        if self._live.data_ptr() != self._data.data_ptr():
            self._live.data = self._data
        self._live.copy_(self._kept)
        return self._live


class _Attributes:
    """The references held by an object's attributes, and the states of random generators among them."""

    def __init__(self, owner: Any) -> None:
        self._attributes: dict[str, Any] | None = getattr(owner, "__dict__", None)
        self._kept = dict(self._attributes or {})
        self._generators = [(value, state) for value in self._kept.values() if (state := _state_of(value)) is not None]

    def restore(self) -> None:
        """Restore all attributes and delete new ones."""
        if self._attributes is None:
            return
        for name in [name for name in self._attributes if name not in self._kept]:
            del self._attributes[name]
        self._attributes.update(self._kept)
        for generator, state in self._generators:
            _set_state(generator, state)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return None


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


class _Module:
    """One module without its children: mode, buffers, attributes and class."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._class = type(module)  # activation checkpointing changes it
        self._attributes = _Attributes(module)
        self._buffers = {name: None if item is None else _Values(item) for name, item in module._buffers.items()}

    def restore(self) -> None:
        self._module.__class__ = self._class
        self._attributes.restore()
        buffers = self._module._buffers
        for name in [name for name in buffers if name not in self._buffers]:
            del buffers[name]
        for name, kept in self._buffers.items():
            buffers[name] = None if kept is None else kept.restore()


class _Wrapper:
    """A model's DDP wrapper: its attributes must match its reducer, which cannot be restored."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module
        self._training = module.training

    def restore(self) -> None:
        self._module.training = self._training


class _Optimizer:
    """State, learning rates and counters of an optimizer; new state is removed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._attributes = _Attributes(optimizer)
        self._states = [(owner, state, _kept(state)) for owner, state in optimizer.state.items()]
        self._groups = [_kept(group) for group in optimizer.param_groups]

    def restore(self) -> None:
        self._attributes.restore()
        self._optimizer.state.clear()
        for owner, state, kept in self._states:
            state.clear()
            state.update(_restored(kept))
            self._optimizer.state[owner] = state
        for group, kept in zip(self._optimizer.param_groups, self._groups):
            group.clear()
            group.update(_restored(kept))


def _kept(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _Values(item) if isinstance(item, torch.Tensor) else item for name, item in values.items()}


def _restored(kept: dict[str, Any]) -> dict[str, Any]:
    return {name: item.restore() if isinstance(item, _Values) else item for name, item in kept.items()}


@contextmanager
def untouched(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, *others: Any) -> Iterator[None]:
    """Restore everything bitwise after a block that may train as it likes.

    That is: parameters, their gradients, buffers, modes and attributes of all modules; the optimizer's state and rates;
    the generators of Python, NumPy, torch and the device; and the attributes of `others` (such as data sets), including
    generators among them. The content of mutable containers (a list that a module appends to) is not restored.
    """
    random_before = random_state(device)
    parameters = [(item, _Values(item), item.requires_grad) for item in model.parameters()]
    gradients = [(item, None if item.grad is None else _Values(item.grad)) for item in model.parameters()]
    kept: list[_Module | _Wrapper | _Optimizer | _Attributes] = [
        _Wrapper(module) if isinstance(module, DistributedDataParallel) else _Module(module)
        for module in model.modules()
    ]
    kept.append(_Optimizer(optimizer))
    kept += [_Attributes(other) for other in others]
    for item, _ in gradients:
        item.grad = None
    try:
        yield
    finally:
        for item, values, requires_grad in parameters:
            values.restore()
            item.requires_grad_(requires_grad)
        for item, gradient in gradients:
            item.grad = None if gradient is None else gradient.restore()
        for thing in kept:
            thing.restore()
        restore_random_state(random_before, device)
