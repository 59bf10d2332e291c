"""The codecs' passes in triton, one kernel each; imported only if there are a GPU and triton.

A quantisation block is held as two halves, as it is packed: value j and value j + half of a block share a byte in int4,
and with either width no value has to move to another thread. Products and sums are never contracted, and divisions
round correctly, so that results are bitwise equal to the plain torch path.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803, N806 (in triton, compile-time constants are written in capitals)

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

# Eight values per thread: few registers, so that many programs share a multiprocessor.
VALUES_PER_PROGRAM = 2048
WARPS = 8


@triton.jit
def _places(ROWS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of the first half of each block of a tile; four per thread for any dtype."""
    return tl.max_contiguous(tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, HALF)[None, :], (1, 4))


@triton.jit
def _read(pointer, place, left, WHOLE: tl.constexpr):
    """Elements as fp32, 0 beyond the end."""
    if WHOLE:
        return tl.load(pointer + place).to(tl.float32)
    return tl.load(pointer + place, mask=place < left, other=0.0).to(tl.float32)


@triton.jit
def _write(pointer, values, place, left, WHOLE: tl.constexpr):
    """Store elements in the pointer's dtype."""
    values = values.to(pointer.dtype.element_ty)
    if WHOLE:
        tl.store(pointer + place, values)
    else:
        tl.store(pointer + place, values, mask=place < left)


@triton.jit
def _packed_pointer(payload, first, BYTES: tl.constexpr):
    """The bytes of block number `first`; payloads are multiples of four bytes long."""
    return tl.multiple_of((payload + first * BYTES).to(tl.pointer_type(tl.int8)), 4)


