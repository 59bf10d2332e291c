"""The feed-forward part of a layer, `contract(gelu(expand(inputs)))`, with bias and GELU inside the matrix products.

Between the two products lies the widest tensor of a layer. A kernel for the bias and GELU reads and writes it once
more forward, and three times backward; here the products themselves end with it (cublas_lt.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameworm.models import cublas_lt
from frameworm.models.products import product, runs_here
from frameworm.models.stream import autocast_dtype


def feed_forward(inputs: Tensor, expand: nn.Linear, contract: nn.Linear) -> Tensor:
    """GELU in its tanh form between two linear layers; fused where that runs: half precision on a GPU."""
    widths = (expand.in_features, expand.out_features, contract.out_features)
    if expand.bias is None or not runs_here(inputs, *widths):
        result: Tensor = contract(F.gelu(expand(inputs), approximate="tanh"))
        return result
    dtype = autocast_dtype(inputs)
    rows, weights = inputs.to(dtype).flatten(0, -2), (expand.weight, expand.bias, contract.weight)
    result = _feed_forward(rows, *(item.to(dtype) for item in weights))[0].view(*inputs.shape[:-1], -1)
    return result if contract.bias is None else result + contract.bias.to(dtype)


@torch.library.custom_op(
    "frameworm::feed_forward",
    mutates_args=(),
    schema="(Tensor inputs, Tensor expand, Tensor bias, Tensor contract) -> (Tensor, Tensor, Tensor)",
)
def _feed_forward(inputs: Tensor, expand: Tensor, bias: Tensor, contract: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result without the second bias, what GELU made, and what it was given."""
    sums = inputs.new_empty(inputs.size(0), expand.size(0))
    activated = cublas_lt.multiply(
        inputs.contiguous(),
        expand.contiguous(),
        cublas_lt.Ending.GELU_OF_SUM,
        sums,
        bias.contiguous(),
        right_transposed=True,
    )
    return cublas_lt.multiply(activated, contract.contiguous(), right_transposed=True), activated, sums


@torch.library.custom_op(
    "frameworm::gelu_slope", mutates_args=(), schema="(Tensor gradient, Tensor contract, Tensor sums) -> Tensor"
)
def _gelu_slope(gradient: Tensor, contract: Tensor, sums: Tensor) -> Tensor:
    """The gradient of what GELU was given."""
    return cublas_lt.multiply(gradient.contiguous(), contract.contiguous(), cublas_lt.Ending.GELU_SLOPE, sums)


@_feed_forward.register_fake
def _shapes(inputs: Tensor, expand: Tensor, bias: Tensor, contract: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = inputs.size(0)
    activated, sums = (inputs.new_empty(rows, expand.size(0)) for _ in range(2))
    return inputs.new_empty(rows, contract.size(0)), activated, sums


@_gelu_slope.register_fake
def _shape(gradient: Tensor, contract: Tensor, sums: Tensor) -> Tensor:
    return torch.empty_like(sums, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    rows, expand, _, contract = inputs
    _, activated, sums = output
    ctx.save_for_backward(rows, expand, contract, activated, sums)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return None, None, None, None
    rows, expand, contract, activated, sums = ctx.saved_tensors
    to_sums = _gelu_slope(gradient, contract, sums)
    to_rows, to_expand = product(to_sums, expand, False), product(to_sums, rows, True)
    return to_rows, to_expand, to_sums.sum(0), product(gradient, activated, True)


_feed_forward.register_autograd(_backward, setup_context=_save)
