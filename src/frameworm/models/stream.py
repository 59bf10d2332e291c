"""The stream that the layers of a model add to."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Residual = Literal["fp32", "half"]


def as_stream(hidden: Tensor, residual: Residual) -> Tensor:
    """What enters the first layer: with `half` in autocast's numbers, where autocast is on, and so all that follows."""
    device_type = hidden.device.type
    if residual == "half" and torch.is_autocast_enabled(device_type):
        return hidden.to(torch.get_autocast_dtype(device_type))
    return hidden
