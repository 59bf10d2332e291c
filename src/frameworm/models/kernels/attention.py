"""Triton kernels of attention over packed sequences; imported only where there is a GPU and triton.

Flash attention works on tiles of 128 x 128 regardless of sequence length; texts of fifty words fill a sixth of one.
Here tiles are as small as the sequences, backward handles a sequence that fits into one tile in a single pass, and
queries, keys and values are read, and their gradients written, in place in one interleaved tensor.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

TO_BASE_TWO = tl.constexpr(1.4426950408889634)


class Tiles(NamedTuple):
    """How the work of one kernel is tiled: rows that a program owns, rows per iteration, warps and pipeline stages.

    `registers` is the maximum per thread; None leaves it to the compiler.
    """

    own: int
    other: int
    warps: int
    stages: int
    registers: int | None = None


@triton.jit
def _rows(pointer, first, length, stride, width: tl.constexpr, block: tl.constexpr):
    """Load a tile of rows, zero beyond the sequence's end."""
    row = first + tl.arange(0, block)
    place = row[:, None] * stride + tl.arange(0, width)[None, :]
    return tl.load(pointer + place, mask=(row < length)[:, None], other=0.0)


@triton.jit
def _write(pointer, values, first, length, stride, width: tl.constexpr, block: tl.constexpr):
    row = first + tl.arange(0, block)
    place = row[:, None] * stride + tl.arange(0, width)[None, :]
    tl.store(pointer + place, values.to(pointer.dtype.element_ty), mask=(row < length)[:, None])


@triton.jit
def _forward_kernel(
    heads,
    offsets,
    mixed,
    log_totals,
    tokens,
    scale,
    n_heads: tl.constexpr,
    width: tl.constexpr,
    causal: tl.constexpr,
    own: tl.constexpr,
    other: tl.constexpr,
):
    """Each program owns some queries of one head of one sequence and processes the keys."""
    sequence, head = tl.program_id(0) // n_heads, tl.program_id(0) % n_heads
    begin = tl.load(offsets + sequence).to(tl.int64)
    length = (tl.load(offsets + sequence + 1) - begin).to(tl.int32)
    first = tl.program_id(1) * own
    if first >= length:
        return
    stride = 3 * n_heads * width
    queries = heads + begin * stride + head * width
    keys, values = queries + n_heads * width, queries + 2 * n_heads * width
    query = _rows(queries, first, length, stride, width, own)
    row = first + tl.arange(0, own)
    summit = tl.full([own], -1e30, tl.float32)
    total = tl.zeros([own], tl.float32)
    result = tl.zeros([own, width], tl.float32)
    for start in range(0, tl.minimum(length, first + own) if causal else length, other):
        key = _rows(keys, start, length, stride, width, other)
        value = _rows(values, start, length, stride, width, other)
        column = start + tl.arange(0, other)
        seen = (column < length)[None, :]
        if causal:
            seen = seen & (column[None, :] <= row[:, None])
        score = tl.where(seen, tl.dot(query, tl.trans(key)) * (scale * TO_BASE_TWO), -1e30)
        highest = tl.maximum(summit, tl.max(score, 1))
        power = tl.exp2(score - highest[:, None])
        shrink = tl.exp2(summit - highest)
        total = total * shrink + tl.sum(power, 1)
        result = result * shrink[:, None] + tl.dot(power.to(value.dtype), value)
        summit = highest
    _write(
        mixed + (begin * n_heads + head) * width, result / total[:, None], first, length, n_heads * width, width, own
    )
    tl.store(log_totals + tl.cast(head, tl.int64) * tokens + begin + row, summit + tl.log2(total), mask=row < length)


