"""The kernels of attention over short packed sequences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from frameworm.models.attention import packed_self_attention
from frameworm.models.short_attention import short_attention, suits_short_kernels
from triton_here import DEVICE, GPU, needs_gpu, needs_kernels

pytestmark = pytest.mark.usefixtures("interpreted_kernels")

# Within one tile, over its border by one, several tiles, empty ones between, and only one token.
LENGTHS = [(5,), (37, 1, 0, 64, 0, 11), (65, 3), (63, 129, 0), (0, 1), (200, 64, 65, 2)]


def borders(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)


def one_by_one(heads: Tensor, lengths: tuple[int, ...], causal: bool) -> Tensor:
    parts, start = [], 0
    for length in lengths:
        query, key, value = (part.transpose(0, 1) for part in heads[start : start + length].unbind(1))
        if length:
            parts.append(F.scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(0, 1))
        start += length
    return torch.cat(parts)


def both_ways(heads: Tensor, lengths: tuple[int, ...], causal: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Result and gradient by the kernels, and by torch in fp32."""
    ours = heads.detach().clone().requires_grad_()
    exact = heads.detach().float().requires_grad_()
    longest = max(lengths)
    mixed, expected = short_attention(ours, borders(lengths), longest, causal), one_by_one(exact, lengths, causal)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    (gradient,) = torch.autograd.grad((mixed.float() * weights).sum(), ours)
    (right,) = torch.autograd.grad((expected * weights).sum(), exact)
    return [mixed.detach(), gradient], [expected.detach(), right]


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_in_fp32_each_sequence_as_if_alone(lengths: tuple[int, ...], causal: bool) -> None:
    torch.manual_seed(sum(lengths))
    heads = torch.randn(sum(lengths), 3, 2, 16, device=DEVICE)
    ours, right = both_ways(heads, lengths, causal)
    tolerance = 3e-3 if GPU else 2e-6  # a GPU's matrix units take fp32 as TF32
    for mine, theirs in zip(ours, right, strict=True):
        assert torch.allclose(mine, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("lengths", [*LENGTHS, (512, 40, 512)])
def test_in_half_precision(lengths: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    heads = torch.randn(sum(lengths), 3, 4, width, device=DEVICE, dtype=dtype)
    ours, right = both_ways(heads, lengths, causal=False)
    for mine, theirs in zip(ours, right, strict=True):
        assert mine.dtype == dtype
        assert torch.allclose(mine.float(), theirs, atol=3e-2, rtol=2e-2)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_packed_self_attention_takes_them(compiled: bool) -> None:
    lengths = (37, 1, 0, 64, 0, 11)
    heads = torch.randn(sum(lengths), 3, 4, 32, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    assert suits_short_kernels(heads, 64)
    function = torch.compile(packed_self_attention, fullgraph=True) if compiled else packed_self_attention
    mixed = function(heads, borders(lengths), 64)
    direct = short_attention(heads, borders(lengths), 64)
    assert torch.equal(mixed, direct)
    weights = torch.randn_like(mixed)
    ours, theirs = (torch.autograd.grad((item * weights).sum(), heads)[0] for item in (mixed, direct))
    assert torch.equal(ours, theirs)


@pytest.mark.gpu
@needs_gpu
def test_the_same_bits_every_time() -> None:
    lengths = (200, 64, 65, 2, 500)
    torch.manual_seed(5)
    heads = torch.randn(sum(lengths), 3, 8, 32, device=DEVICE, dtype=torch.bfloat16)
    first, _ = both_ways(heads, lengths, causal=False)
    second, _ = both_ways(heads, lengths, causal=False)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_kernels_are_for_the_gpu_and_half_precision() -> None:
    assert not suits_short_kernels(torch.empty(4, 3, 2, 32, dtype=torch.bfloat16), 4)


@pytest.mark.gpu
@needs_gpu
def test_flash_attention_keeps_what_they_are_no_good_for() -> None:
    half = torch.empty(4, 3, 2, 32, dtype=torch.bfloat16, device=DEVICE)
    assert suits_short_kernels(half, 512)
    assert not suits_short_kernels(half, 4096)
    assert not suits_short_kernels(half.float(), 512)
    assert not suits_short_kernels(torch.empty(4, 3, 2, 24, dtype=torch.bfloat16, device=DEVICE), 512)


def test_shapes_without_values() -> None:
    """On the meta device there are no values: a look at one raises."""
    heads = torch.empty(6, 3, 2, 16, device="meta", requires_grad=True)
    mixed = short_attention(heads, torch.empty(4, dtype=torch.int32, device="meta"), 3)
    assert mixed.shape == (6, 2, 16)
    assert torch.autograd.grad(mixed.sum(), heads)[0].shape == heads.shape
