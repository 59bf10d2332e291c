"""Gather hidden states of padded batches into one row of real tokens, and scatter them back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from frameworm.data.batches.sizes import changed_parts


class TokenPlan(NamedTuple):
    """Where the real tokens of a batch are; see `data.batches.real_tokens`."""

    places: Tensor
    back: Tensor
    offsets: Tensor
    length: int
    rows: int
    width: int


def packed(item: Any, plan: TokenPlan) -> Any:
    """Pack a block's inputs: everything that exists per token becomes one row of real tokens."""
    if isinstance(item, Tensor):
        if item.shape[:2] == (plan.rows, plan.width):
            row = item.flatten(0, 1).unsqueeze(0)
            return _moved(row, plan.places.clamp(max=plan.rows * plan.width - 1), plan.back)
        if item.shape[:2] == (1, plan.width):  # the same for all samples, such as positions
            return item.index_select(1, plan.places % plan.width)
        return item
    return changed_parts(item, lambda part: packed(part, plan))


def unpacked(item: Any, plan: TokenPlan) -> Any:
    """Unpack a block's outputs into one row per sample; padding is zero."""
    if isinstance(item, Tensor):
        if item.shape[:2] != (1, plan.places.shape[0]):
            return item
        return _moved(item, plan.back, plan.places).view(plan.rows, plan.width, *item.shape[2:])
    return changed_parts(item, lambda part: unpacked(part, plan))


class _Moved(torch.autograd.Function):
    """Gather tokens by the indices `there` (zero beyond the last) and their gradients by `back`.

    Each token goes to at most one place, so both directions are a gather; torch's own gradient would sum with atomics.
    The result is not a view, like other blocks' outputs, which the compiler distinguishes from views.
    """

    @staticmethod
    def forward(ctx: Any, row: Tensor, there: Tensor, back: Tensor) -> Tensor:
        """Gather the tokens."""
        ctx.save_for_backward(back)
        return _taken(row, there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Gather each token's gradient from where the token went."""
        return _taken(gradient, ctx.saved_tensors[0]), None, None


def _moved(row: Tensor, there: Tensor, back: Tensor) -> Tensor:
    moved: Tensor = _Moved.apply(row, there, back)  # type: ignore[no-untyped-call]
    return moved


def _taken(row: Tensor, there: Tensor) -> Tensor:
    return torch.cat([row, row.new_zeros((1, 1, *row.shape[2:]))], 1).index_select(1, there)