@triton.jit
def _backward_kernel(
    heads,
    offsets,
    mixed,
    log_totals,
    gradient,
    result,
    tokens,
    scale,
    blocks,
    n_heads: tl.constexpr,
    width: tl.constexpr,
    causal: tl.constexpr,
    own: tl.constexpr,
    other: tl.constexpr,
):
    """Each program owns some queries, or some keys and values, or a whole sequence that fits into a tile."""
    sequence, head = tl.program_id(0) // n_heads, tl.program_id(0) % n_heads
    begin = tl.load(offsets + sequence).to(tl.int64)
    length = (tl.load(offsets + sequence + 1) - begin).to(tl.int32)
    owns_keys = tl.program_id(1) >= blocks
    first = (tl.program_id(1) % blocks) * own
    if first >= length:
        return
    if owns_keys and length <= own:
        return
    stride: tl.constexpr = 3 * n_heads * width
    narrow: tl.constexpr = n_heads * width
    queries = heads + begin * stride + head * width
    keys, values = queries + narrow, queries + 2 * narrow
    outputs = mixed + (begin * n_heads + head) * width
    incoming = gradient + (begin * n_heads + head) * width
    totals = log_totals + tl.cast(head, tl.int64) * tokens + begin
    to_queries = result + begin * stride + head * width
    to_keys, to_values = to_queries + narrow, to_queries + 2 * narrow
    row = first + tl.arange(0, own)
    if length <= own:
        query = _rows(queries, 0, length, stride, width, own)
        key = _rows(keys, 0, length, stride, width, own)
        value = _rows(values, 0, length, stride, width, own)
        output = _rows(outputs, 0, length, narrow, width, own)
        slope = _rows(incoming, 0, length, narrow, width, own)
        log_total = tl.load(totals + row, mask=row < length, other=0.0)
        seen = (row < length)[None, :]
        if causal:
            seen = seen & (row[None, :] <= row[:, None])
        score = tl.dot(query, tl.trans(key)) * (scale * TO_BASE_TWO)
        share = tl.where(seen, tl.exp2(score - log_total[:, None]), 0.0)
        _write(to_values, tl.dot(tl.trans(share.to(value.dtype)), slope), 0, length, stride, width, own)
        inner = tl.sum(output.to(tl.float32) * slope.to(tl.float32), 1)
        change = (share * (tl.dot(slope, tl.trans(value)) - inner[:, None])).to(value.dtype)
        _write(to_queries, tl.dot(change, key) * scale, 0, length, stride, width, own)
        _write(to_keys, tl.dot(tl.trans(change), query) * scale, 0, length, stride, width, own)
    elif owns_keys:
        key = _rows(keys, first, length, stride, width, own)
        value = _rows(values, first, length, stride, width, own)
        to_key = tl.zeros([own, width], tl.float32)
        to_value = tl.zeros([own, width], tl.float32)
        for start in range(first // other * other if causal else 0, length, other):
            query = _rows(queries, start, length, stride, width, other)
            output = _rows(outputs, start, length, narrow, width, other)
            slope = _rows(incoming, start, length, narrow, width, other)
            column = start + tl.arange(0, other)
            log_total = tl.load(totals + column, mask=column < length, other=0.0)
            # Beyond the end, queries and their gradients are zero, so they add nothing whatever their weight.
            share = tl.exp2(tl.dot(key, tl.trans(query)) * (scale * TO_BASE_TWO) - log_total[None, :])
            if causal:
                share = tl.where(row[:, None] <= column[None, :], share, 0.0)
            to_value += tl.dot(share.to(value.dtype), slope)
            inner = tl.sum(output.to(tl.float32) * slope.to(tl.float32), 1)
            change = share * (tl.dot(value, tl.trans(slope)) - inner[None, :])
            to_key += tl.dot(change.to(value.dtype), query)
        _write(to_keys, to_key * scale, first, length, stride, width, own)
        _write(to_values, to_value, first, length, stride, width, own)
    else:
        query = _rows(queries, first, length, stride, width, own)
        output = _rows(outputs, first, length, narrow, width, own)
        slope = _rows(incoming, first, length, narrow, width, own)
        log_total = tl.load(totals + row, mask=row < length, other=0.0)
        inner = tl.sum(output.to(tl.float32) * slope.to(tl.float32), 1)
        to_query = tl.zeros([own, width], tl.float32)
        for start in range(0, tl.minimum(length, first + own) if causal else length, other):
            key = _rows(keys, start, length, stride, width, other)
            value = _rows(values, start, length, stride, width, other)
            column = start + tl.arange(0, other)
            seen = (column < length)[None, :]
            if causal:
                seen = seen & (column[None, :] <= row[:, None])
            score = tl.dot(query, tl.trans(key)) * (scale * TO_BASE_TWO)
            share = tl.where(seen, tl.exp2(score - log_total[:, None]), 0.0)
            change = share * (tl.dot(slope, tl.trans(value)) - inner[:, None])
            to_query += tl.dot(change.to(value.dtype), key)
        _write(to_queries, to_query * scale, first, length, stride, width, own)


def attend(heads: Tensor, offsets: Tensor, max_length: int, causal: bool, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Return the mixed values, [tokens, heads, width], and the base-2 logarithms of the softmax's sums.

    Args:
        heads: Queries, keys and values, [tokens, 3, heads, width], contiguous; the width must be a power of two.
        offsets: Boundaries of the sequences, [sequences + 1], contiguous.
        max_length: No sequence is longer.
        causal: Whether a token sees only itself and those before it.
        tiles: How to tile the work.
    """
    tokens, _, n_heads, width = heads.shape
    mixed = heads.new_empty(tokens, n_heads, width)
    log_totals = heads.new_empty(n_heads, tokens, dtype=torch.float32)
    grid = ((offsets.size(0) - 1) * n_heads, triton.cdiv(max_length, tiles.own))
    if tokens and grid[0]:
        with torch.cuda.device(heads.device):
            _forward_kernel[grid](
                heads,
                offsets,
                mixed,
                log_totals,
                tokens,
                width**-0.5,
                n_heads=n_heads,
                width=width,
                causal=causal,
                own=tiles.own,
                other=tiles.other,
                num_warps=tiles.warps,
                num_stages=tiles.stages,
            )
    return mixed, log_totals


def attend_backward(
    gradient: Tensor,
    heads: Tensor,
    mixed: Tensor,
    log_totals: Tensor,
    offsets: Tensor,
    max_length: int,
    causal: bool,
    tiles: Tiles,
) -> Tensor:
    """Compute the gradient of `heads`, deterministically."""
    tokens, _, n_heads, width = heads.shape
    result = torch.empty_like(heads)
    blocks = triton.cdiv(max_length, tiles.own)
    # If all sequences fit into a tile, no program owns only keys.
    grid = ((offsets.size(0) - 1) * n_heads, blocks if blocks == 1 else 2 * blocks)
    if tokens and grid[0]:
        with torch.cuda.device(heads.device):
            _backward_kernel[grid](
                heads,
                offsets,
                mixed,
                log_totals,
                gradient,
                result,
                tokens,
                width**-0.5,
                blocks,
                n_heads=n_heads,
                width=width,
                causal=causal,
                own=tiles.own,
                other=tiles.other,
                num_warps=tiles.warps,
                num_stages=tiles.stages,
            )
    return result
