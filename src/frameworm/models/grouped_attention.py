"""Packed attention on a CPU: sequences of similar length share one call, so there is little padding.

On a CPU values can be read without waiting, so the work is tailored to each batch.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from frameworm.torch_private.operators import cpu_attention, cpu_attention_backward, softmax_backward
from frameworm.torch_private.tensors import version_of

# Each further group adds a call in forward and backward, and saves less than the previous one. A call takes as long as
# this many token pairs times head widths. Only a few of the possible group boundaries are tried.
_CALL, _MOST_CUTS = 2**18, 16

# torch's CPU kernel works in blocks that short sequences leave mostly empty: up to this many tokens, batched matrix
# products take about half as long. They keep the attention weights for backward, which are few for such sequences.
_LONGEST_BY_PRODUCTS, _BY_PRODUCTS = 128, (torch.float32, torch.float64)


@dataclass(frozen=True)
class _Groups:
    """Where the tokens of a batch go: to a place in one of the groups, which are stored one after another.

    A place holds one head of one token, so the places of a group are [sequences, heads, length].

    Attributes:
        places: The place of each head of each token, [tokens x heads].
        rows: For each place of the queries, then of the keys, then of the values, its row in [tokens x 3 x heads];
            arbitrary if there is no token.
        back: For each of those rows, its place among the places of queries, keys and values.
        shapes: Number of sequences and length of each group.
        masks: What to add to each group's scores, [sequences, 1, 1, length]: 0, or -inf for padding; None without
            padding.
    """

    places: Tensor
    rows: Tensor
    back: Tensor
    shapes: list[tuple[int, int]]
    masks: list[Tensor | None]


_last: tuple[weakref.ref[Tensor], int, int, _Groups] | None = None


def grouped_attention(heads: Tensor, offsets: Tensor, causal: bool = False) -> Tensor:
    """Compute the attention of every token to its own sequence; see `attention.packed_self_attention`.

    Args:
        heads: Queries, keys and values, [tokens, 3, heads, width].
        offsets: Boundaries of the sequences, from 0 to the number of tokens.
        causal: Whether a token sees only itself and those before it.

    Returns:
        [tokens, heads, width].
    """
    _, _, count, width = heads.shape
    groups = _groups_of(offsets, count, width)
    if not groups.shapes:
        return heads[:, 0]
    mixed: Tensor = _GroupedAttention.apply(heads, groups, causal)  # type: ignore[no-untyped-call]
    return mixed


def _groups_of(offsets: Tensor, heads: int, width: int) -> _Groups:
    """Return the groups of a batch, cached because all layers use the same."""
    global _last
    if _last is not None and _last[0]() is offsets and _last[1:3] == (version_of(offsets), heads):
        return _last[3]
    groups = _make_groups(offsets.numpy().astype(np.int64), heads, width)
    _last = (weakref.ref(offsets), version_of(offsets), heads, groups)
    return groups


def _make_groups(offsets: np.ndarray[Any, np.dtype[np.int64]], heads: int, width: int) -> _Groups:
    lengths = np.diff(offsets)
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    starts, strides = np.zeros((2, len(lengths)), dtype=np.int64)  # per sequence: first place, distance of heads
    shapes: list[tuple[int, int]] = []
    masks: list[Tensor | None] = []
    begin = 0
    for members in _divided(order, lengths, heads * width):
        count, length = len(members), int(lengths[members[-1]])
        starts[members] = begin + np.arange(count) * (heads * length)
        strides[members] = length
        shapes.append((count, length))
        hidden = np.where(np.arange(length) < lengths[members][:, None], np.float32(0), np.float32(-np.inf))
        masks.append(torch.from_numpy(hidden)[:, None, None, :] if lengths[members[0]] < length else None)
        begin += heads * count * length
    # Column by column, as numpy is slow if the last dimension has only a few heads.
    tokens = int(offsets[-1])
    firsts = np.arange(tokens) + np.repeat(starts - offsets[:-1], lengths)
    strides = np.repeat(strides, lengths)
    back = np.empty((tokens, 3, heads), dtype=np.int64)
    for head in range(heads):
        np.multiply(strides, head, out=back[:, 0, head])
        back[:, 0, head] += firsts
    places = back[:, 0].ravel()
    for part in (1, 2):
        np.add(back[:, 0], begin * part, out=back[:, part])
    rows = np.zeros((3, begin), dtype=np.int64)
    rows[0, places] = np.arange(back.size).reshape(back.shape)[:, 0].ravel()
    rows[1:] = rows[0] + heads * np.arange(1, 3)[:, None]
    numbers = torch.from_numpy(places), torch.from_numpy(rows.ravel()), torch.from_numpy(back.ravel())
    return _Groups(*numbers, shapes, masks)


def _divided(order: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], width: int) -> list[np.ndarray[Any, Any]]:
    """Split sequences, ordered by length, into one, two or three groups where that saves most."""
    if not len(order):
        return []
    ordered = lengths[order]
    cuts = np.flatnonzero(np.diff(ordered)) + 1
    cuts = cuts[:: -(-len(cuts) // _MOST_CUTS) or 1]
    squares, longest = ordered[cuts - 1] ** 2, int(ordered[-1]) ** 2
    first, last = cuts * squares, (len(order) - cuts) * longest
    between = cuts - cuts[:, None]
    three = first[:, None] + np.where(between > 0, between * squares + last, len(order) * longest)
    best: list[tuple[int, list[int]]] = [(width * len(order) * longest + _CALL, [])]
    if len(cuts):
        at = int(np.argmin(first + last))
        best.append((width * int(first[at] + last[at]) + 2 * _CALL, [int(cuts[at])]))
        one, other = divmod(int(np.argmin(three)), len(cuts))
        best.append((width * int(three[one, other]) + 3 * _CALL, [int(cuts[one]), int(cuts[other])]))
    return np.split(order, min(best, key=lambda item: item[0])[1])


class _GroupedAttention(torch.autograd.Function):
    """Computes [tokens, heads, width] from queries, keys and values [tokens, 3, heads, width].

    Rows are gathered and scattered once for all groups, into the layout that the products need.
    """

    @staticmethod
    def forward(ctx: Any, heads: Tensor, groups: _Groups, causal: bool) -> Tensor:
        """Compute the attention within each sequence."""
        tokens, _, count, width = heads.shape
        parts = heads.reshape(-1, width).index_select(0, groups.rows).view(3, -1, width)
        mixed = torch.empty_like(parts[0])
        kept = []  # per group, what backward needs: the weights, or the result and its log-sum-exp
        ctx.masks = [_added_to_scores(mask, one[1], causal, parts) for mask, one in zip(groups.masks, groups.shapes)]
        for shape, mask, (query, key, value), (out,) in _by_group(groups, count, ctx.masks, parts, mixed[None]):
            if _by_products(query):
                kept.append((_weights(query, key, mask, shape),))
                out.copy_(torch.bmm(kept[-1][0], value))  # selective checkpointing keeps what bmm returns
            else:
                kept.append(cpu_attention(*(item.view(shape) for item in (query, key, value)), attn_mask=mask))
                out.view(shape).copy_(kept[-1][0])
        ctx.groups, ctx.shape = groups, heads.shape
        ctx.save_for_backward(parts, *itertools.chain(*kept))
        return mixed.index_select(0, groups.places).view(tokens, count, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradient; places without a token have none, as their keys are masked and results not read."""
        groups, (_, _, count, width) = ctx.groups, ctx.shape
        parts, *rest = ctx.saved_tensors
        kept = iter(rest)
        of_mixed = torch.zeros_like(parts[0]).index_copy_(0, groups.places, gradient.reshape(-1, width))
        of_parts = torch.empty_like(parts)
        grouped = _by_group(groups, count, ctx.masks, parts, of_mixed[None], of_parts)
        for shape, mask, given, (of_out,), targets in grouped:
            if _by_products(of_out):
                _weights_backward(given, next(kept), of_out, targets)
                continue
            given, result = [item.view(shape) for item in (of_out, *given)], (next(kept), next(kept))
            for target, found in zip(targets, cpu_attention_backward(*given, *result, 0.0, False, attn_mask=mask)):
                target.view(shape).copy_(found)
        return of_parts.view(-1, width).index_select(0, groups.back).view(ctx.shape), None, None


