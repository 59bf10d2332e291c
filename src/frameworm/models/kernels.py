"""Triton kernels; imported late, where there is a GPU and triton."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

# A row up to this long stays in the registers of one program: read once instead of twice.
_LONGEST_HELD = 8192
# Columns at a time, warps, and rows that a multiprocessor works on at a time; found by trial on an H200.
_BLOCK, _WARPS, _PROGRAMS_EACH = 4096, 16, 4


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
    rows,
    row_stride,
    ignore_index,
    vocabulary: tl.constexpr,
    write: tl.constexpr,
    block_size: tl.constexpr,
):
    """A program goes through every n-th row: reads it for the softmax's sum, and again to write the gradient over it.

    With few rows under way at a time the second reading finds most of a row still in the cache.
    """
    columns = tl.arange(0, block_size)
    to_base_two = 1.4426950408889634
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = logits + tl.cast(row, tl.int64) * row_stride
        target = tl.load(targets + row)
        real = target != ignore_index
        # A target outside the vocabulary shows as NaN instead of as somebody else's memory.
        inside = (target >= 0) & (target < vocabulary)
        chosen = tl.load(line + target, mask=inside, other=float("nan")).to(tl.float32)
        # Eight neighbours lie in one thread: their sum is brought to a new maximum together, not each by itself.
        largest = tl.full([block_size // 8], -1e30, tl.float32)
        total = tl.zeros([block_size // 8], tl.float32)
        for start in range(0, vocabulary, block_size):
            there = start + columns < vocabulary
            values = tl.load(line + start + columns, mask=there, other=float("-inf"), eviction_policy="evict_last")
            powers = tl.reshape(values.to(tl.float32) * to_base_two, [block_size // 8, 8])
            highest = tl.maximum(largest, tl.max(powers, 1))
            total = total * tl.exp2(largest - highest) + tl.sum(tl.exp2(powers - highest[:, None]), 1)
            largest = highest
        summit = tl.max(largest, 0)
        log_total = summit + tl.log2(tl.sum(total * tl.exp2(largest - summit), 0))
        tl.store(losses + row, tl.where(real, log_total / to_base_two - chosen, 0.0))
        if write:
            tl.debug_barrier()  # nobody writes before all have read the target's logit
            for start in range(0, vocabulary, block_size):
                there = start + columns < vocabulary
                values = tl.load(line + start + columns, mask=there, other=0.0, eviction_policy="evict_first")
                gradient = tl.exp2(values.to(tl.float32) * to_base_two - log_total)
                gradient -= tl.where(start + columns == target, 1.0, 0.0)
                gradient = tl.where(real, gradient, 0.0).to(logits.dtype.element_ty)
                tl.store(line + start + columns, gradient, mask=there, eviction_policy="evict_first")


def cross_entropy_rows(logits: Tensor, targets: Tensor, losses: Tensor, ignore_index: int, with_gradient: bool) -> None:
    """Writes the loss of each row and, if asked, its gradient over the logits.

    Args:
        logits: [rows, vocabulary], contiguous rows; overwritten by softmax - one-hot when `with_gradient`.
        targets: int64, [rows].
        losses: fp32, [rows]; 0 where the target is ignored.
    """
    rows, vocabulary = logits.shape
    if rows == 0:
        return
    block_size = triton.next_power_of_2(vocabulary)
    settings = {"vocabulary": vocabulary, "write": with_gradient}
    with torch.cuda.device(logits.device):
        if block_size <= _LONGEST_HELD:
            _held_cross_entropy_kernel[(rows,)](
                logits,
                targets,
                losses,
                logits.stride(0),
                ignore_index,
                **settings,
                block_size=block_size,
                num_warps=16 if block_size >= 4096 else 4,
            )
            return
        programs = _PROGRAMS_EACH * torch.cuda.get_device_properties(logits.device).multi_processor_count
        _cross_entropy_kernel[(min(rows, programs),)](
            logits,
            targets,
            losses,
            rows,
            logits.stride(0),
            ignore_index,
            **settings,
            block_size=_BLOCK,
            num_warps=_WARPS,
        )
