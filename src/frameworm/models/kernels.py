"""Triton kernels; imported late, where there is a GPU and triton."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

_LARGEST_BLOCK = 8192
# A row up to this long stays in the registers of one program: read once instead of twice.
_LONGEST_HELD = 65536


@triton.jit
def _held_cross_entropy_kernel(
    logits,
    targets,
    losses,
    row_stride,
    ignore_index,
    vocabulary: tl.constexpr,
    write: tl.constexpr,
    block_size: tl.constexpr,
):
    """One program per row, which it holds whole: read it, and write the gradient over it."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * row_stride
    columns = tl.arange(0, block_size)
    there = columns < vocabulary
    target = tl.load(targets + row)
    real = target != ignore_index
    inside = (target >= 0) & (target < vocabulary)
    chosen = tl.load(line + target, mask=inside, other=float("nan")).to(tl.float32)
    values = tl.load(line + columns, mask=there, other=float("-inf")).to(tl.float32)
    largest = tl.max(values, 0)
    powers = tl.exp(values - largest)
    total = tl.sum(powers, 0)
    tl.store(losses + row, tl.where(real, largest + tl.log(total) - chosen, 0.0))
    if write:
        gradient = powers / total - tl.where(columns == target, 1.0, 0.0)
        gradient = tl.where(real, gradient, 0.0)
        tl.store(line + columns, gradient.to(logits.dtype.element_ty), mask=there)


@triton.jit
def _cross_entropy_kernel(
    logits,
    targets,
    losses,
    row_stride,
    ignore_index,
    vocabulary: tl.constexpr,
    write: tl.constexpr,
    block_size: tl.constexpr,
):
    """One program per row: read it for the softmax's sum, read it again to write the gradient over it."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * row_stride
    columns = tl.arange(0, block_size)
    target = tl.load(targets + row)
    real = target != ignore_index
    # A target outside the vocabulary shows as NaN instead of as somebody else's memory.
    inside = (target >= 0) & (target < vocabulary)
    chosen = tl.load(line + target, mask=inside, other=float("nan")).to(tl.float32)
    largest = float("-inf")
    total = 0.0
    for start in range(0, vocabulary, block_size):
        there = start + columns < vocabulary
        values = tl.load(line + start + columns, mask=there, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(largest, tl.max(values, 0))
        total = total * tl.exp(largest - highest) + tl.sum(tl.exp(values - highest), 0)
        largest = highest
    log_total = largest + tl.log(total)
    tl.store(losses + row, tl.where(real, log_total - chosen, 0.0))
    if write:
        for start in range(0, vocabulary, block_size):
            there = start + columns < vocabulary
            values = tl.load(line + start + columns, mask=there, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(values - log_total) - tl.where(start + columns == target, 1.0, 0.0)
            gradient = tl.where(real, gradient, 0.0)
            tl.store(line + start + columns, gradient.to(logits.dtype.element_ty), mask=there)


def cross_entropy_rows(logits: Tensor, targets: Tensor, losses: Tensor, ignore_index: int, with_gradient: bool) -> None:
    """Writes the loss of each row and, if asked, its gradient over the logits.

    Args:
        logits: [rows, vocabulary], contiguous rows; overwritten by softmax - one-hot when `with_gradient`.
        targets: int64, [rows].
        losses: fp32, [rows]; 0 where the target is ignored.
    """
    rows, vocabulary = logits.shape
    block_size = triton.next_power_of_2(vocabulary)
    kernel, warps = _held_cross_entropy_kernel, 32
    if block_size > _LONGEST_HELD:
        kernel, block_size = _cross_entropy_kernel, _LARGEST_BLOCK
    if block_size <= _LARGEST_BLOCK:
        warps = 16 if block_size >= 4096 else 4
    with torch.cuda.device(logits.device):
        kernel[(rows,)](
            logits,
            targets,
            losses,
            logits.stride(0),
            ignore_index,
            vocabulary=vocabulary,
            write=with_gradient,
            block_size=block_size,
            num_warps=warps,
        )
