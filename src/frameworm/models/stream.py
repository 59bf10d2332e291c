"""The dtype in which a model computes, and the residual stream that its layers add to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

Residual = Literal["fp32", "half"]


def as_stream(hidden: Tensor, residual: Residual) -> Tensor:
    """Return the first layer's input; with `half`, it and so the whole residual stream is in autocast's dtype."""
    return hidden.to(autocast_dtype(hidden)) if residual == "half" else hidden


def autocast_dtype(inputs: Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product of these inputs is computed."""
    device_type = inputs.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else inputs.dtype


def computes_in_half(inputs: Tensor) -> bool:
    """Whether matrix products of these inputs are computed in half precision."""
    return autocast_dtype(inputs) in (torch.bfloat16, torch.float16)


def linear_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield module and name of the parameters of all linear layers, which autocast casts wherever they are read."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield from ((module, name) for name, _ in module.named_parameters(recurse=False))
