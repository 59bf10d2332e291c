"""Linear layers whose matrix products use the fastest kernel in forward and backward (cublas_lt.py).

They are opaque to the compiler, like calls of torch's own libraries.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameworm.models.kernels import cublas_lt
from frameworm.models.kernels.cublas_plan import Ending, fits, library
from frameworm.models.stream import autocast_dtype, computes_in_half

_HAS_LIBRARY = library() is not None  # here, because the compiler cannot trace the check


def runs_here(inputs: Tensor, *widths: int) -> bool:
    """Whether the library has kernels for these inputs and widths: half precision on a GPU."""
    return inputs.is_cuda and _HAS_LIBRARY and computes_in_half(inputs) and fits(*widths)


def linear(inputs: Tensor, layer: nn.Linear, onto: Tensor | None = None, *, bias_gradient: bool = True) -> Tensor:
    """Apply a linear layer and add the result to `onto`; small products are left to torch.

    Args:
        inputs: [..., width].
        layer: The layer; its hooks are not called.
        onto: The residual stream that the result is added to; None if there is none.
        bias_gradient: Whether to compute the bias's gradient; False if it comes from elsewhere.
    """
    bias = layer.bias if bias_gradient or layer.bias is None else layer.bias.detach()
    small = inputs.numel() * layer.out_features < cublas_lt.LARGE
    if small or not runs_here(inputs, layer.in_features, layer.out_features):
        result: Tensor = F.linear(inputs, layer.weight, bias)
        return result if onto is None else onto + result
    dtype = autocast_dtype(inputs)
    rows, bias = inputs.to(dtype).flatten(0, -2), None if bias is None else bias.to(dtype)
    inside = onto.flatten(0, -2) if onto is not None and onto.dtype == dtype else None
    result = _linear(rows, layer.weight.to(dtype), bias, inside).view(*inputs.shape[:-1], -1)
    return result if onto is None or inside is not None else onto + result


@torch.library.custom_op(
    "frameworm::product", mutates_args=(), schema="(Tensor left, Tensor right, bool left_transposed) -> Tensor"
)
def product(left: Tensor, right: Tensor, left_transposed: bool) -> Tensor:
    """Compute `left @ right`, or `left.T @ right`, without autograd."""
    return cublas_lt.multiply(left.contiguous(), right.contiguous(), left_transposed=left_transposed)


@product.register_fake
def _product_shape(left: Tensor, right: Tensor, left_transposed: bool) -> Tensor:
    return left.new_empty(left.size(1 if left_transposed else 0), right.size(1))


@torch.library.custom_op(
    "frameworm::linear",
    mutates_args=(),
    schema="(Tensor inputs, Tensor weight, Tensor? bias, Tensor? onto) -> Tensor",
)
def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor | None) -> Tensor:
    ending = Ending.NONE if bias is None else Ending.SUM
    bias, onto = (None if item is None else item.contiguous() for item in (bias, onto))
    return cublas_lt.multiply(
        inputs.contiguous(), weight.contiguous(), ending, bias=bias, right_transposed=True, onto=onto
    )


@_linear.register_fake
def _linear_shape(inputs: Tensor, weight: Tensor, bias: Tensor | None, onto: Tensor | None) -> Tensor:
    return inputs.new_empty(inputs.size(0), weight.size(0))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    inputs, weight = ctx.saved_tensors
    to_inputs, to_weight, to_bias, to_onto = ctx.needs_input_grad
    return (
        product(gradient, weight, False) if to_inputs else None,
        product(gradient, inputs, True) if to_weight else None,
        gradient.sum(0) if to_bias else None,
        gradient if to_onto else None,
    )


_linear.register_autograd(_backward, setup_context=_save)
