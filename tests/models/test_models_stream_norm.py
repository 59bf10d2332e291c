"""Layer norm at the start of a block, and the stream that runs past it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from half_precision import assert_as_near
from torch import Tensor, nn

from frameworm.models import gpt
from frameworm.models.gpt import DecoderLayer
from frameworm.models.stream_norm import _norm_backward, norm_and_stream, suits_stream_norm
from triton_here import DEVICE, needs_gpu, needs_kernels

Function = Callable[[Tensor, nn.LayerNorm, Tensor], tuple[Tensor, Tensor]]


def plain(hidden: Tensor, norm: nn.LayerNorm, bias: Tensor) -> tuple[Tensor, Tensor]:
    """By torch; the bias is what the block would add at its end."""
    return norm(hidden).to(hidden.dtype), hidden + bias


def ours(hidden: Tensor, norm: nn.LayerNorm, bias: Tensor) -> tuple[Tensor, Tensor]:
    normed, stream = norm_and_stream(hidden, norm, bias)
    return normed, stream + bias.detach()


def results(function: Function, hidden: Tensor, norm: nn.LayerNorm, bias: Tensor) -> list[Tensor]:
    """What comes out, and the gradients of all that goes in."""
    hidden, bias = (item.detach().clone().requires_grad_() for item in (hidden, bias))
    found = function(hidden, norm, bias)
    draw = torch.Generator().manual_seed(1)
    total = sum((item.float() * torch.randn(item.shape, generator=draw).to(item.device)).sum() for item in found)
    assert isinstance(total, Tensor)
    gradients = torch.autograd.grad(total, (hidden, norm.weight, norm.bias, bias))
    return [item.detach().float() for item in (*found, *gradients)]


def random_norm(width: int, device: torch.device | str = "cpu") -> nn.LayerNorm:
    norm = nn.LayerNorm(width, device=device)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("compiled", [False, True])
def test_both_and_their_gradients(compiled: bool) -> None:
    torch.manual_seed(0)
    norm, hidden, bias = random_norm(24), torch.randn(2, 5, 24), torch.randn(24)
    function: Function = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    for mine, theirs in zip(results(function, hidden, norm, bias), results(plain, hidden, norm, bias), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_whole_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias at the end of each block gets its gradient once, wherever it is taken."""
    torch.manual_seed(0)
    layer, hidden = DecoderLayer(16, 2, 0.0), torch.randn(2, 6, 16)
    found = []
    for suits in (False, True):
        monkeypatch.setattr(gpt, "suits_stream_norm", lambda hidden, suits=suits: suits)
        found.append(torch.autograd.grad(layer(hidden).square().sum(), tuple(layer.parameters())))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_layer_that_drops_adds_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, hidden = DecoderLayer(16, 2, 0.5), torch.randn(2, 6, 16)
    monkeypatch.setattr(gpt, "suits_stream_norm", lambda hidden: pytest.fail("asked"))
    layer(hidden)


def test_not_without_a_gpu() -> None:
    assert not suits_stream_norm(torch.randn(2, 8))


@pytest.mark.gpu
@needs_kernels
@pytest.mark.usefixtures("interpreted_kernels")
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (7, 24), (37, 64), (300, 768)])
def test_the_kernel(rows: int, width: int) -> None:
    from frameworm.models.kernels.norm import norm_backward

    torch.manual_seed(rows)
    gradient, stream, inputs = (torch.randn(rows, width, device=DEVICE) for _ in range(3))
    weight, means = torch.randn(width, device=DEVICE), inputs.mean(1)
    scales = (inputs.var(1, correction=0) + 1e-5).rsqrt()
    found = norm_backward(gradient, stream, inputs, weight, means, scales)
    on_cpu = (item.cpu() for item in (gradient, stream, inputs, weight, means, scales))
    for mine, theirs in zip(found, _norm_backward(*on_cpu), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision(dtype: torch.dtype, compiled: bool) -> None:
    torch.manual_seed(2)
    norm, hidden, bias = random_norm(768, "cuda"), torch.randn(3, 200, 768, device="cuda"), torch.randn(768).cuda()
    hidden, bias = hidden.to(dtype), bias.to(dtype)
    with torch.autocast("cuda", dtype):
        assert suits_stream_norm(hidden)
        mine = results(torch.compile(ours, fullgraph=True) if compiled else ours, hidden, norm, bias)
        usual = results(plain, hidden, norm, bias)
    assert_as_near(mine, usual, results(plain, hidden.float(), norm, bias.float()))
