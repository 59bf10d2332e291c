"""Attention over sequences packed end to end in one row of tokens.

`offsets` holds the boundaries: sequence i is `tokens[offsets[i]:offsets[i + 1]]`. Nothing here needs a length on the
host, and all shapes are known beforehand, so a model can be compiled in one graph and captured.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from frameworm.models.grouped_attention import grouped_attention
from frameworm.models.short_attention import short_attention, suits_short_kernels
from frameworm.torch_private.compiler import known_to_compiler
from frameworm.torch_private.operators import flash_attention_varlen

_WIDEST_HEAD = 256  # limit of the flash kernels, which also require a multiple of 8


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, max_length: int, causal: bool = False
) -> Tensor:
    """Compute the attention of every token to the tokens of its own sequence.

    Args:
        query: [tokens, heads, head width]; `key` and `value` likewise.
        key: As `query`.
        value: As `query`.
        offsets: Boundaries of the sequences, int32, [sequences + 1], from 0 to the number of tokens. Empty sequences
            are allowed.
        max_length: No sequence is longer.
        causal: Whether a token sees only itself and those before it.

    Returns:
        [tokens, heads, head width].
    """
    if _fits_flash(query) and flash_allowed():
        from torch.nn.attention.varlen import varlen_attn  # late, as it imports the whole compiler

        more: dict[str, Any] = {}
        if causal:
            more = {"is_causal": True} if _takes_is_causal() else {"window_size": (-1, 0)}
        mixed = varlen_attn(query, key, value, offsets, offsets, max_length, max_length, **more)
        assert isinstance(mixed, Tensor)
        return mixed
    if _may_look(offsets):
        return grouped_attention(torch.stack((query, key, value), 1), offsets, causal)
    return _padded_attention(query, key, value, offsets, max_length, causal)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    max_length: int,
    *,
    causal: bool,
    dropout: float = 0.0,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute packed attention with the options of other libraries' models; see `packed_attention`.

    Args:
        query: [tokens, heads, head width].
        key: As `query`, possibly with fewer heads, each for a group of query heads.
        value: As `key`.
        offsets: As in `packed_attention`.
        max_length: No sequence is longer.
        causal: Whether a token sees only itself and those before it.
        dropout: Probability of dropping an attention weight.
        scale: Factor on the scores; None for one over the square root of the head width.
        window: A token sees only tokens fewer than `window` tokens away; None for all.

    Returns:
        [tokens, heads, head width].
    """
    if _fits_flash(query) and value.shape == key.shape and flash_allowed():
        side = -1 if window is None else window - 1
        # `varlen_attn` calls this, but has no dropout; torch handles its gradient and its random state under capture.
        mixed: Tensor = flash_attention_varlen(
            query,
            key,
            value,
            offsets,
            offsets,
            max_length,
            max_length,
            dropout,
            causal,
            False,
            scale=scale,
            window_size_left=side,
            window_size_right=0 if causal else side,
        )[0]
        return mixed
    groups = query.size(1) // key.size(1)
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return _padded_attention(query, key, value, offsets, max_length, causal, dropout, scale, window)


def packed_self_attention(heads: Tensor, offsets: Tensor, max_length: int, causal: bool = False) -> Tensor:
    """Compute packed attention of interleaved queries, keys and values: [tokens, 3, heads, head width]."""
    if _may_look(offsets):
        return grouped_attention(heads, offsets, causal)
    if suits_short_kernels(heads, max_length) and flash_allowed():
        return short_attention(heads, offsets, max_length, causal)
    query, key, value = heads.unbind(1)
    return packed_attention(query, key, value, offsets, max_length, causal)


def _may_look(offsets: Tensor) -> bool:
    """Whether the values can be read on the host without waiting."""
    return type(offsets) is Tensor and offsets.device.type == "cpu" and not torch.compiler.is_compiling()


def _fits_flash(query: Tensor) -> bool:
    width = query.size(2)
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and half and width % 8 == 0 and width <= _WIDEST_HEAD


@known_to_compiler
def flash_allowed() -> bool:
    """Whether this GPU has flash kernels and the user allows them."""
    return torch.backends.cuda.flash_sdp_enabled() and torch.cuda.get_device_capability() >= (8, 0)


@known_to_compiler
def _takes_is_causal() -> bool:
    """Whether `varlen_attn` takes `is_causal`, a keyword that changed between torch versions."""
    from torch.nn.attention.varlen import varlen_attn

    return "is_causal" in inspect.signature(varlen_attn).parameters


def _padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    max_length: int,
    causal: bool,
    dropout: float = 0.0,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute the same on one row per sequence, padded to `max_length`."""
    tokens, heads = query.shape[:2]
    within = torch.arange(max_length, device=query.device)
    starts, ends = offsets[:-1].long(), offsets[1:].long()
    places = starts.unsqueeze(1) + within
    # The first place counts as real even in an empty sequence, because a softmax over nothing is NaN; it is never read.
    attended = ((places < ends.unsqueeze(1)) | (within == 0))[:, None, None, :]
    if causal:
        attended = attended & (within.unsqueeze(1) >= within)
    if window is not None:
        attended = attended & ((within.unsqueeze(1) - within).abs() < window)
    rows = places.clamp(max=tokens - 1).flatten()

    def padded(packed: Tensor) -> Tensor:
        return packed.index_select(0, rows).view(-1, max_length, heads, packed.size(2)).transpose(1, 2)

    mixed = F.scaled_dot_product_attention(
        padded(query), padded(key), padded(value), attn_mask=attended, dropout_p=dropout, scale=scale
    )
    sequence = sequence_of_tokens(offsets, tokens)
    back = sequence * max_length + torch.arange(tokens, device=query.device) - starts.index_select(0, sequence)
    return mixed.transpose(1, 2).reshape(-1, heads, value.size(2)).index_select(0, back)


def sequence_of_tokens(offsets: Tensor, tokens: int) -> Tensor:
    """Return the index of each token's sequence, [tokens]."""
    token = torch.arange(tokens, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:].contiguous(), token, right=True)
