"""Attention over packed sequences: each sequence as if it were alone."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from frameworm.models import grouped_attention
from frameworm.models.attention import known_to_compiler, packed_attention, sequence_of_tokens

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def borders(*lengths: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


def one_by_one(heads: list[torch.Tensor], offsets: torch.Tensor, causal: bool) -> torch.Tensor:
    parts = []
    for start, end in zip(offsets.tolist(), offsets.tolist()[1:], strict=False):
        query, key, value = (tensor[start:end].transpose(0, 1) for tensor in heads)
        if end > start:
            parts.append(F.scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(0, 1))
    return torch.cat(parts)


MANY = tuple(1 + 7 * number % 5 for number in range(50))
ALL = (*range(60), *range(60))  # more lengths than are looked at as ends of a group


def heads_of(tokens: int, **options: object) -> list[torch.Tensor]:
    torch.manual_seed(tokens)
    return [torch.randn(tokens, 2, 4).to(**options).requires_grad_() for _ in range(3)]  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("call", [0, 2**18])  # what a group costs: several groups, or one
@pytest.mark.parametrize("lengths", [(1,), (5, 1, 3), (0, 5, 0, 0, 4), (2, 0), (5, 5, 5), MANY, (3,) * 40, ALL])
def test_each_sequence_as_if_alone(
    lengths: tuple[int, ...], causal: bool, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frameworm.models.grouped_attention._CALL", call)
    offsets = borders(*lengths)
    heads = heads_of(sum(lengths))
    packed = packed_attention(*heads, offsets, max(lengths), causal)
    expected = one_by_one(heads, offsets, causal)
    assert torch.allclose(packed, expected, atol=1e-6)
    weights = torch.randn_like(packed)
    for ours, theirs in zip(
        torch.autograd.grad((packed * weights).sum(), heads),
        torch.autograd.grad((expected * weights).sum(), heads),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_long_sequences_go_through_torchs_kernel(causal: bool, dtype: torch.dtype) -> None:
    lengths = (9, 131, 140, 9, 9, 200)
    offsets = borders(*lengths)
    heads = heads_of(sum(lengths), dtype=dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in heads]
    packed, expected = packed_attention(*heads, offsets, 200, causal), one_by_one(exact, offsets, causal)
    assert packed.dtype == dtype
    atol = 1e-5 if dtype == torch.float32 else 3e-2
    assert torch.allclose(packed.double(), expected, atol=atol)
    weights = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad((packed.double() * weights).sum(), heads),
        torch.autograd.grad((expected * weights).sum(), exact),
        strict=True,
    ):
        assert torch.allclose(ours.double(), theirs, atol=atol)


@pytest.mark.parametrize(
    ("lengths", "shapes"),
    [
        ((), []),
        ((7,) * 5, [(5, 7)]),
        ((3, 30, 3, 30), [(2, 3), (2, 30)]),
        ((30, 3, 12, 0, 3, 30, 12), [(2, 3), (2, 12), (2, 30)]),
        ((30, 31, 12, 13, 1, 2), [(2, 2), (2, 13), (2, 31)]),
    ],
)
def test_groups_end_where_that_saves_most(
    lengths: tuple[int, ...], shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_attention, "_CALL", 1)
    groups = grouped_attention._make_groups(np.array([0, *np.cumsum(lengths, dtype=np.int64)]), 2, 4)
    assert groups.shapes == shapes
    assert [mask is None for mask in groups.masks] == [lengths.count(length) == count for count, length in shapes]


def test_groups_are_made_anew_when_the_borders_change() -> None:
    heads = heads_of(12)
    offsets = borders(4, 4, 4)
    packed_attention(*heads, offsets, 12)
    offsets[1] = 6
    assert torch.allclose(packed_attention(*heads, offsets, 12), one_by_one(heads, offsets, False), atol=1e-6)


def test_sequence_of_tokens() -> None:
    assert sequence_of_tokens(borders(2, 0, 1, 0), 3).tolist() == [0, 0, 2]


def test_no_look_at_a_value() -> None:
    """On the meta device there are no values: a look at one raises."""
    with torch.device("meta"):
        heads = torch.empty(6, 3, 2, 4).unbind(1)
        assert packed_attention(*heads, torch.empty(4, dtype=torch.int32), 3).shape == (6, 2, 4)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_flash_kernels_agree(causal: bool, compiled: bool) -> None:
    lengths = (37, 1, 0, 64, 0, 11)
    offsets = borders(*lengths, device="cuda")
    torch.manual_seed(0)
    heads = [torch.randn(sum(lengths), 4, 32, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    function = torch.compile(packed_attention, fullgraph=True) if compiled else packed_attention
    packed = function(*heads, offsets, 64, causal)
    exact = [tensor.detach().float().requires_grad_() for tensor in heads]
    expected = one_by_one(exact, offsets, causal)
    assert torch.allclose(packed.float(), expected, atol=2e-2)
    weights = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad((packed.float() * weights).sum(), heads),
        torch.autograd.grad((expected * weights).sum(), exact),
        strict=True,
    ):
        assert torch.isfinite(ours).all()
        assert torch.allclose(ours.float(), theirs, atol=5e-2)


def test_what_the_compiler_cannot_trace_is_asked_once() -> None:
    asked = []

    @known_to_compiler
    def answer() -> bool:
        asked.append(time.localtime())  # nothing that a graph can hold
        return True

    def choose(value: torch.Tensor) -> torch.Tensor:
        return value + 1 if answer() else value

    compiled = torch.compile(choose, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(2)).tolist() == compiled(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert len(asked) == 1
