"""Hidden states of padded batches, gathered into one row of real tokens and scattered back."""

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
    """Whatever a block is given, with everything that is there per token in one row of real tokens."""
    if isinstance(item, Tensor):
        if item.shape[:2] == (plan.rows, plan.width):
            row = item.flatten(0, 1).unsqueeze(0)
            return _moved(row, plan.places.clamp(max=plan.rows * plan.width - 1), plan.back)
        if item.shape[:2] == (1, plan.width):  # the same for all samples, such as positions
            return item.index_select(1, plan.places % plan.width)
        return item
    return changed_parts(item, lambda part: packed(part, plan))


def unpacked(item: Any, plan: TokenPlan) -> Any:
    """What a block returns, in rows of samples; padding is zero."""
    if isinstance(item, Tensor):
        if item.shape[:2] != (1, plan.places.shape[0]):
            return item
        return _moved(item, plan.back, plan.places).view(plan.rows, plan.width, *item.shape[2:])
    return changed_parts(item, lambda part: unpacked(part, plan))


class _Moved(torch.autograd.Function):
    """Tokens taken from where `there` says, zero beyond the last; gradients are taken back by `back`.

    Each token goes to one place at most, so both ways are a gather: torch's own gradient would add up with atomics.
    What comes out is no view, as what blocks give each other: the compiler tells them apart.
    """

    @staticmethod
    def forward(ctx: Any, row: Tensor, there: Tensor, back: Tensor) -> Tensor:
        """Take the tokens."""
        ctx.save_for_backward(back)
        return _taken(row, there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Each token's gradient from the place where it went."""
        return _taken(gradient, ctx.saved_tensors[0]), None, None


def _moved(row: Tensor, there: Tensor, back: Tensor) -> Tensor:
    moved: Tensor = _Moved.apply(row, there, back)  # type: ignore[no-untyped-call]
    return moved


def _taken(row: Tensor, there: Tensor) -> Tensor:
    return torch.cat([row, row.new_zeros((1, 1, *row.shape[2:]))], 1).index_select(1, there)
