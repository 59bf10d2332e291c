"""Layer norm at the start of a residual block, fused with the residual stream that bypasses the block.

In backward, the stream's gradient is added to the gradient through the norm, and its sum over all tokens is the
gradient of the bias at the end of the block. Done separately, each of these reads or writes the stream again; here a
single kernel does them all (kernels/norm.py).
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from frameworm.models.stream import autocast_dtype, computes_in_half

_WIDEST = 4096  # columns that one program holds
_HAS_TRITON = importlib.util.find_spec("triton") is not None  # here, because the compiler cannot trace the check


def suits_stream_norm(hidden: Tensor) -> bool:
    """Whether the kernel runs here: a half-precision residual stream on a GPU."""
    if not (hidden.is_cuda and _HAS_TRITON and computes_in_half(hidden)):
        return False
    return hidden.dtype == autocast_dtype(hidden) and hidden.size(-1) <= _WIDEST


def norm_and_stream(hidden: Tensor, norm: nn.LayerNorm, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normalised residual stream, and the stream itself for the block to add its result to.

    Args:
        hidden: The residual stream, [..., width].
        norm: With weight and bias, over the last dimension.
        bias: The bias at the end of the block, [width]; it gets its gradient here, so the block must add it detached.
    """
    normed, stream = _NormAndStream.apply(hidden, norm.weight, norm.bias, bias, norm.eps)  # type: ignore[no-untyped-call]
    return normed, stream


class _NormAndStream(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, ending: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        normed, mean, scale = torch.native_layer_norm(hidden.float(), hidden.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(hidden, weight, mean, scale)
        ctx.ending_dtype = ending.dtype
        return normed.to(hidden.dtype), hidden

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, stream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, mean, scale = ctx.saved_tensors
        rows = (item.reshape(-1, hidden.size(-1)) for item in (gradient, stream, hidden))
        result, sums = _norm_backward(*rows, weight, mean.flatten(), scale.flatten())
        return result.view(hidden.shape), sums[0], sums[1], sums[2].to(ctx.ending_dtype), None


@torch.library.custom_op(
    "frameworm::norm_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor stream, Tensor inputs, Tensor weight, Tensor means, Tensor scales)"
    " -> (Tensor, Tensor)",
)
def _norm_backward(
    gradient: Tensor, stream: Tensor, inputs: Tensor, weight: Tensor, means: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the inputs, [rows, width], and in fp32 those of weight and bias and `stream`'s sum."""
    if inputs.is_cuda:
        from frameworm.models.kernels.norm import norm_backward

        return norm_backward(gradient.contiguous(), stream.contiguous(), inputs.contiguous(), weight, means, scales)
    return norm_backward_in_steps(gradient, stream, inputs, weight, means, scales)


def norm_backward_in_steps(
    gradient: Tensor, stream: Tensor, inputs: Tensor, weight: Tensor, means: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """Do the same as the kernel with torch's own operations."""
    given, values = gradient.float(), (inputs.float() - means[:, None]) * scales[:, None]
    sums = torch.stack([(given * values).sum(0), given.sum(0), stream.float().sum(0)])
    given = given * weight
    level, slope = given.mean(1, keepdim=True), (given * values).mean(1, keepdim=True)
    return ((given - level - values * slope) * scales[:, None] + stream).to(inputs.dtype), sums


@_norm_backward.register_fake
def _shapes(
    gradient: Tensor, stream: Tensor, inputs: Tensor, weight: Tensor, means: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(inputs, memory_format=torch.contiguous_format), weight.new_empty(3, inputs.size(1))
