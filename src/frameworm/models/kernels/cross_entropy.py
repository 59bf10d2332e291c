"""Triton kernels of cross-entropy; imported only where there is a GPU and triton."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from frameworm.models.kernels.attention import TO_BASE_TWO

# A row up to this length stays in the registers of one program, so it is read once instead of twice.
_LONGEST_HELD = 8192
# Columns at a time, parts of them, warps, and rows per multiprocessor at a time; tuned on an H200. A part is eight
# columns per thread.
_BLOCK, _PARTS, _WARPS, _PROGRAMS_EACH = 16384, 4, 16, 4


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
    """One program per row, which it holds completely: read it, and overwrite it with the gradient."""
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
def _add_powers(values, largest, total, parts: tl.constexpr):
    """Add values to running sums of powers of two and the maxima that they are relative to.

    Each sum takes eight neighbours, which are in one thread, from each part: they are rescaled to a new maximum
    together rather than one by one.
    """
    values = tl.reshape(values.to(tl.float32), [parts, values.shape[0] // parts // 8, 8])
    highest = tl.maximum(largest, tl.max(tl.max(values, 2), 0) * TO_BASE_TWO)
    powers = tl.exp2(values * TO_BASE_TWO - highest[None, :, None])
    return highest, total * tl.exp2(largest - highest) + tl.sum(tl.sum(powers, 2), 0)


@triton.jit
def _write_shares(line, columns, log_total, there):
    """Overwrite each value with its softmax probability."""
    values = tl.load(line + columns, mask=there, eviction_policy="evict_first")
    shares = tl.exp2(values.to(tl.float32) * TO_BASE_TWO - log_total)
    tl.store(line + columns, shares.to(values.dtype), mask=there, eviction_policy="evict_first")


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
    parts: tl.constexpr,
):
    """Each program handles every n-th row: reads it for the softmax's sum, then again to write the gradient over it.

    With few rows in progress at a time, the second pass finds most of a row still in the cache. All but the last block
    of a row are complete and read without a mask.
    """
    columns = tl.arange(0, block_size)
    whole: tl.constexpr = vocabulary // block_size * block_size
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = logits + tl.cast(row, tl.int64) * row_stride
        target = tl.load(targets + row)
        real = target != ignore_index
        # A target outside the vocabulary gives NaN instead of an out-of-bounds read.
        inside = (target >= 0) & (target < vocabulary)
        chosen = tl.load(line + target, mask=inside, other=float("nan")).to(tl.float32)
        largest = tl.full([block_size // parts // 8], -1e30, tl.float32)
        total = tl.zeros([block_size // parts // 8], tl.float32)
        for start in range(0, whole, block_size):
            values = tl.load(line + start + columns, eviction_policy="evict_last")
            largest, total = _add_powers(values, largest, total, parts)
        if whole < vocabulary:
            values = tl.load(
                line + whole + columns,
                mask=whole + columns < vocabulary,
                other=float("-inf"),
                eviction_policy="evict_last",
            )
            largest, total = _add_powers(values, largest, total, parts)
        summit = tl.max(largest, 0)
        log_total = summit + tl.log2(tl.sum(total * tl.exp2(largest - summit), 0))
        tl.store(losses + row, tl.where(real, log_total / TO_BASE_TWO - chosen, 0.0))
        if write:
            tl.debug_barrier()  # no thread may write before all have read the target's logit
            if real:
                for start in range(0, whole, block_size):
                    _write_shares(line + start, columns, log_total, None)
                if whole < vocabulary:
                    _write_shares(line + whole, columns, log_total, whole + columns < vocabulary)
                tl.debug_barrier()  # the target's gradient is written last
                own = tl.exp2(chosen * TO_BASE_TWO - log_total) - 1.0
                tl.store(line + target, own.to(logits.dtype.element_ty), mask=inside)
            else:
                nothing = tl.zeros([block_size], logits.dtype.element_ty)
                for start in range(0, vocabulary, block_size):
                    tl.store(line + start + columns, nothing, mask=start + columns < vocabulary)


def cross_entropy_rows(logits: Tensor, targets: Tensor, losses: Tensor, ignore_index: int, with_gradient: bool) -> None:
    """Write the loss of each row and, if asked, its gradient over the logits.

    Args:
        logits: [rows, vocabulary], contiguous rows; overwritten by softmax - one-hot if `with_gradient`.
        targets: int64, [rows].
        losses: fp32, [rows]; 0 if the target is ignored.
        ignore_index: Target that does not count.
        with_gradient: Whether to write the gradient.
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
            parts=_PARTS,
            num_warps=_WARPS,
        )
