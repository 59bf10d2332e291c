"""Attention over sequences that lie end to end in one row of tokens.

`offsets` holds the borders: sequence i is `tokens[offsets[i]:offsets[i + 1]]`. Nothing here asks the host for a length
and all shapes are known beforehand, so a model can be compiled in one graph and captured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from frameworm.models.grouped_attention import grouped_attention
from frameworm.models.short_attention import short_attention, suits_short_kernels

_WIDEST_HEAD = 256  # of the flash kernels, which also want a multiple of 8

Function = TypeVar("Function", bound=Callable[..., Any])


def known_to_compiler(function: Function) -> Function:
    """Have the compiler ask it once and take the answer; `torch.compiler.assume_constant_result` would load that."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, max_length: int, causal: bool = False
) -> Tensor:
    """Attention of every token to the tokens of its own sequence.

    Args:
        query: [tokens, heads, width of a head]; `key` and `value` likewise.
        offsets: Borders of the sequences, int32, [sequences + 1], from 0 to the number of tokens. Empty sequences
            are allowed.
        max_length: No sequence is longer.
        causal: A token sees only itself and those before it.

    Returns:
        [tokens, heads, width of a head].
    """
    if _fits_flash(query) and flash_allowed():
        from torch.nn.attention.varlen import varlen_attn  # late: it brings the whole compiler along

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
    """As `packed_attention`, for the attention of models of others.

    Args:
        query: [tokens, heads, width of a head]; `key` and `value` may have fewer heads, each for a group of them.
        offsets: As in `packed_attention`.
        max_length: No sequence is longer.
        causal: A token sees only itself and those before it.
        dropout: Share of the attention weights to drop.
        scale: Of the scores; None: one by the root of a head's width.
        window: A token sees those that are fewer than so many tokens away; None: all.

    Returns:
        [tokens, heads, width of a head].
    """
    if _fits_flash(query) and value.shape == key.shape and flash_allowed():
        side = -1 if window is None else window - 1
        # What `varlen_attn` calls, which has no dropout; its gradient and its random state under capture are torch's.
        mixed: Tensor = torch.ops.aten._flash_attention_forward(
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
    """The same for queries, keys and values that lie side by side: [tokens, 3, heads, width of a head]."""
    if _may_look(offsets):
        return grouped_attention(heads, offsets, causal)
    if suits_short_kernels(heads, max_length) and flash_allowed():
        return short_attention(heads, offsets, max_length, causal)
    query, key, value = heads.unbind(1)
    return packed_attention(query, key, value, offsets, max_length, causal)


def _may_look(offsets: Tensor) -> bool:
    """Whether there are values, which nobody has to wait for."""
    return type(offsets) is Tensor and offsets.device.type == "cpu" and not torch.compiler.is_compiling()


def _fits_flash(query: Tensor) -> bool:
    width = query.size(2)
    half = query.dtype in (torch.float16, torch.bfloat16)
    return query.is_cuda and half and width % 8 == 0 and width <= _WIDEST_HEAD


@known_to_compiler
def flash_allowed() -> bool:
    """Whether this GPU has the flash kernels and the user lets them run."""
    return torch.backends.cuda.flash_sdp_enabled() and torch.cuda.get_device_capability() >= (8, 0)


@known_to_compiler
def _takes_is_causal() -> bool:
    """How this torch is told that no token looks ahead; the keyword changed between versions."""
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
    """The same on one row per sequence, filled up to `max_length`."""
    tokens, heads = query.shape[:2]
    within = torch.arange(max_length, device=query.device)
    starts, ends = offsets[:-1].long(), offsets[1:].long()
    places = starts.unsqueeze(1) + within
    # The first place counts as real even in an empty sequence: a softmax over nothing is NaN. Nobody reads its result.
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
    """Which sequence each token belongs to, [tokens]; empty sequences have none."""
    token = torch.arange(tokens, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets[1:].contiguous(), token, right=True)
