"""Triton kernels of causal attention over sequences of one length; imported only where there is a GPU and triton.

Queries, keys and values are read, and their gradients written, in place in one interleaved tensor, so nothing is copied
around a matrix product. Backward is two kernels, one for the gradients of queries and one for those of keys and values:
they compute the scores twice and need no atomic sums. Each also writes the column sums of its gradients, which are the
gradient of the bias added before.

The programs of one head run side by side, so that they find its keys and values in the cache. Tiles are loaded and
stored through tensor descriptors, [tokens, columns], for which a Hopper GPU needs no address computation by its
threads; that and a register limit, which lets more programs run concurrently, leave more of the GPU's power for the
products.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor
from triton.tools.tensor_descriptor import (  # type: ignore[import-not-found, import-untyped, unused-ignore]
    TensorDescriptor,
)

from frameworm.models.kernels.attention import TO_BASE_TWO, Tiles


@triton.jit
def _mix(
    query, row, heads, token, to_keys, to_values, begin, end, scale,
    other: tl.constexpr, cut: tl.constexpr, summit, total, result,
):  # fmt: skip
    """Process the keys from `begin` to `end`; `cut` if some of them must be masked."""
    for start in range(begin, end, other):
        score = tl.dot(query, tl.trans(heads.load([token + start, to_keys])))
        if cut:
            score = tl.where(start + tl.arange(0, other)[None, :] <= row[:, None], score, -1e30)
        highest = tl.maximum(summit, tl.max(score, 1) * scale)
        power = tl.exp2(score * scale - highest[:, None])
        shrink = tl.exp2(summit - highest)
        total = total * shrink + tl.sum(power, 1)
        value = heads.load([token + start, to_values])
        result = tl.dot(power.to(value.dtype), value, result * shrink[:, None])
        summit = highest
    return summit, total, result


@triton.jit
def _forward_kernel(
    own_heads, heads, mixed, log_totals, length, scale,
    n_heads: tl.constexpr, width: tl.constexpr, own: tl.constexpr, other: tl.constexpr,
):  # fmt: skip
    """Each program owns some queries of one head of one sequence and processes the keys; longest programs first."""
    blocks = length // own
    one = tl.program_id(0) // blocks
    first = (blocks - 1 - tl.program_id(0) % blocks) * own
    token, column = one // n_heads * length, one % n_heads * width
    to_keys, to_values = column + n_heads * width, column + 2 * n_heads * width
    query = own_heads.load([token + first, column])
    row = first + tl.arange(0, own)
    summit = tl.full([own], -1e30, tl.float32)
    total = tl.zeros([own], tl.float32)
    result = tl.zeros([own, width], tl.float32)
    power_scale = scale * TO_BASE_TWO
    whole = first // other * other
    summit, total, result = _mix(
        query, row, heads, token, to_keys, to_values, 0, whole, power_scale, other, False, summit, total, result
    )
    summit, total, result = _mix(
        query, row, heads, token, to_keys, to_values, whole, first + own, power_scale, other, True,
        summit, total, result,
    )  # fmt: skip
    mixed.store([token + first, column], (result / total[:, None]).to(query.dtype))
    tl.store(log_totals + one.to(tl.int64) * length + row, summit + tl.log2(total))


@triton.jit
def _to_query(
    query, slope, inner, log_total, row, heads, token, to_keys, to_values, begin, end, scale,
    other: tl.constexpr, cut: tl.constexpr, result,
):  # fmt: skip
    """Accumulate the contribution of the keys from `begin` to `end` to the gradient of the owned queries."""
    for start in range(begin, end, other):
        key = heads.load([token + start, to_keys])
        value = heads.load([token + start, to_values])
        share = tl.exp2(tl.dot(query, tl.trans(key)) * scale - log_total[:, None])
        if cut:
            share = tl.where(start + tl.arange(0, other)[None, :] <= row[:, None], share, 0.0)
        change = share * (tl.dot(slope, tl.trans(value)) - inner[:, None])
        result = tl.dot(change.to(value.dtype), key, result)
    return result


@triton.jit
def _queries_kernel(
    own_heads, heads, mixed, log_totals, gradient, inners, result, sums, length, scale,
    n_heads: tl.constexpr, width: tl.constexpr, own: tl.constexpr, other: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries, and the products of outputs and gradients that the other kernel needs."""
    blocks = length // own
    one = tl.program_id(0) // blocks
    block = blocks - 1 - tl.program_id(0) % blocks
    sequence, column = one // n_heads, one % n_heads * width
    first, token = block * own, sequence * length
    to_keys, to_values = column + n_heads * width, column + 2 * n_heads * width
    query = own_heads.load([token + first, column])
    output = mixed.load([token + first, column])
    slope = gradient.load([token + first, column])
    row = first + tl.arange(0, own)
    log_total = tl.load(log_totals + one.to(tl.int64) * length + row)
    inner = tl.sum(output.to(tl.float32) * slope.to(tl.float32), 1)
    tl.store(inners + one.to(tl.int64) * length + row, inner)
    power_scale = scale * TO_BASE_TWO
    to_query = tl.zeros([own, width], tl.float32)
    whole = first // other * other
    to_query = _to_query(
        query, slope, inner, log_total, row, heads, token, to_keys, to_values, 0, whole, power_scale, other, False,
        to_query,
    )  # fmt: skip
    to_query = _to_query(
        query, slope, inner, log_total, row, heads, token, to_keys, to_values, whole, first + own, power_scale,
        other, True, to_query,
    )  # fmt: skip
    to_query *= scale
    result.store([token + first, column], to_query.to(query.dtype))
    place = sums + (sequence * blocks + block).to(tl.int64) * n_heads * width + column
    tl.store(place + tl.arange(0, width), tl.sum(to_query, 0))


