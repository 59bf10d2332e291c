"""Packed attention on a CPU: sequences of like length share one call, so little of it is padding.

A CPU's numbers can be looked at without waiting, so the work is cut to what this very batch needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Each further group is a call more, forward and backward, and saves less than the one before it. So many pairs of
# tokens, times the width of their heads, take as long as a call. Of the lengths at which a group may end, a few do.
_CALL, _MOST_CUTS = 2**18, 32


@dataclass(frozen=True)
class _Groups:
    """Where the tokens of a batch go: to a place of one of the groups, which lie one after the other.

    A token's queries, keys and values are three rows, and those of a group lie behind each other.

    Attributes:
        rows: For each place the token that lies there; one more than the last token where there is none.
        back: For each token its place.
        parts_rows: For each place of a group's queries, then keys, then values, the row that lies there.
        parts_back: For each row its place among those.
        shapes: Sequences and length of each group.
        masks: By group what is added to the scores, [sequences, 1, 1, length]: 0, or -inf for what is no token; None
            where nothing is padding.
    """

    rows: Tensor
    back: Tensor
    parts_rows: Tensor
    parts_back: Tensor
    shapes: list[tuple[int, int]]
    masks: list[Tensor | None]


_last: tuple[weakref.ref[Tensor], int, _Groups] | None = None


def grouped_attention(heads: Tensor, offsets: Tensor, causal: bool = False) -> Tensor:
    """Attention of every token to those of its own sequence; see `attention.packed_self_attention`.

    Args:
        heads: Queries, keys and values, [tokens, 3, heads, width].
        offsets: Borders of the sequences, from 0 to the number of tokens.
        causal: A token sees only itself and those before it.

    Returns:
        [tokens, heads, width].
    """
    _, _, count, width = heads.shape
    groups = _groups_of(offsets, count * width)
    if not groups.shapes:
        return heads[:, 0]
    taken: tuple[Tensor, ...] = _Take.apply(heads, groups)  # type: ignore[no-untyped-call]
    parts = []
    for number, ((_, length), mask) in enumerate(zip(groups.shapes, groups.masks)):
        query, key, value = taken[3 * number : 3 * number + 3]
        if mask is not None:
            mask = mask.to(query.dtype)
            if causal:
                mask = mask + mask.new_full((length, length), -torch.inf).triu_(1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal and mask is None)
        parts.append(mixed)
    result: Tensor = _Put.apply(groups, *parts)  # type: ignore[no-untyped-call]
    return result


def _groups_of(offsets: Tensor, width: int) -> _Groups:
    """The groups of a batch; all layers ask for the same."""
    global _last
    if _last is not None and _last[0]() is offsets and _last[1] == offsets._version:
        return _last[2]
    groups = _make_groups(offsets.numpy().astype(np.int64), width)
    _last = (weakref.ref(offsets), offsets._version, groups)
    return groups


def _make_groups(offsets: np.ndarray[Any, np.dtype[np.int64]], width: int) -> _Groups:
    lengths = np.diff(offsets)
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    # By sequence: where its places begin; where its keys begin beside its queries, and its values beside its keys; and
    # how much further down its queries are, since the keys and values of the groups before its own lie there too.
    starts, sizes, before = np.zeros((3, len(lengths)), dtype=np.int64)
    shapes: list[tuple[int, int]] = []
    full: list[bool] = []
    begin = 0
    for members in _divided(order, lengths, width):
        shape = (len(members), int(lengths[members[-1]]))
        size = shape[0] * shape[1]
        starts[members] = np.arange(begin, begin + size, shape[1])
        sizes[members], before[members] = size, 2 * begin
        shapes.append(shape)
        full.append(bool(lengths[members[0]] == shape[1]))
        begin += size
    tokens = int(offsets[-1])
    back = np.arange(tokens) + np.repeat(starts - offsets[:-1], lengths)
    queries = back + np.repeat(before, lengths)
    parts_back = (queries[:, None] + np.repeat(sizes, lengths)[:, None] * np.arange(3)).ravel()
    rows, parts_rows = np.full(begin, tokens), np.zeros(3 * begin, dtype=np.int64)
    rows[back] = np.arange(tokens)
    parts_rows[parts_back] = np.arange(3 * tokens)
    hidden = torch.from_numpy(np.where(rows == tokens, np.float32(-np.inf), np.float32(0)))
    parts = hidden.split([sequences * length for sequences, length in shapes])
    return _Groups(
        torch.from_numpy(rows),
        torch.from_numpy(back),
        torch.from_numpy(parts_rows),
        torch.from_numpy(parts_back),
        shapes,
        [None if is_full else part.view(one, 1, 1, two) for is_full, part, (one, two) in zip(full, parts, shapes)],
    )


def _divided(order: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], width: int) -> list[np.ndarray[Any, Any]]:
    """Sequences in the order of their lengths, in one, two or three groups, cut where that saves most."""
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


class _Take(torch.autograd.Function):
    """From [tokens, 3, heads, width] to queries, keys and values [sequences, heads, length, width] of each group.

    Their gradients are joined all at once, instead of stacked and joined group by group. Places that hold no token of
    their own have none: their keys are masked, and their queries' results are not read.
    """

    @staticmethod
    def forward(ctx: Any, heads: Tensor, groups: _Groups) -> tuple[Tensor, ...]:
        """Views of one tensor."""
        ctx.groups, ctx.shape = groups, heads.shape
        taken = heads.reshape(-1, *heads.shape[2:]).index_select(0, groups.parts_rows)
        shapes = [shape for shape in groups.shapes for _ in range(3)]
        return tuple(_places(taken, shapes))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Each row has one place."""
        return _joined(gradients).index_select(0, ctx.groups.parts_back).view(ctx.shape), None


class _Put(torch.autograd.Function):
    """Back from the groups' results [sequences, heads, length, width] to [tokens, heads, width]."""

    @staticmethod
    def forward(ctx: Any, groups: _Groups, *parts: Tensor) -> Tensor:
        """Each token from its place."""
        ctx.groups = groups
        return _joined(parts).index_select(0, groups.back)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Nothing for places without a token."""
        gradient = gradients[0]
        whole = torch.cat((gradient, gradient.new_zeros(1, *gradient.shape[1:]))).index_select(0, ctx.groups.rows)
        return None, *_places(whole, ctx.groups.shapes)


def _places(whole: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    """A tensor [places, heads, width] as one [sequences, heads, length, width] for each shape."""
    parts = whole.split([sequences * length for sequences, length in shapes])
    return [part.view(*shape, *whole.shape[1:]).transpose(1, 2) for part, shape in zip(parts, shapes)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `_places`."""
    return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])
