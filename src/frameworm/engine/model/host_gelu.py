"""GELU on a CPU that keeps its slope from forward for backward.

torch computes the same tanh or error function in both directions. Here the slope is computed along with the value: one
sigmoid instead of two tanh, or one error function and one exponential; the rest is additions and products. Whether that
is faster depends on the processor, and results differ in their last digits, so it is a setting (`training.cpu_gelu`)
that the tuner tries.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from frameworm.errors import ModelError

# tanh(a (x + b x^3)) = 2 sigmoid(x (_LINEAR + _CUBIC x^2)) - 1
_LINEAR = 2 * math.sqrt(2 / math.pi)
_CUBIC = _LINEAR * 0.044715
_DENSITY = 1 / math.sqrt(2 * math.pi)


def gelu(layer: nn.GELU, inputs: Tensor) -> Tensor:
    """Compute the layer's output, keeping the slope where supported."""
    if not _suits(inputs):
        return nn.GELU.forward(layer, inputs)
    kind = _ByTangent if layer.approximate == "tanh" else _ByErrorFunction
    result: Tensor = kind.apply(inputs)  # type: ignore[no-untyped-call]
    return result


def _suits(inputs: Tensor) -> bool:
    """Whether the slope will be needed, on a CPU in fp32; compiled code is left to the compiler."""
    return (
        not torch.compiler.is_compiling()
        and type(inputs) is Tensor
        and inputs.is_cpu
        and inputs.dtype is torch.float32
        and inputs.requires_grad
        and torch.is_grad_enabled()
    )


class _KeptSlope(torch.autograd.Function):
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Multiply by the slope that forward computed; its own derivative is unknown."""
        if torch.is_grad_enabled():
            raise ModelError("second derivatives are needed: leave training.cpu_gelu at torch")
        slope: Tensor = ctx.saved_tensors[0]
        return gradients[0] * slope


class _ByTangent(_KeptSlope):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        """x s(z) with z = x (l + c x^2); its slope is s + x s (1 - s) (l + 3 c x^2)."""
        linear = torch.tensor(_LINEAR)
        share = torch.addcmul(linear, inputs, inputs, value=_CUBIC).mul_(inputs).sigmoid_()
        result = inputs * share
        rise = torch.addcmul(linear, inputs, inputs, value=3 * _CUBIC)
        ctx.save_for_backward(share.addcmul_(rise, torch.addcmul(result, result, share, value=-1)))
        return result


class _ByErrorFunction(_KeptSlope):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        """x times the normal CDF at x; its slope is the CDF plus x times the density."""
        share = inputs.mul(math.sqrt(0.5)).erf_().mul_(0.5).add_(0.5)
        result = inputs * share
        density = torch.mul(inputs, inputs).mul_(-0.5).exp_()
        ctx.save_for_backward(share.addcmul_(inputs, density, value=_DENSITY))
        return result
