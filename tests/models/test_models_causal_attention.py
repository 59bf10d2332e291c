"""The kernels of causal attention over sequences of one length."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from frameworm.models.causal_attention import (
    ask_for_others,
    causal_attention,
    fits_causal_kernels,
    suits_causal_kernels,
)
from frameworm.models.gpt import GPT
from triton_here import DEVICE, GPU, needs_gpu, needs_kernels

pytestmark = pytest.mark.usefixtures("interpreted_kernels")


def by_kernels(heads: Tensor, bias: Tensor) -> Tensor:
    return causal_attention(heads + bias.detach().view(heads.shape[2:]), bias)


def by_torch(heads: Tensor, bias: Tensor) -> Tensor:
    query, key, value = (heads + bias.view(heads.shape[2:])).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


def results(function: object, heads: Tensor, bias: Tensor) -> list[Tensor]:
    """What is mixed, and the gradients of heads and bias."""
    heads, bias = (item.detach().clone().requires_grad_() for item in (heads, bias))
    mixed = function(heads, bias)  # type: ignore[operator]
    weights = torch.randn(mixed.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return [mixed.detach(), *torch.autograd.grad((mixed.float() * weights).sum(), (heads, bias))]


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("length", [128, 384])
def test_in_fp32_as_torch(length: int) -> None:
    torch.manual_seed(length)
    heads, bias = torch.randn(2, length, 3, 2, 32, device=DEVICE), torch.randn(3 * 2 * 32, device=DEVICE)
    for mine, theirs in zip(results(by_kernels, heads, bias), results(by_torch, heads, bias), strict=True):
        near = (mine - theirs).abs().max() / theirs.abs().max()
        assert near < (3e-3 if GPU else 3e-6)  # a GPU's matrix units take fp32 as TF32


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "length"), [(32, 128), (64, 256), (64, 1024)])
def test_in_half_precision(width: int, length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    heads = torch.randn(3, length, 3, 4, width, device=DEVICE, dtype=dtype)
    bias = torch.randn(3 * 4 * width, device=DEVICE, dtype=dtype)
    right = results(by_torch, heads.float(), bias.float())
    ours, usual = results(by_kernels, heads, bias), results(by_torch, heads, bias)
    for mine, theirs, exact in zip(ours, usual, right, strict=True):
        assert mine.dtype == dtype
        apart = [(item.float() - exact).abs().max() / exact.abs().max() for item in (mine, theirs)]
        # As near to fp32 as torch's own kernels, with room for another order of rounding.
        assert apart[0] < 1.5 * apart[1] + 4e-3


@pytest.mark.gpu
@needs_gpu
def test_the_same_bits_every_time() -> None:
    torch.manual_seed(4)
    heads = torch.randn(8, 512, 3, 12, 64, device=DEVICE, dtype=torch.bfloat16)
    bias = torch.randn(3 * 12 * 64, device=DEVICE, dtype=torch.bfloat16)
    first, second = results(by_kernels, heads, bias), results(by_kernels, heads, bias)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_with_and_without_them(compiled: bool) -> None:
    torch.manual_seed(5)
    model = GPT(64, d_model=128, n_heads=2, num_layers=2, max_seq_len=256).to(DEVICE)
    tokens = torch.randint(0, 64, (3, 256), device=DEVICE)

    def gradients(fused: bool, half: bool) -> tuple[float, Tensor]:
        for layer in model.layers:
            layer.own_kernels = fused
        model.zero_grad()
        run = torch.compile(model) if compiled and fused else model
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=half):
            loss = run(tokens[:, :-128], tokens[:, 128:])
        loss.backward()
        return loss.item(), torch.cat([item.grad.flatten() for item in model.parameters() if item.grad is not None])

    exact, ours, usual = gradients(False, False), gradients(True, True), gradients(False, True)
    assert ours[0] == pytest.approx(exact[0], rel=2e-3)
    assert ours[1].numel() == exact[1].numel()
    apart = [(item[1] - exact[1]).norm() / exact[1].norm() for item in (ours, usual)]
    assert apart[0] < 1.3 * apart[1] + 1e-3


def test_what_they_are_for() -> None:
    assert fits_causal_kernels(64, 1024)
    assert not fits_causal_kernels(64, 1000)
    assert not fits_causal_kernels(48, 1024)
    assert not suits_causal_kernels(torch.zeros(1, 128, 128), 2)


@pytest.mark.gpu
@needs_gpu
def test_kernels_asked_for_by_name_come_first() -> None:
    hidden = torch.zeros(1, 128, 128, device=DEVICE, dtype=torch.bfloat16)
    assert suits_causal_kernels(hidden, 2)
    assert not suits_causal_kernels(hidden.float(), 2)
    try:
        ask_for_others(True)
        assert not suits_causal_kernels(hidden, 2)
    finally:
        ask_for_others(False)