@triton.jit
def _step_pointers(payload, first, blocks, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """Pointers to the steps of the blocks starting at `first`; steps follow the bytes of all blocks."""
    base = (payload + blocks.to(tl.int64) * BYTES).to(tl.pointer_type(tl.float32))
    return base + first + tl.arange(0, ROWS)


@triton.jit
def _decoded(payload, first, blocks, FACTOR: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
             ROWS: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Both halves of a tile as fp32, with the steps multiplied by a factor."""
    HALF: tl.constexpr = BLOCK // 2
    BYTES: tl.constexpr = BLOCK * BITS // 8
    pointer = _packed_pointer(payload, first, BYTES) + _places(ROWS, HALF, BYTES)
    steps = _step_pointers(payload, first, blocks, ROWS, BYTES)
    if WHOLE:
        step = tl.load(steps)[:, None]
        low = tl.load(pointer).to(tl.int32)
        if BITS == 8:
            high = tl.load(pointer + HALF).to(tl.int32)
    else:
        there = first + tl.arange(0, ROWS) < blocks
        step = tl.load(steps, mask=there, other=0.0)[:, None]
        low = tl.load(pointer, mask=there[:, None], other=0).to(tl.int32)
        if BITS == 8:
            high = tl.load(pointer + HALF, mask=there[:, None], other=0).to(tl.int32)
    if BITS == 4:
        high = (low + 8) >> 4
        low -= high * 16
    step *= FACTOR
    return low.to(tl.float32) * step, high.to(tl.float32) * step


@triton.jit
def _rounded(values, raised, inverse, noise, LIMIT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Round values to whole numbers of steps."""
    quotient = (values * raised) * inverse
    if STOCHASTIC:
        quotient = tl.floor(quotient + noise)
    else:
        # Adding 1.5 * 2 ** 23 leaves no bits for a fraction: this rounds half to even, as torch does.
        quotient = (quotient + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(quotient, -LIMIT), LIMIT)


@triton.jit
def _quantised(low, high, seed, first, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
               STOCHASTIC: tl.constexpr):  # fmt: skip
    """Whole numbers of steps for both halves, the steps, and a mask of blocks with non-finite values."""
    HALF: tl.constexpr = BLOCK // 2
    LIMIT: tl.constexpr = 127.0 if BITS == 8 else 7.0
    # As integers, absolute values keep their order, with infinity and then NaN at the top.
    largest = tl.maximum(
        tl.max(low.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), tl.max(high.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    )
    bad = (largest >= 0x7F800000)[:, None]
    step = tl.div_rn(largest.to(tl.float32, bitcast=True)[:, None], tl.full([ROWS, 1], LIMIT, tl.float32))
    empty = bad | (step < 1e-42)
    # Where 1 / step would be infinite, values and step are first multiplied by 2 ** 64, which is exact.
    raised = tl.where(step < 1e-37, 18446744073709551616.0, 1.0)
    inverse = tl.div_rn(tl.full([ROWS, 1], 1.0, tl.float32), tl.where(empty, 1.0, step * raised))
    low_noise, high_noise = low, high
    if STOCHASTIC:
        # One draw gives sixteen bits for each half.
        number = (first * HALF + tl.arange(0, ROWS)[:, None] * HALF + tl.arange(0, HALF)[None, :]).to(tl.uint32)
        drawn = tl.randint(tl.load(seed), number)
        low_noise = (drawn & 0xFFFF).to(tl.float32) * (1 / 65536) + 1 / 131072
        high_noise = ((drawn >> 16) & 0xFFFF).to(tl.float32) * (1 / 65536) + 1 / 131072
    low = tl.where(empty, 0.0, _rounded(low, raised, inverse, low_noise, LIMIT, STOCHASTIC))
    high = tl.where(empty, 0.0, _rounded(high, raised, inverse, high_noise, LIMIT, STOCHASTIC))
    return low, high, tl.where(bad, float("nan"), tl.where(empty, 0.0, step)), bad


@triton.jit
def _store_payload(payload, low, high, step, first, blocks, BITS: tl.constexpr, BLOCK: tl.constexpr,
                   ROWS: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Store the bytes and steps of a tile."""
    HALF: tl.constexpr = BLOCK // 2
    BYTES: tl.constexpr = BLOCK * BITS // 8
    pointer = _packed_pointer(payload, first, BYTES) + _places(ROWS, HALF, BYTES)
    steps = _step_pointers(payload, first, blocks, ROWS, BYTES)[:, None]
    if BITS == 4:
        low += high * 16
    if WHOLE:
        tl.store(steps, step)
        tl.store(pointer, low.to(tl.int8))
        if BITS == 8:
            tl.store(pointer + HALF, high.to(tl.int8))
    else:
        there = (first + tl.arange(0, ROWS) < blocks)[:, None]
        tl.store(steps, step, mask=there)
        tl.store(pointer, low.to(tl.int8), mask=there)
        if BITS == 8:
            tl.store(pointer + HALF, high.to(tl.int8), mask=there)


@triton.jit
def _encode_tile(values, residual, payload, seed, first, left, blocks, BITS: tl.constexpr, BLOCK: tl.constexpr,
                 ROWS: tl.constexpr, FEEDBACK: tl.constexpr, STOCHASTIC: tl.constexpr,
                 WHOLE: tl.constexpr):  # fmt: skip
    """Encode values plus residual, and store the error as the new residual."""
    HALF: tl.constexpr = BLOCK // 2
    place = _places(ROWS, HALF, BLOCK)
    low = _read(values, place, left, WHOLE)
    high = _read(values, place + HALF, left, WHOLE)
    old_low, old_high = low, high
    if FEEDBACK:
        old_low = _read(residual, place, left, WHOLE)
        old_high = _read(residual, place + HALF, left, WHOLE)
        low += old_low
        high += old_high
    low_steps, high_steps, step, bad = _quantised(low, high, seed, first, BITS, BLOCK, ROWS, STOCHASTIC)
    _store_payload(payload, low_steps, high_steps, step, first, blocks, BITS, BLOCK, ROWS, WHOLE)
    if FEEDBACK:
        _write(residual, tl.where(bad, old_low, low - low_steps * step), place, left, WHOLE)
        _write(residual, tl.where(bad, old_high, high - high_steps * step), place + HALF, left, WHOLE)


@triton.jit(do_not_specialize=("count", "blocks"))
def _encode_kernel(values, residual, payload, seed, count, blocks, BITS: tl.constexpr, BLOCK: tl.constexpr,
                   ROWS: tl.constexpr, FEEDBACK: tl.constexpr, STOCHASTIC: tl.constexpr):  # fmt: skip
    """Encode some blocks; without a mask if the tile is full, so that loads are 128 bits wide."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    start = first * BLOCK
    left = count - start
    if left >= ROWS * BLOCK:
        _encode_tile(values + start, residual + start, payload, seed, first, left, blocks, BITS, BLOCK, ROWS,
                     FEEDBACK, STOCHASTIC, WHOLE=True)  # fmt: skip
    else:
        _encode_tile(values + start, residual + start, payload, seed, first, left, blocks, BITS, BLOCK, ROWS,
                     FEEDBACK, STOCHASTIC, WHOLE=False)  # fmt: skip


@triton.jit
def _reduce_tile(payloads, residual, payload, seed, first, left, blocks, row_bytes, WORLD: tl.constexpr,
                 BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FEEDBACK: tl.constexpr,
                 STOCHASTIC: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Encode the mean of all ranks' tiles."""
    HALF: tl.constexpr = BLOCK // 2
    SHARE: tl.constexpr = 1.0 / WORLD
    low, high = _decoded(payloads, first, blocks, SHARE, BITS, BLOCK, ROWS, WHOLE)
    for rank in tl.static_range(1, WORLD):
        more_low, more_high = _decoded(payloads + rank * row_bytes, first, blocks, SHARE, BITS, BLOCK, ROWS, WHOLE)
        low += more_low
        high += more_high
    low_steps, high_steps, step, bad = _quantised(low, high, seed, first, BITS, BLOCK, ROWS, STOCHASTIC)
    _store_payload(payload, low_steps, high_steps, step, first, blocks, BITS, BLOCK, ROWS, WHOLE)
    if FEEDBACK:
        place = _places(ROWS, HALF, BLOCK)
        old_low = _read(residual, place, left, WHOLE)
        old_high = _read(residual, place + HALF, left, WHOLE)
        new_low = old_low + (low - low_steps * step) * WORLD
        new_high = old_high + (high - high_steps * step) * WORLD
        _write(residual, tl.where(bad, old_low, new_low), place, left, WHOLE)
        _write(residual, tl.where(bad, old_high, new_high), place + HALF, left, WHOLE)


@triton.jit(do_not_specialize=("count", "blocks", "row_bytes"))
def _reduce_kernel(payloads, residual, payload, seed, count, blocks, row_bytes, WORLD: tl.constexpr,
                   BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FEEDBACK: tl.constexpr,
                   STOCHASTIC: tl.constexpr):  # fmt: skip
    """Reduce some blocks of all ranks."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    start = first * BLOCK
    left = count - start
    row_bytes = row_bytes.to(tl.int64)
    if left >= ROWS * BLOCK:
        _reduce_tile(payloads, residual + start, payload, seed, first, left, blocks, row_bytes, WORLD, BITS, BLOCK,
                     ROWS, FEEDBACK, STOCHASTIC, WHOLE=True)  # fmt: skip
    else:
        _reduce_tile(payloads, residual + start, payload, seed, first, left, blocks, row_bytes, WORLD, BITS, BLOCK,
                     ROWS, FEEDBACK, STOCHASTIC, WHOLE=False)  # fmt: skip


@triton.jit
def _decode_tile(payload, out, first, left, blocks, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                 ADD: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Decode the bytes of a tile into values."""
    HALF: tl.constexpr = BLOCK // 2
    place = _places(ROWS, HALF, BLOCK)
    low, high = _decoded(payload, first, blocks, 1.0, BITS, BLOCK, ROWS, WHOLE)
    if ADD:
        low = _read(out, place, left, WHOLE) + low
        high = _read(out, place + HALF, left, WHOLE) + high
    _write(out, low, place, left, WHOLE)
    _write(out, high, place + HALF, left, WHOLE)


@triton.jit(do_not_specialize=("count", "blocks"))
def _decode_kernel(payload, out, count, blocks, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
                   ADD: tl.constexpr):  # fmt: skip
    """Decode some blocks."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    start = first * BLOCK
    left = count - start
    if left >= ROWS * BLOCK:
        _decode_tile(payload, out + start, first, left, blocks, BITS, BLOCK, ROWS, ADD, WHOLE=True)
    else:
        _decode_tile(payload, out + start, first, left, blocks, BITS, BLOCK, ROWS, ADD, WHOLE=False)


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Launch on this device; a no-op on the CPU, where triton only interprets."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _launch(
    kernel: Any, arguments: tuple[Any, ...], device: torch.device, blocks: int, block: int, **settings: Any
) -> None:
    """Launch one program per `VALUES_PER_PROGRAM` values, on the device of the values."""
    rows = max(1, VALUES_PER_PROGRAM // block)
    with on(device):
        kernel[(triton.cdiv(blocks, rows),)](
            *arguments, BLOCK=block, ROWS=rows, **settings, num_warps=WARPS, enable_fp_fusion=False
        )


def seed_from(draw: torch.Generator | None, device: torch.device) -> Tensor:
    """Draw a seed as a tensor on the device, without waiting for it; None: torch's default generator there.

    A host generator's number is the argument of a fill, so in a CUDA graph it stays what it was at capture; a device
    generator is drawn from in every replay, if it is registered with the graph.
    """
    if draw is None:
        return torch.randint(2**31, (1,), device=device)
    if draw.device.type == device.type:
        return torch.randint(2**31, (1,), generator=draw, device=device)
    number = int(torch.randint(2**31, (1,), generator=draw, device=draw.device))
    return torch.full((1,), number, dtype=torch.int64, device=device)


def encode(
    values: Tensor, payload: Tensor, residual: Tensor | None, bits: int, block: int, seed: Tensor | None
) -> None:
    """`Quantizer.encode` in one pass; `seed`, one int64 on the device, is for stochastic rounding."""
    count = values.numel()
    if count:
        blocks = triton.cdiv(count, block)
        _launch(
            _encode_kernel,
            (values, values if residual is None else residual, payload, payload if seed is None else seed, count,
             blocks),
            values.device, blocks, block, BITS=bits, FEEDBACK=residual is not None, STOCHASTIC=seed is not None,
        )  # fmt: skip


def reduce_mean(payloads: Tensor, payload: Tensor, count: int, residual: Tensor | None, bits: int, block: int,
                seed: Tensor | None) -> None:  # fmt: skip
    """`Quantizer.reduce_mean` in one pass."""
    if count:
        blocks = triton.cdiv(count, block)
        _launch(
            _reduce_kernel,
            (payloads, payload if residual is None else residual, payload, payload if seed is None else seed, count,
             blocks, payloads.stride(0)),
            payload.device, blocks, block, WORLD=payloads.size(0), BITS=bits, FEEDBACK=residual is not None,
            STOCHASTIC=seed is not None,
        )  # fmt: skip


def decode(payload: Tensor, out: Tensor, bits: int, block: int, add: bool = False) -> None:
    """`Quantizer.decode` and, with `add`, `decode_add`."""
    count = out.numel()
    if count:
        blocks = triton.cdiv(count, block)
        _launch(_decode_kernel, (payload, out, count, blocks), out.device, blocks, block, BITS=bits, ADD=add)


def try_out(device: torch.device) -> None:
    """Compile and launch one kernel; raises triton's error if that fails."""
    decode(torch.zeros(260, dtype=torch.uint8, device=device), torch.empty(256, device=device), 8, 256)