@triton.jit
def _to_key_and_value(
    key, value, row, heads, gradient, token, to_queries, totals, inners, begin, end, scale,
    other: tl.constexpr, cut: tl.constexpr, to_key, to_value,
):  # fmt: skip
    """Accumulate the contribution of queries from `begin` to `end` to the gradients of the owned keys and values."""
    for start in range(begin, end, other):
        column = start + tl.arange(0, other)
        query = heads.load([token + start, to_queries])
        slope = gradient.load([token + start, to_queries])
        share = tl.exp2(tl.dot(key, tl.trans(query)) * scale - tl.load(totals + column)[None, :])
        if cut:
            share = tl.where(row[:, None] <= column[None, :], share, 0.0)
        to_value = tl.dot(share.to(value.dtype), slope, to_value)
        change = share * (tl.dot(value, tl.trans(slope)) - tl.load(inners + column)[None, :])
        to_key = tl.dot(change.to(value.dtype), query, to_key)
    return to_key, to_value


@triton.jit
def _keys_kernel(
    own_heads, heads, log_totals, gradient, inners, result, sums, length, scale,
    n_heads: tl.constexpr, width: tl.constexpr, own: tl.constexpr, other: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values."""
    blocks = length // own
    one, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    sequence, column = one // n_heads, one % n_heads * width
    first, token = block * own, sequence * length
    narrow: tl.constexpr = n_heads * width
    totals, inners = log_totals + one.to(tl.int64) * length, inners + one.to(tl.int64) * length
    key = own_heads.load([token + first, column + narrow])
    value = own_heads.load([token + first, column + 2 * narrow])
    row = first + tl.arange(0, own)
    power_scale = scale * TO_BASE_TWO
    to_key = tl.zeros([own, width], tl.float32)
    to_value = tl.zeros([own, width], tl.float32)
    whole = tl.cdiv(first + own, other) * other
    to_key, to_value = _to_key_and_value(
        key, value, row, heads, gradient, token, column, totals, inners, first // other * other, whole, power_scale,
        other, True, to_key, to_value,
    )  # fmt: skip
    to_key, to_value = _to_key_and_value(
        key, value, row, heads, gradient, token, column, totals, inners, whole, length, power_scale,
        other, False, to_key, to_value,
    )  # fmt: skip
    to_key *= scale
    result.store([token + first, column + narrow], to_key.to(key.dtype))
    result.store([token + first, column + 2 * narrow], to_value.to(key.dtype))
    place = sums + (sequence * blocks + block).to(tl.int64) * 2 * narrow + column + tl.arange(0, width)
    tl.store(place, tl.sum(to_key, 0))
    tl.store(place + narrow, tl.sum(to_value, 0))


def attend(heads: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Return the mixed values, [sequences, length, heads, width], and the base-2 logarithms of the softmax's sums.

    Args:
        heads: Queries, keys and values, [sequences, length, 3, heads, width], contiguous; the length must be a multiple
            of the tiles, the width a power of two.
        tiles: How to tile the work.
    """
    sequences, length, _, n_heads, width = heads.shape
    mixed = heads.new_empty(sequences, length, n_heads, width)
    log_totals = heads.new_empty(sequences, n_heads, length, dtype=torch.float32)
    if heads.numel():
        with torch.cuda.device(heads.device):
            _forward_kernel[(sequences * n_heads * (length // tiles.own),)](
                _tiled(heads, tiles.own), _tiled(heads, tiles.other), _tiled(mixed, tiles.own), log_totals, length,
                width**-0.5, **_cut(n_heads, width, tiles),
            )  # fmt: skip
    return mixed, log_totals


def attend_backward(
    gradient: Tensor, heads: Tensor, mixed: Tensor, log_totals: Tensor, for_queries: Tiles, for_keys: Tiles
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradient of `heads` and the sums of its columns, deterministically.

    Returns:
        The gradient; sums for the queries, [parts, 1, heads, width], and for keys and values, [parts, 2, heads, width],
        both in fp32 with one part per tile of rows.
    """
    sequences, length, _, n_heads, width = heads.shape
    result, inners = torch.empty_like(heads), torch.empty_like(log_totals)
    parts = [sequences * (length // tiles.own) for tiles in (for_queries, for_keys)]
    query_sums = log_totals.new_empty(parts[0], 1, n_heads, width)
    other_sums = log_totals.new_empty(parts[1], 2, n_heads, width)
    scale = width**-0.5
    if not heads.numel():
        return result, query_sums, other_sums
    with torch.cuda.device(heads.device):
        own, other = for_queries.own, for_queries.other
        _queries_kernel[(parts[0] * n_heads,)](
            _tiled(heads, own), _tiled(heads, other), _tiled(mixed, own), log_totals, _tiled(gradient, own), inners,
            _tiled(result, own), query_sums, length, scale, **_cut(n_heads, width, for_queries),
        )  # fmt: skip
        own, other = for_keys.own, for_keys.other
        _keys_kernel[(parts[1] * n_heads,)](
            _tiled(heads, own), _tiled(heads, other), log_totals, _tiled(gradient, other), inners,
            _tiled(result, own), other_sums, length, scale, **_cut(n_heads, width, for_keys),
        )  # fmt: skip
    return result, query_sums, other_sums


def _tiled(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Describe the tensor as [tokens, columns], accessed by tiles of `rows` tokens of one head."""
    columns = tensor[0, 0].numel()
    return TensorDescriptor(tensor, [tensor.numel() // columns, columns], [columns, 1], [rows, tensor.size(-1)])


def _cut(n_heads: int, width: int, tiles: Tiles) -> dict[str, int | None]:
    return {
        "n_heads": n_heads,
        "width": width,
        "own": tiles.own,
        "other": tiles.other,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "maxnreg": tiles.registers,
    }
