"""Packed attention on a CPU: sequences of like length share one call, so little of it is padding.

A CPU's numbers can be looked at without waiting, so the work is cut to what this very batch needs.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Each further group is a call more, forward and backward, and saves less than the one before it. So many pairs of
# tokens, times the width of their heads, take as long as a call.
_MOST_GROUPS, _CALL = 3, 2**19


@dataclass(frozen=True)
class _Groups:
    """Where the tokens of a batch go.

    Attributes:
        rows: For each place of all groups, one group after the other, the token that lies there.
        back: For each token its place.
        real: Whether a place holds a token of its own, [places, 1, 1].
        shapes: Sequences and length of each group.
        masks: By group what is added to the scores, [sequences, 1, 1, length]: 0, or -inf for what is no token; None
            where nothing is padding.
    """

    rows: Tensor
    back: Tensor
    real: Tensor
    shapes: list[tuple[int, int]]
    masks: list[Tensor | None]

    def places(self, whole: Tensor) -> list[Tensor]:
        """The groups' parts of a tensor [places, ...], as [sequences, length, ...]."""
        parts = whole.split([sequences * length for sequences, length in self.shapes])
        return [part.view(*shape, *whole.shape[1:]) for part, shape in zip(parts, self.shapes)]


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
    back = np.empty(int(offsets[-1]), dtype=np.int64)
    rows, real, shapes, masks, begin = [], [], [], [], 0
    for members in _divided(order, lengths, width):
        length = int(lengths[members[-1]])
        within = np.arange(length)
        filled = within < lengths[members, None]
        places = offsets[members, None] + within
        back[places[filled]] = begin + np.flatnonzero(filled)
        rows.append(np.where(filled, places, 0).ravel())
        real.append(filled.ravel())
        shapes.append((len(members), length))
        hidden = np.where(filled, np.float32(0), np.float32(-np.inf))
        masks.append(None if filled.all() else torch.from_numpy(hidden)[:, None, None, :])
        begin += filled.size
    return _Groups(
        torch.from_numpy(np.concatenate(rows)) if rows else torch.empty(0, dtype=torch.int64),
        torch.from_numpy(back),
        torch.from_numpy(np.concatenate(real))[:, None, None] if real else torch.empty(0, 1, 1, dtype=torch.bool),
        shapes,
        masks,
    )


def _divided(order: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], width: int) -> list[np.ndarray[Any, Any]]:
    """Sequences in the order of their lengths, in as many equal groups as save time."""

    def cost(parts: list[np.ndarray[Any, Any]]) -> int:
        return sum(width * len(part) * int(lengths[part[-1]]) ** 2 + _CALL for part in parts)

    counts = range(1, min(_MOST_GROUPS, len(order)) + 1)
    return min((np.array_split(order, count) for count in counts), key=cost, default=[])


class _Take(torch.autograd.Function):
    """From [tokens, 3, heads, width] to queries, keys and values [sequences, heads, length, width] of each group.

    Their gradients are written side by side, instead of stacked and joined group by group. Places that hold no token of
    their own have none: their keys are masked, and their queries' results are not read.
    """

    @staticmethod
    def forward(ctx: Any, heads: Tensor, groups: _Groups) -> tuple[Tensor, ...]:
        """Views of one tensor."""
        ctx.groups = groups
        taken = heads.index_select(0, groups.rows)
        return tuple(part for place in groups.places(taken) for part in place.permute(2, 0, 3, 1, 4).unbind(0))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Each token has one place."""
        _, heads, _, width = gradients[0].shape
        whole = gradients[0].new_empty(len(ctx.groups.rows), 3, heads, width)
        for number, place in enumerate(ctx.groups.places(whole)):
            for part, gradient in enumerate(gradients[3 * number : 3 * number + 3]):
                place[:, :, part].copy_(gradient.transpose(1, 2))
        return whole.index_select(0, ctx.groups.back), None


class _Put(torch.autograd.Function):
    """Back from the groups' results [sequences, heads, length, width] to [tokens, heads, width]."""

    @staticmethod
    def forward(ctx: Any, groups: _Groups, *parts: Tensor) -> Tensor:
        """Each token from its place."""
        ctx.groups = groups
        _, heads, _, width = parts[0].shape
        whole = parts[0].new_empty(len(groups.rows), heads, width)
        for place, part in zip(groups.places(whole), parts):
            place.copy_(part.transpose(1, 2))
        return whole.index_select(0, groups.back)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Nothing for places without a token."""
        whole = gradients[0].index_select(0, ctx.groups.rows).mul_(ctx.groups.real)
        return None, *(place.transpose(1, 2) for place in ctx.groups.places(whole))
