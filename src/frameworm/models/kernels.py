"""Triton kernels; imported late, where there is a GPU and triton."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

# A row up to this long stays in the registers of one program: read once instead of twice.
_LONGEST_HELD = 8192
_PROGRAMS_EACH = 4  # rows that a multiprocessor works on at a time; found by trial, as block and warps are


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
        largest = tl.full([block_size], -1e30, tl.float32)
        total = tl.zeros([block_size], tl.float32)
        for start in range(0, vocabulary, block_size):
            there = start + columns < vocabulary
            values = tl.load(line + start + columns, mask=there, other=float("-inf"), eviction_policy="evict_last")
            powers = values.to(tl.float32) * to_base_two
            highest = tl.maximum(largest, powers)
            total = total * tl.exp2(largest - highest) + tl.exp2(powers - highest)
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
            logits, targets, losses, rows, logits.stride(0), ignore_index, **settings, block_size=4096, num_warps=8
        )


@triton.jit
def _gelu_parts(values):
    """The sigmoid of GELU's tanh form, gelu(x) = x * sigmoid(inner(x)), and inner's derivative."""
    square = values * values
    inner = values * (1.5957691216057308 + 0.07135481282553508 * square)
    return tl.sigmoid(inner), 1.5957691216057308 + 0.2140644384766052 * square


@triton.jit
def _bias_gelu_kernel(product, bias, activated, rows, width, row_block: tl.constexpr, column_block: tl.constexpr):
    row = tl.program_id(0) * row_block + tl.arange(0, row_block)
    column = tl.program_id(1) * column_block + tl.arange(0, column_block)
    there = (row < rows)[:, None] & (column < width)[None, :]
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    values = tl.load(product + place, mask=there, other=0.0).to(tl.float32)
    values += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    share, _ = _gelu_parts(values)
    tl.store(activated + place, (values * share).to(activated.dtype.element_ty), mask=there)


@triton.jit
def _bias_gelu_backward_kernel(
    gradient,
    product,
    bias,
    result,
    sums,
    rows,
    width,
    rows_each,
    row_block: tl.constexpr,
    column_block: tl.constexpr,
):
    """A program takes a strip of columns through its share of the rows, and leaves the strip's sums."""
    column = tl.program_id(1) * column_block + tl.arange(0, column_block)
    inside = column < width
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([row_block, column_block], tl.float32)
    first = tl.program_id(0) * rows_each
    for start in range(first, first + rows_each, row_block):
        row = start + tl.arange(0, row_block)
        there = (row < rows)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * width + column[None, :]
        values = tl.load(product + place, mask=there, other=0.0).to(tl.float32) + shift
        incoming = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32)
        share, slope = _gelu_parts(values)
        outgoing = incoming * share * (1.0 + values * (1.0 - share) * slope)
        tl.store(result + place, outgoing.to(result.dtype.element_ty), mask=there)
        total += tl.where(there, outgoing, 0.0)
    tl.store(sums + tl.program_id(0).to(tl.int64) * width + column, tl.sum(total, 0), mask=inside)


_ROW_BLOCK, _COLUMN_BLOCK = 4, 1024
_ROWS_EACH = 128  # of a program in backward; their sums are added up afterwards


def bias_gelu_rows(product: Tensor, bias: Tensor) -> Tensor:
    """`gelu(product + bias)` of [rows, width], both contiguous."""
    activated = torch.empty_like(product)
    rows, width = product.shape
    columns = min(_COLUMN_BLOCK, triton.next_power_of_2(width))
    grid = (triton.cdiv(rows, _ROW_BLOCK), triton.cdiv(width, columns))
    if product.numel():
        with torch.cuda.device(product.device):
            _bias_gelu_kernel[grid](
                product, bias, activated, rows, width, row_block=_ROW_BLOCK, column_block=columns, num_warps=4
            )
    return activated


def bias_gelu_rows_backward(gradient: Tensor, product: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `product` and `bias`; the sums over rows are fp32 and always in the same order."""
    result = torch.empty_like(product)
    rows, width = product.shape
    columns = min(_COLUMN_BLOCK, triton.next_power_of_2(width))
    parts = triton.cdiv(rows, _ROWS_EACH)
    sums = torch.empty(parts, width, dtype=torch.float32, device=product.device)
    if product.numel():
        with torch.cuda.device(product.device):
            _bias_gelu_backward_kernel[(parts, triton.cdiv(width, columns))](
                gradient,
                product,
                bias,
                result,
                sums,
                rows,
                width,
                _ROWS_EACH,
                row_block=_ROW_BLOCK,
                column_block=columns,
                num_warps=4,
            )
    return result, sums.sum(0).to(bias.dtype)
