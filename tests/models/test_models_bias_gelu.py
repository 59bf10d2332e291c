"""Bias and GELU in one pass, and the linear layer before them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameworm.models.bias_gelu import linear_gelu


def plain(inputs: Tensor, linear: nn.Linear) -> Tensor:
    return F.gelu(linear(inputs), approximate="tanh")


def gradients(function: object, inputs: Tensor, linear: nn.Linear) -> list[Tensor]:
    inputs = inputs.detach().clone().requires_grad_()
    linear.zero_grad()
    result = function(inputs, linear)  # type: ignore[operator]
    (result.float() * torch.linspace(-1, 1, result.size(-1), device=result.device)).sum().backward()
    return [result.detach().float(), *(tensor.grad.clone() for tensor in (inputs, *linear.parameters()))]


def test_off_the_gpu_it_is_the_plain_one() -> None:
    linear, inputs = nn.Linear(6, 10), torch.randn(3, 4, 6)
    for ours, reference in zip(gradients(linear_gelu, inputs, linear), gradients(plain, inputs, linear), strict=True):
        assert torch.equal(ours, reference)


def test_a_layer_without_bias() -> None:
    linear, inputs = nn.Linear(6, 10, bias=False), torch.randn(3, 4, 6)
    assert torch.equal(linear_gelu(inputs, linear), plain(inputs, linear))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 8, 16), (3, 43, 64, 96), (2, 300, 64, 3072), (1, 7, 32, 1000)])
def test_the_kernels_agree_with_fp32(shape: tuple[int, int, int, int], compiled: bool) -> None:
    batch, length, width, wider = shape
    torch.manual_seed(4)
    linear = nn.Linear(width, wider, device="cuda")
    inputs = 3 * torch.randn(batch, length, width, device="cuda")
    inputs.view(-1)[0] = 300.0  # far out on both sides of zero
    function = torch.compile(linear_gelu) if compiled else linear_gelu
    reference = gradients(plain, inputs, linear)
    with torch.autocast("cuda", torch.bfloat16):
        ours = gradients(function, inputs, linear)
        usual = gradients(plain, inputs, linear)
    for mine, theirs, right in zip(ours, usual, reference, strict=True):
        scale = right.abs().max()
        # As near to fp32 as torch's own kernels in bf16 are, with room for another order of rounding.
        assert (mine - right).abs().max() / scale < 1.5 * (theirs - right).abs().max() / scale + 4e-3
    assert ours[3].dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_bits_every_time() -> None:
    torch.manual_seed(5)
    linear, inputs = nn.Linear(64, 3072, device="cuda"), torch.randn(8, 1000, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        first, second = gradients(linear_gelu, inputs, linear), gradients(linear_gelu, inputs, linear)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
