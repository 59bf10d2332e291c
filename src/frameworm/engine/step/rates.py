"""Learning rates on the device for recorded steps to read; the optimizer's groups keep plain numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from frameworm.torch_private.optimizers import allow_eager_capturable

_OTHERS = ("betas", "momentum", "weight_decay", "eps", "dampening", "alpha")


class DeviceRates:
    """One tensor with the learning rate of every group.

    Optimizers that count steps on the host are switched to counting on the device (torch's `capturable`).
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # A ZeroRedundancyOptimizer passes its groups' settings to an inner optimizer, which updates.
        self._inner: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
        groups = optimizer.param_groups
        self._tensor = torch.zeros(len(groups), device=groups[0]["params"][0].device)
        self._views = self._tensor.unbind(0)
        self._sent: list[Any] = []
        self._baked = self._others()
        self._count_on_device()

    def send(self) -> None:
        """Copy the groups' rates to the device if they have changed."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        if rates == self._sent:
            return
        numbers = [rate for rate in rates if not isinstance(rate, torch.Tensor)]
        if len(numbers) == len(rates) and len(set(numbers)) == 1:
            self._tensor.fill_(numbers[0])
        else:
            for view, rate in zip(self._views, rates):
                if not isinstance(rate, torch.Tensor):
                    view.fill_(rate)
        self._sent = rates

    def baked_in_changed(self) -> bool:
        """Whether a setting baked into recorded steps as a constant has changed since the last call."""
        others = self._others()
        changed = others != self._baked
        self._baked = others
        return changed

    def counted_on_host(self) -> dict[tuple[str, int, str], float]:
        """Return the plain numbers in the optimizer's groups and state; a recorded step would freeze them."""
        groups, states = self._optimizer.param_groups, list(self._inner.state.values())
        found = [("group", place, group) for place, group in enumerate(groups)]
        found += [("state", place, state) for place, state in enumerate(states)]
        return {
            (where, place, name): value
            for where, place, values in found
            for name, value in values.items()
            if name != "lr" and isinstance(value, (int, float)) and not isinstance(value, bool)
        }

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Make the optimizer read the rates from the device while a step is recorded."""
        groups = self._optimizer.param_groups
        kept: list[dict[str, Any]] = [
            {name: group[name] for name in ("lr", "capturable", "fused", "foreach") if name in group}
            for group in groups
        ]
        for group, view in zip(groups, self._views):
            if "capturable" in group and view.device.type == "cpu":
                continue  # torch has no capturable optimizers on a CPU, where steps are only rehearsed
            if not isinstance(group["lr"], torch.Tensor):
                group["lr"] = view
            if "capturable" in group:
                group["capturable"] = True
            elif type(self._inner) is torch.optim.SGD:
                # Of torch's three implementations, only the fused one leaves the rate on the device.
                group.update(fused=True, foreach=False)
        try:
            yield
        finally:
            for group, values in zip(groups, kept):
                group.update(values)

    def _others(self) -> list[tuple[Any, ...]]:
        return [tuple([group.get(name) for name in _OTHERS]) for group in self._optimizer.param_groups]

    def _count_on_device(self) -> None:
        for group in self._optimizer.param_groups:
            if "capturable" not in group or group.get("fused") or self._tensor.device.type == "cpu":
                continue
            group["capturable"] = True
            for parameter in group["params"]:
                state = self._inner.state.get(parameter, {})
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] = state["step"].to(parameter.device, torch.float32)
        allow_eager_capturable(self._inner)  # some steps of a captured run are eager
