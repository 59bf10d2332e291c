"""Bias and GELU behind a matrix product: one pass forward; one backward, which also sums the bias' gradient.

The compiler writes two kernels for the backward part, and the second reads all of the first one's result again only to
sum its columns. Its tanh is also dear enough to be seen beside the memory traffic; here it is a sigmoid.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_HAS_TRITON = importlib.util.find_spec("triton") is not None  # asked here: the compiler cannot trace the question


def linear_gelu(inputs: Tensor, linear: nn.Linear) -> Tensor:
    """`gelu(linear(inputs))` in the tanh form; the kernels of this module where they run: half precision on a GPU."""
    if linear.bias is None or not (inputs.is_cuda and _computes_in_half(inputs) and _HAS_TRITON):
        return F.gelu(linear(inputs), approximate="tanh")
    product = F.linear(inputs, linear.weight)
    activated: Tensor = _bias_gelu(product.flatten(0, -2), linear.bias)
    return activated.view(product.shape)


def cast_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The parameters of a model's linear layers, but for biases that the kernels here read in fp32."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield module, "weight"
            if module.bias is not None and not name.endswith("expand"):
                yield module, "bias"


def _computes_in_half(inputs: Tensor) -> bool:
    device_type = inputs.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else inputs.dtype
    return dtype in (torch.bfloat16, torch.float16)


@torch.library.custom_op("frameworm::bias_gelu", mutates_args=(), schema="(Tensor product, Tensor bias) -> Tensor")
def _bias_gelu(product: Tensor, bias: Tensor) -> Tensor:
    from frameworm.models.kernels import bias_gelu_rows

    return bias_gelu_rows(product.contiguous(), bias.contiguous())


@torch.library.custom_op(
    "frameworm::bias_gelu_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor product, Tensor bias) -> (Tensor, Tensor)",
)
def _bias_gelu_backward(gradient: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    from frameworm.models.kernels import bias_gelu_rows_backward

    return bias_gelu_rows_backward(gradient.contiguous(), product.contiguous(), bias.contiguous())


@_bias_gelu.register_fake
def _shape(product: Tensor, bias: Tensor) -> Tensor:
    return torch.empty_like(product, memory_format=torch.contiguous_format)


@_bias_gelu_backward.register_fake
def _shapes(gradient: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(product, memory_format=torch.contiguous_format), torch.empty_like(bias)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    product, bias = ctx.saved_tensors
    both: tuple[Tensor, Tensor] = _bias_gelu_backward(gradient, product, bias)
    return both


_bias_gelu.register_autograd(_backward, setup_context=_save)
