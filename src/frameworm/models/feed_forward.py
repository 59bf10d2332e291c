"""The feed-forward part of a layer, `contract(gelu(expand(inputs)))`, with bias and GELU inside the matrix products.

The tensor between the two products is the widest of a layer. A separate kernel for bias and GELU accesses it once more
in forward and three times in backward; here they are fused into the products (cublas_lt.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameworm.models.kernels import cublas_lt
from frameworm.models.kernels.cublas_plan import Ending
from frameworm.models.products import product, runs_here
from frameworm.models.stream import autocast_dtype


def feed_forward(
    inputs: Tensor,
    expand: nn.Linear,
    contract: nn.Linear,
    onto: Tensor | None = None,
    *,
    activation: nn.GELU | None = None,
    bias_gradient: bool = True,
) -> Tensor:
    """Apply two linear layers with tanh GELU in between, fused if possible: half precision on a GPU.

    Args:
        inputs: [..., width].
        expand: The first layer.
        contract: The second.
        onto: The residual stream that the result is added to; None if there is none.
        activation: Layer that computes tanh GELU if not fused; None for torch's function.
        bias_gradient: Whether to compute the second layer's bias gradient; False if it comes from elsewhere.
    """
    last_bias = contract.bias if bias_gradient or contract.bias is None else contract.bias.detach()
    widths = (expand.in_features, expand.out_features, contract.out_features)
    if expand.bias is None or not runs_here(inputs, *widths):
        inner = expand(inputs)
        activated = F.gelu(inner, approximate="tanh") if activation is None else activation(inner)
        result: Tensor = contract(activated) if bias_gradient else F.linear(activated, contract.weight, last_bias)
        return result if onto is None else onto + result
    dtype = autocast_dtype(inputs)
    rows, weights = inputs.to(dtype).flatten(0, -2), (expand.weight, expand.bias, contract.weight)
    inside = onto.flatten(0, -2) if onto is not None and onto.dtype == dtype else None
    last_bias = None if last_bias is None else last_bias.to(dtype)
    result = _feed_forward(rows, *(item.to(dtype) for item in weights), last_bias, inside)[0]
    result = result.view(*inputs.shape[:-1], -1)
    return result if onto is None or inside is not None else onto + result


@torch.library.custom_op(
    "frameworm::feed_forward",
    mutates_args=(),
    schema="(Tensor inputs, Tensor expand, Tensor bias, Tensor contract, Tensor? last_bias, Tensor? onto)"
    " -> (Tensor, Tensor, Tensor)",
)
def _feed_forward(
    inputs: Tensor, expand: Tensor, bias: Tensor, contract: Tensor, last_bias: Tensor | None, onto: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, GELU's output and GELU's input."""
    sums = inputs.new_empty(inputs.size(0), expand.size(0))
    activated = cublas_lt.multiply(
        inputs.contiguous(),
        expand.contiguous(),
        Ending.GELU_OF_SUM,
        sums,
        bias.contiguous(),
        right_transposed=True,
    )
    ending = Ending.NONE if last_bias is None else Ending.SUM
    last_bias, onto = (None if item is None else item.contiguous() for item in (last_bias, onto))
    result = cublas_lt.multiply(
        activated, contract.contiguous(), ending, bias=last_bias, right_transposed=True, onto=onto
    )
    return result, activated, sums


@torch.library.custom_op(
    "frameworm::gelu_slope", mutates_args=(), schema="(Tensor gradient, Tensor contract, Tensor sums) -> Tensor"
)
def _gelu_slope(gradient: Tensor, contract: Tensor, sums: Tensor) -> Tensor:
    """Return the gradient of GELU's input."""
    return cublas_lt.multiply(gradient.contiguous(), contract.contiguous(), Ending.GELU_SLOPE, sums)


@_feed_forward.register_fake
def _shapes(
    inputs: Tensor, expand: Tensor, bias: Tensor, contract: Tensor, last_bias: Tensor | None, onto: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows = inputs.size(0)
    activated, sums = (inputs.new_empty(rows, expand.size(0)) for _ in range(2))
    return inputs.new_empty(rows, contract.size(0)), activated, sums


@_gelu_slope.register_fake
def _shape(gradient: Tensor, contract: Tensor, sums: Tensor) -> Tensor:
    return torch.empty_like(sums, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    rows, expand, _, contract, *_ = inputs
    _, activated, sums = output
    ctx.save_for_backward(rows, expand, contract, activated, sums)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return None, None, None, None, None, None
    rows, expand, contract, activated, sums = ctx.saved_tensors
    to_sums = _gelu_slope(gradient, contract, sums)
    to_last_bias, to_onto = ctx.needs_input_grad[4:]
    return (
        product(to_sums, expand, False),
        product(to_sums, rows, True),
        to_sums.sum(0),
        product(gradient, activated, True),
        gradient.sum(0) if to_last_bias else None,
        gradient if to_onto else None,
    )


_feed_forward.register_autograd(_backward, setup_context=_save)
