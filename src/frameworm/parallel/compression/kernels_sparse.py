"""The passes of top-k in triton; imported only if there are a GPU and triton.

A group is a column of the values laid out in rows of `columns`, an odd number: neighbouring threads take neighbouring
columns, and a program holds complete columns.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803 (in triton, compile-time constants are written in capitals)

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from frameworm.parallel.compression.kernels import on

VALUES_PER_PROGRAM = 4096
VALUES_PER_THREAD = 8
_FEWEST_COLUMNS = 32  # per program, one for each thread of a warp
_DECODED_COLUMNS = 256  # per program, one per thread


@triton.jit
def _index_pointer(payload, columns, WIDE: tl.constexpr):
    """Pointer to the indices, which follow the 16-bit values."""
    return (payload + columns.to(tl.int64) * 2).to(tl.pointer_type(tl.uint16 if WIDE else tl.uint8))


@triton.jit(do_not_specialize=("count", "columns", "padding"))
def _encode_kernel(values, residual, payload, count, columns, padding, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
                   WIDE: tl.constexpr, LONG: tl.constexpr, FEEDBACK: tl.constexpr):  # fmt: skip
    """Send the largest value of each column and keep the rest as residual."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    row = tl.arange(0, HEIGHT)
    inside = column < columns
    place = (row.to(tl.int64) if LONG else row)[:, None] * columns + column[None, :]
    there = inside[None, :] & (place < count)
    total = tl.load(values + place, mask=there, other=0.0).to(tl.float32)
    if FEEDBACK:
        total += tl.load(residual + place, mask=there, other=0.0)
    # As integers, absolute values keep their order, with infinity and then NaN at the top; the lowest bits hold the
    # row.
    magnitude = total.to(tl.int32, bitcast=True) & (0x7FFF0000 if WIDE else 0x7FFFFF00)
    key = tl.max(tl.where(there, magnitude | row[:, None], 0), 0)
    chosen = key & (0xFFFF if WIDE else 0xFF)
    bad = key >= 0x7F800000
    kept = there & (row[:, None] == chosen[None, :])
    bits = tl.sum(tl.where(kept, total.to(tl.int32, bitcast=True), 0), 0)
    # To bf16, half to even; values that would round to infinity become the largest finite number.
    rounded = ((bits & 0x7FFFFFFF) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where(bad, 0x7FC0, tl.minimum(rounded, 0x7F7F) | ((bits >> 16) & 0x8000))
    tl.store(payload.to(tl.pointer_type(tl.uint16)) + column, rounded.to(tl.uint16), mask=inside)
    index = _index_pointer(payload, columns, WIDE)
    tl.store(index + column, chosen.to(index.dtype.element_ty), mask=inside)
    if FEEDBACK:
        sent = (rounded << 16).to(tl.float32, bitcast=True)
        total = tl.where(kept, total - sent[None, :], total)
        tl.store(residual + place, total, mask=there & (bad == 0)[None, :])
    if tl.program_id(0) == 0:
        end = payload + columns.to(tl.int64) * (4 if WIDE else 3)
        tl.store(end + tl.arange(0, 4), tl.zeros([4], tl.uint8), mask=tl.arange(0, 4) < padding)


@triton.jit
def _kept(payload, column, inside, columns, WIDE: tl.constexpr):
    """The kept values as fp32, and their rows."""
    bits = tl.load(payload.to(tl.pointer_type(tl.uint16)) + column, mask=inside, other=0).to(tl.int32) << 16
    index = tl.load(_index_pointer(payload, columns, WIDE) + column, mask=inside, other=0).to(tl.int32)
    return bits.to(tl.float32, bitcast=True), index


@triton.jit(do_not_specialize=("count", "columns"))
def _decode_kernel(payload, out, count, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Write every value once: the one that was sent, or 0."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = column < columns
    value, index = _kept(payload, column, inside, columns, WIDE)
    bad = value != value
    place = column.to(tl.int64)
    for row in range(ROWS):
        written = tl.where(bad | (index == row), value, 0.0)
        tl.store(out + place, written.to(out.dtype.element_ty), mask=inside & (place < count))
        place += columns


@triton.jit(do_not_specialize=("count", "columns"))
def _decode_add_kernel(payload, total, count, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Add the sent values at their places, which are all different."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = column < columns
    value, index = _kept(payload, column, inside, columns, WIDE)
    place = index.to(tl.int64) * columns + column
    there = inside & (place < count)
    tl.store(total + place, tl.load(total + place, mask=there, other=0.0) + value, mask=there)
    bad = inside & (value != value)
    if tl.max(bad.to(tl.int32), 0) > 0:
        place = column.to(tl.int64)
        for _ in range(ROWS):
            tl.store(total + place, value, mask=bad & (place < count))
            place += columns


def encode(values: Tensor, payload: Tensor, residual: Tensor | None, block: int, columns: int) -> None:
    """`TopK.encode` in one pass."""
    count = values.numel()
    if not count:
        return
    wide = block > 256
    height = triton.next_power_of_2(min(block, triton.cdiv(count, columns)))
    width = min(1024, max(_FEWEST_COLUMNS, VALUES_PER_PROGRAM // height))
    warps = max(1, min(16, width * height // (32 * VALUES_PER_THREAD)))
    old = values if residual is None else residual
    with on(values.device):
        _encode_kernel[(triton.cdiv(columns, width),)](
            values, old, payload, count, columns, payload.numel() - columns * (4 if wide else 3), HEIGHT=height,
            WIDTH=width, WIDE=wide, LONG=height * (columns + width) >= 2**31,
            FEEDBACK=residual is not None, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip


def decode(payload: Tensor, out: Tensor, block: int, columns: int, add: bool = False) -> None:
    """`TopK.decode` and, with `add`, `decode_add`."""
    count = out.numel()
    if not count:
        return
    kernel = _decode_add_kernel if add else _decode_kernel
    with on(out.device):
        kernel[(triton.cdiv(columns, _DECODED_COLUMNS),)](
            payload, out, count, columns, ROWS=block, WIDTH=_DECODED_COLUMNS, WIDE=block > 256,
            num_warps=_DECODED_COLUMNS // 32, enable_fp_fusion=False,
        )  # fmt: skip
