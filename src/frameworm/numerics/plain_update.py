"""Checks an optimizer step against torch's plain implementation with the same gradient and state."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from frameworm.numerics.sketch import is_sharded
from frameworm.numerics.state import Named, own_shard, set_numbers

# Choices between implementations of one algorithm; in the plain one all of them are off.
_SWITCHES = ("fused", "foreach", "capturable", "differentiable")
# Different orders of operations differ by a few roundings of the value and of what is added to it.
_ROUNDINGS = 8
# CUDA's fp32 power function is off by at most this many units.
_POWER_UNITS = 4
_UNIT = 2.0**-24


def settings_of(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, dict[str, object]]:
    """Return each parameter's optimizer settings (rate, decay and the like), without choices of implementation."""
    found: dict[str, dict[str, object]] = {}
    for group in optimizer.param_groups:
        values = {
            key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
            for key, value in group.items()
            if key != "params" and key not in _SWITCHES
        }
        plain: dict[str, object] = {
            key: value for key, value in values.items() if isinstance(value, (int, float, str, tuple, type(None)))
        }
        found.update((names[item], plain) for item in group["params"] if item in names)
    return found


class PlainUpdate:
    """A copy of an optimizer that runs torch's plain implementation on copies of its parameters.

    Args:
        optimizer: The optimizer to check; it must have made its first step.
        names: Names of its parameters.
        clip_norm: Largest norm of all gradients together; None: no clipping.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], clip_norm: float | None
    ) -> None:
        self._given = optimizer
        self._names = dict(names)
        self._clip_norm = clip_norm

    @torch.no_grad()
    def errors(self, before: Named, gradients: Named, after: Named) -> dict[str, float]:
        """Return for each parameter with a state its largest error, in multiples of what rounding explains.

        Args:
            before: Parameters and optimizer state before the step, named as in `StepTensors`.
            gradients: Unscaled and unclipped gradients by parameter name.
            after: Parameters after the step.
        """
        expected = self._updated(before, gradients, 1.0)
        # A constant such as 1 - beta may be computed from settings rounded to fp32.
        nearby = [self._updated(before, gradients, 1 + sign * _UNIT) for sign in (-1, 1)]
        corrections = self._corrections(before)
        return {
            name: _worst(
                before[f"parameter {name}"],
                value,
                [item[name] for item in nearby],
                after[f"parameter {name}"],
                corrections[name],
            )
            for name, value in expected.items()
        }

    def _corrections(self, before: Named) -> dict[str, float]:
        """By parameter: relative error of a factor such as 1 - beta ** step computed in fp32."""
        found = {}
        for group in self._given.param_groups:
            settings = [item for value in group.values() for item in (value if isinstance(value, tuple) else (value,))]
            below_one = [item for item in settings if isinstance(item, float) and 0 < item < 1]
            for name in (self._names[item] for item in group["params"] if item in self._names):
                step = float(before.get(f"optimizer {name} step", torch.zeros(()))) + 1
                found[name] = _POWER_UNITS * _UNIT / (1 - max((item**step for item in below_one), default=0.0))
        return found

    def _updated(self, before: Named, gradients: Named, factor: float) -> Named:
        """Return the parameters after a plain step whose settings are multiplied by `factor`, which is close to one."""
        own_only = not any(is_sharded(item) for item in before.values())
        plain = copy.deepcopy(self._given, _own_shards(self._given) if own_only else {})
        held: dict[str, nn.Parameter] = {}
        known: set[str] = set()
        for given, group in zip(self._given.param_groups, plain.param_groups):
            for original, parameter in zip(given["params"], group["params"]):
                name = self._names.get(original)
                if name is None:
                    continue
                held[name] = parameter
                parameter.copy_(before[f"parameter {name}"])
                state = plain.state.get(parameter, {})
                set_numbers(state, name, before)
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        value.copy_(before[f"optimizer {name} {key}"])
                        known.add(name)
                gradient = gradients.get(name)
                parameter.grad = None if gradient is None else gradient.to(parameter.dtype).clone()
            group.update({switch: False for switch in _SWITCHES if switch in group})
            group.update({key: _scaled(value, factor) for key, value in group.items() if key != "params"})
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(list(held.values()), self._clip_norm)
        type(plain).step(plain)  # schedulers replace `step` of the instance by a wrapper bound to the original
        # If the state is sharded over ranks, each rank knows only its own parameters' results.
        return {name: item.detach() for name, item in held.items() if name in known or not known}


def _own_shards(optimizer: torch.optim.Optimizer) -> dict[int, object]:
    """Memo for `deepcopy`: replaces sharded tensors with the shards of this process."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    found: dict[int, object] = {id(item): own_shard(item).clone() for item in states if is_sharded(item)}
    found.update((id(item), nn.Parameter(own_shard(item.detach()).clone())) for item in parameters if is_sharded(item))
    return found


def _scaled(setting: object, factor: float) -> object:
    """Multiply a setting by a number; switches and names stay unchanged."""
    if isinstance(setting, torch.Tensor) and setting.numel() == 1:
        setting = float(setting)
    if isinstance(setting, float):
        return setting * factor
    return tuple(_scaled(item, factor) for item in setting) if isinstance(setting, tuple) else setting


def _worst(
    before: torch.Tensor,
    expected: torch.Tensor,
    nearby: Sequence[torch.Tensor],
    found: torch.Tensor,
    correction: float,
) -> float:
    """Largest difference, as a multiple of what rounding explains."""
    if not before.numel():
        return 0.0
    unit = torch.finfo(before.dtype).eps
    moved = (expected - before).abs()
    allowed = _ROUNDINGS * unit * (before.abs() + expected.abs() + moved.max()) + correction * moved
    for other in nearby:
        allowed = allowed + 2 * (other - expected).abs()
    tiny = torch.finfo(torch.float32).tiny
    return float(((found - expected).abs() / (allowed + tiny)).max())
