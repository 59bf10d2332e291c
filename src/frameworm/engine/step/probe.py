"""The gradients of a step just before clipping and update, copied to where a CUDA graph can write them too."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from frameworm.engine.optim.update import Update


class GradientProbe:
    """Copies the gradients of each step, unscaled and weighed, before anything else reads them.

    Attributes:
        gradients: Those of the last step by parameter; a parameter without one is not there.

    Args:
        parameters: The trainable ones, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        devices = {parameter.device for parameter in parameters.values()}
        self._passed_on = {device: torch.ones((), device=device) for device in devices}
        self._kept: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}

    def pass_on(self, factor: float) -> None:
        """Multiply the gradients with this before the update, also in a graph that was recorded before."""
        for tensor in self._passed_on.values():
            tensor.fill_(factor)

    @torch.no_grad()
    def __call__(self, factor: torch.Tensor | None, scale: torch.Tensor | None, update: Update) -> None:
        """Copy what there is; `factor` and `scale` are what gradients must be multiplied with and divided by."""
        self.gradients = {}
        for name, parameter in self._parameters.items():
            half = None if update.halves is None else update.halves.beside(parameter)
            parts = [item.grad for item in (parameter, half) if item is not None and item.grad is not None]
            if not parts:
                continue
            if parts[0].is_sparse:  # no graph records these
                self.gradients[name] = _multiplied(parts[0].clone(), factor, scale)
            else:
                self.gradients[name] = _multiplied(self._sum(name, parameter, parts), factor, scale)
            for part in parts:
                (part._values() if part.is_sparse else part).mul_(self._passed_on[parameter.device])

    def _sum(self, name: str, parameter: nn.Parameter, parts: list[torch.Tensor]) -> torch.Tensor:
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = torch.empty_like(parameter, requires_grad=False)
        kept.copy_(parts[0])
        for part in parts[1:]:
            kept.add_(part)
        return kept


def _multiplied(gradient: torch.Tensor, factor: torch.Tensor | None, scale: torch.Tensor | None) -> torch.Tensor:
    if factor is not None:
        gradient.mul_(factor.to(gradient.device))
    if scale is not None:
        gradient.div_(scale.to(gradient.device))
    return gradient
