"""Attention over packed sequences by our own kernels, for lengths and widths at which flash attention is slow.

See kernels/attention.py for how they work. They are opaque to the compiler.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

_WIDTHS = (16, 32, 64)  # head widths
_LONGEST = 512
_HAS_TRITON = importlib.util.find_spec("triton") is not None  # here, because the compiler cannot trace the check

# Own rows, rows at a time, warps, stages; tuned on an H200 with texts of AG News' and IMDB's lengths.
_FORWARD_TILES = (64, 64, 4, 3)
_BACKWARD_TILES = (64, 64, 4, 2)


def suits_short_kernels(heads: Tensor, max_length: int) -> bool:
    """Whether the kernels run here and are faster; `heads` is [tokens, 3, heads, head width]."""
    half = heads.dtype in (torch.float16, torch.bfloat16)
    return heads.is_cuda and half and heads.size(3) in _WIDTHS and max_length <= _LONGEST and _HAS_TRITON


def short_attention(heads: Tensor, offsets: Tensor, max_length: int, causal: bool = False) -> Tensor:
    """Compute the attention of every token to its own sequence; see `packed_self_attention`."""
    mixed: Tensor = _short_attention(heads, offsets, max_length, causal)[0]
    return mixed


@torch.library.custom_op(
    "frameworm::short_attention",
    mutates_args=(),
    schema="(Tensor heads, Tensor offsets, int max_length, bool causal) -> (Tensor, Tensor)",
)
def _short_attention(heads: Tensor, offsets: Tensor, max_length: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the mixed values, and what backward needs of the softmax."""
    from frameworm.models.kernels.attention import Tiles, attend

    return attend(heads.contiguous(), offsets.contiguous(), max_length, causal, Tiles(*_FORWARD_TILES))


@torch.library.custom_op(
    "frameworm::short_attention_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor heads, Tensor mixed, Tensor log_totals, Tensor offsets, int max_length,"
    " bool causal) -> Tensor",
)
def _short_attention_backward(
    gradient: Tensor, heads: Tensor, mixed: Tensor, log_totals: Tensor, offsets: Tensor, max_length: int, causal: bool
) -> Tensor:
    from frameworm.models.kernels.attention import Tiles, attend_backward

    tiles = Tiles(*_BACKWARD_TILES)
    return attend_backward(
        gradient.contiguous(), heads.contiguous(), mixed, log_totals, offsets.contiguous(), max_length, causal, tiles
    )


@_short_attention.register_fake
def _shapes(heads: Tensor, offsets: Tensor, max_length: int, causal: bool) -> tuple[Tensor, Tensor]:
    tokens, _, n_heads, width = heads.shape
    return heads.new_empty(tokens, n_heads, width), heads.new_empty(n_heads, tokens, dtype=torch.float32)


@_short_attention_backward.register_fake
def _shape(
    gradient: Tensor, heads: Tensor, mixed: Tensor, log_totals: Tensor, offsets: Tensor, max_length: int, causal: bool
) -> Tensor:
    return torch.empty_like(heads, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    heads, offsets, ctx.max_length, ctx.causal = inputs
    mixed, log_totals = output
    ctx.save_for_backward(heads, mixed, log_totals, offsets)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return None, None, None, None
    return _short_attention_backward(gradient, *ctx.saved_tensors, ctx.max_length, ctx.causal), None, None, None


_short_attention.register_autograd(_backward, setup_context=_save)
