"""Causal attention over sequences of one length, from queries, keys and values interleaved in one tensor.

See kernels/causal.py for how it works. The operations are opaque to the compiler.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from frameworm.models import attention
from frameworm.models.stream import computes_in_half
from frameworm.torch_private.compiler import known_to_compiler

_WIDTHS = (32, 64)  # head widths
_STEP = 128  # lengths must be multiples of it
_HAS_TRITON = importlib.util.find_spec("triton") is not None  # here, because the compiler cannot trace the check

# Own rows, rows at a time, warps, stages, registers; tuned on an H200 with 1,024 tokens and heads 64 wide.
_FORWARD_TILES = (64, 64, 4, 2, 96)
_QUERY_TILES = (64, 32, 4, 3, 128)
_KEY_TILES = (64, 64, 4, 3, 168)


# Read by the model wherever it is traced; torch kernels that a user asks for by name take precedence over ours.
_others_asked_for = False


def suits_causal_kernels(hidden: Tensor, n_heads: int) -> bool:
    """Whether the kernels run here and are wanted; `hidden`, [sequences, length, width], is projected to the heads."""
    if not (hidden.is_cuda and _HAS_TRITON and computes_in_half(hidden)):
        return False
    fits = fits_causal_kernels(hidden.size(2) // n_heads, hidden.size(1))
    return fits and _wanted() and attention.flash_allowed()


def fits_causal_kernels(width: int, length: int) -> bool:
    """Whether there are kernels for heads of this width and sequences of this length."""
    return width in _WIDTHS and length % _STEP == 0


def ask_for_others(asked: bool) -> None:
    """Set whether attention is left to torch's kernels."""
    global _others_asked_for
    _others_asked_for = asked


@known_to_compiler
def _wanted() -> bool:
    return not _others_asked_for


def causal_attention(heads: Tensor, bias: Tensor) -> Tensor:
    """Compute the attention of every token to itself and those before it.

    Args:
        heads: [sequences, length, 3, heads, head width], including `bias`.
        bias: [3 * heads * width]; it gets its gradient here, so it must have been added detached.

    Returns:
        [sequences, length, heads, width].
    """
    mixed: Tensor = _causal_attention(heads, bias)[0]
    return mixed


@torch.library.custom_op(
    "frameworm::causal_attention", mutates_args=(), schema="(Tensor heads, Tensor bias) -> (Tensor, Tensor)"
)
def _causal_attention(heads: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mixed values, and what backward needs of the softmax."""
    from frameworm.models.kernels.attention import Tiles
    from frameworm.models.kernels.causal import attend

    return attend(heads.contiguous(), Tiles(*_FORWARD_TILES))


@torch.library.custom_op(
    "frameworm::causal_attention_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor heads, Tensor mixed, Tensor log_totals) -> (Tensor, Tensor, Tensor)",
)
def _causal_attention_backward(
    gradient: Tensor, heads: Tensor, mixed: Tensor, log_totals: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the heads, and partial sums of its columns for queries and for keys and values."""
    from frameworm.models.kernels.attention import Tiles
    from frameworm.models.kernels.causal import attend_backward

    tiles = Tiles(*_QUERY_TILES), Tiles(*_KEY_TILES)
    return attend_backward(gradient.contiguous(), heads.contiguous(), mixed, log_totals, *tiles)


@_causal_attention.register_fake
def _shapes(heads: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    sequences, length, _, n_heads, width = heads.shape
    log_totals = heads.new_empty(sequences, n_heads, length, dtype=torch.float32)
    return heads.new_empty(sequences, length, n_heads, width), log_totals


@_causal_attention_backward.register_fake
def _gradient_shapes(
    gradient: Tensor, heads: Tensor, mixed: Tensor, log_totals: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    sequences, length, _, n_heads, width = heads.shape
    query_sums, other_sums = (
        log_totals.new_empty(sequences * (length // tiles[0]), kinds, n_heads, width)
        for tiles, kinds in ((_QUERY_TILES, 1), (_KEY_TILES, 2))
    )
    return torch.empty_like(heads, memory_format=torch.contiguous_format), query_sums, other_sums


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    heads, bias = inputs
    ctx.save_for_backward(heads, *output)
    ctx.bias_dtype = bias.dtype
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if gradient is None:
        return None, None
    to_heads, *sums = _causal_attention_backward(gradient, *ctx.saved_tensors)
    return to_heads, torch.cat([part.sum(0).flatten() for part in sums]).to(ctx.bias_dtype)


_causal_attention.register_autograd(_backward, setup_context=_save)