def _by_group(groups: _Groups, heads: int, masks: list[Tensor | None], *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield each group's shape, mask, and part [sequences x heads, length, width] of each stacked tensor.

    Args:
        groups: The groups.
        heads: Number of heads.
        masks: The mask of each group.
        *tensors: [number, places, width] each.
    """
    begin, width = 0, tensors[0].size(2)
    for (count, length), mask in zip(groups.shapes, masks):
        end = begin + count * heads * length
        parts = [item[:, begin:end].view(-1, count * heads, length, width).unbind() for item in tensors]
        yield (count, heads, length, width), mask, *parts
        begin = end


def _added_to_scores(mask: Tensor | None, length: int, causal: bool, like: Tensor) -> Tensor | None:
    """Return the mask of a group, with -inf for all later tokens if causal."""
    if not causal:
        return None if mask is None else mask.to(like.dtype)
    later = like.new_full((length, length), -torch.inf).triu_(1)
    return later[None, None] if mask is None else mask.to(like.dtype) + later


def _by_products(query: Tensor) -> bool:
    return query.size(1) <= _LONGEST_BY_PRODUCTS and query.dtype in _BY_PRODUCTS


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """Compute the attention weights, [sequences x heads, length, length]."""
    scores = torch.baddbmm(query.new_empty(1), query, key.transpose(1, 2), beta=0, alpha=query.size(2) ** -0.5)
    if mask is not None:  # not in place: selective checkpointing keeps the results of products
        scores = (scores.view(*shape[:3], shape[2]) + mask).view_as(scores)
    return scores.softmax(2)


def _weights_backward(given: Sequence[Tensor], weights: Tensor, of_out: Tensor, targets: Sequence[Tensor]) -> None:
    """Write the gradients of queries, keys and values into `targets`."""
    query, key, value = given
    of_query, of_key, of_value = targets
    of_weights = torch.bmm(of_out, value.transpose(1, 2))
    of_scores = softmax_backward(of_weights, weights, 2, weights.dtype)
    scale, unused = query.size(2) ** -0.5, query.new_empty(1)
    torch.baddbmm(unused, of_scores, key, beta=0, alpha=scale, out=of_query)
    torch.baddbmm(unused, of_scores.transpose(1, 2), query, beta=0, alpha=scale, out=of_key)
    torch.bmm(weights.transpose(1, 2), of_out, out=of_value)
