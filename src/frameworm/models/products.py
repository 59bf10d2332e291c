"""Linear layers whose matrix products, forward and backward, run by the fastest kernel there is (cublas_lt.py).

To the compiler these are operations it does not look into, as those of torch's own libraries are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameworm.models import cublas_lt
from frameworm.models.stream import autocast_dtype, computes_in_half

_HAS_LIBRARY = cublas_lt.library() is not None  # asked here: the compiler cannot trace the question


def runs_here(inputs: Tensor, *widths: int) -> bool:
    """Whether the library has kernels for these inputs and widths: half precision on a GPU."""
    return inputs.is_cuda and _HAS_LIBRARY and computes_in_half(inputs) and cublas_lt.fits(*widths)


def linear(inputs: Tensor, layer: nn.Linear, *, bias_gradient: bool = True) -> Tensor:
    """What the layer gives; small products are torch's own.

    Args:
        inputs: [..., width].
        layer: Its own hooks are not called.
        bias_gradient: False where the gradient of the bias comes from somewhere else.
    """
    bias = layer.bias if bias_gradient or layer.bias is None else layer.bias.detach()
    small = inputs.numel() * layer.out_features < cublas_lt.LARGE
    if small or not runs_here(inputs, layer.in_features, layer.out_features):
        return F.linear(inputs, layer.weight, bias)
    dtype = autocast_dtype(inputs)
    rows = inputs.to(dtype).flatten(0, -2)
    result: Tensor = _linear(rows, layer.weight.to(dtype), None if bias is None else bias.to(dtype))
    return result.view(*inputs.shape[:-1], -1)


@torch.library.custom_op(
    "frameworm::product", mutates_args=(), schema="(Tensor left, Tensor right, bool left_transposed) -> Tensor"
)
def product(left: Tensor, right: Tensor, left_transposed: bool) -> Tensor:
    """`left @ right`, or `left.T @ right`; without a gradient."""
    return cublas_lt.multiply(left.contiguous(), right.contiguous(), left_transposed=left_transposed)


@product.register_fake
def _product_shape(left: Tensor, right: Tensor, left_transposed: bool) -> Tensor:
    return left.new_empty(left.size(1 if left_transposed else 0), right.size(1))


@torch.library.custom_op(
    "frameworm::linear", mutates_args=(), schema="(Tensor inputs, Tensor weight, Tensor? bias) -> Tensor"
)
def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    ending = cublas_lt.Ending.NONE if bias is None else cublas_lt.Ending.SUM
    bias = None if bias is None else bias.contiguous()
    return cublas_lt.multiply(inputs.contiguous(), weight.contiguous(), ending, bias=bias, right_transposed=True)


@_linear.register_fake
def _linear_shape(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return inputs.new_empty(inputs.size(0), weight.size(0))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    inputs, weight = ctx.saved_tensors
    to_inputs, to_weight, to_bias = ctx.needs_input_grad
    return (
        product(gradient, weight, False) if to_inputs else None,
        product(gradient, inputs, True) if to_weight else None,
        gradient.sum(0) if to_bias else None,
    )


_linear.register_autograd(_backward, setup_context=_save)
