"""Copies of a step's gradients just before clipping and update, in buffers that a CUDA graph can write too."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from frameworm.engine.optim.update import Update
from frameworm.torch_private.tensors import sparse_values


class GradientProbe:
    """Copies the gradients of each step, unscaled and weighted, before anything else reads them.

    Attributes:
        gradients: Gradients of the last step by parameter name, without parameters that have none.

    Args:
        parameters: The trainable parameters by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        devices = {parameter.device for parameter in parameters.values()}
        self._passed_on = {device: torch.ones((), device=device) for device in devices}
        self._kept: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}

    def pass_on(self, factor: float) -> None:
        """Multiply gradients by `factor` before the update, also in graphs recorded earlier."""
        for tensor in self._passed_on.values():
            tensor.fill_(factor)

    @torch.no_grad()
    def __call__(self, factor: torch.Tensor | None, scale: torch.Tensor | None, update: Update) -> None:
        """Copy the gradients, multiplied by `factor` and divided by `scale`."""
        self.gradients = {}
        for name, parameter in self._parameters.items():
            half = None if update.half_weights is None else update.half_weights.beside(parameter)
            parts = [item.grad for item in (parameter, half) if item is not None and item.grad is not None]
            if not parts:
                continue
            if parts[0].is_sparse:  # no graph records sparse gradients
                self.gradients[name] = _multiplied(parts[0].clone(), factor, scale)
            else:
                self.gradients[name] = _multiplied(self._sum(name, parameter, parts), factor, scale)
            for part in parts:
                (sparse_values(part) if part.is_sparse else part).mul_(self._passed_on[parameter.device])

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
