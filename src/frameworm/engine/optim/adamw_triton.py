"""Triton kernels of the one-pass update and of gathering gradients; imported only where there is a GPU and triton."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803 (triton writes compile-time constants in capitals)

from __future__ import annotations

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

# A gradient is passed as its address + 1, negated for bf16. Such a number is odd and large, so triton compiles no
# variant for its alignment: no new variant can be loaded during CUDA graph capture. No number is specialised for the
# same reason.
#
# Columns of a tensor's row in `rows`: 0 parameter, 1 exp_avg, 2 exp_avg_sq, 3 step, 4 learning rate (addresses);
# 5 elements; 6 first block of the norm, 7 first block of the update; 8 address of the weight in bf16, 0 for none.


@triton.jit(do_not_specialize=("factor", "first_tensor", "first_block"))
def sum_squares(
    gradients,
    rows,
    owners,
    addresses,
    partials,
    factor,
    first_tensor,
    first_block,
    COUNT: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of a gradient; a tensor's first program stores its address for the update."""
    block = first_block + tl.program_id(0)
    owner = tl.load(owners + block)
    coded = tl.cast(0, tl.int64)
    for index in tl.static_range(COUNT):
        coded += tl.where(owner == first_tensor + index, gradients[index], 0)
    number = block - tl.load(rows + owner * 9 + 6)
    if number == 0:
        tl.store(addresses + owner, coded)
    half = coded < 0
    address = tl.abs(coded) - 1
    start = number.to(tl.int64) * BLOCK
    left = tl.load(rows + owner * 9 + 5) - start
    scale = tl.load(factor).to(tl.float32) if FACTOR else 1.0
    # Unmasked loads from an address known to be aligned are 128 bits wide.
    if (left >= BLOCK) & (address % 16 == 0):
        total = _block_squares(address, start, left, scale, half, WHOLE=True, FACTOR=FACTOR, BLOCK=BLOCK)
    else:
        total = _block_squares(address, start, left, scale, half, WHOLE=False, FACTOR=FACTOR, BLOCK=BLOCK)
    tl.store(partials + block, total)


@triton.jit(do_not_specialize=("share", "first_tensor", "first_block"))
def gather(gradients, rows, owners, share, first_tensor, first_block, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy each gradient, times `share`, to its place in one tensor; one program per block.

    Columns of `rows`: 0 address of the place, 1 elements, 2 first block.
    """
    block = first_block + tl.program_id(0)
    owner = tl.load(owners + block)
    coded = tl.cast(0, tl.int64)
    for index in tl.static_range(COUNT):
        coded += tl.where(owner == first_tensor + index, gradients[index], 0)
    half = coded < 0
    address = tl.abs(coded) - 1
    row = rows + owner * 3
    start = (block - tl.load(row + 2)).to(tl.int64) * BLOCK
    place = tl.load(row) + start * 4
    left = tl.load(row + 1) - start
    lanes = tl.arange(0, BLOCK)
    if (left >= BLOCK) & ((address | place) % 16 == 0):
        _write(place, _read_either(address, start, lanes, left, half, WHOLE=True) * share, lanes, left, WHOLE=True)
    else:
        _write(place, _read_either(address, start, lanes, left, half, WHOLE=False) * share, lanes, left, WHOLE=False)


@triton.jit
def _block_squares(address, start, left, scale, half, WHOLE: tl.constexpr, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of the squares of one block."""
    lanes = tl.arange(0, BLOCK)
    values = _read_either(address, start, lanes, left, half, WHOLE)
    if FACTOR:
        values *= scale
    return tl.sum(values * values, 0)


@triton.jit
def _pointers(address, lanes, WHOLE: tl.constexpr, HALF: tl.constexpr = False):
    """Pointers to the fp32 or bf16 elements of a block; those of a whole block are aligned to 16 bytes."""
    base = address.to(tl.pointer_type(tl.bfloat16 if HALF else tl.float32))
    if WHOLE:
        base = tl.multiple_of(base, 16)
    return base + lanes


@triton.jit
def _read_either(address, start, lanes, left, half, WHOLE: tl.constexpr):
    """Load a block that begins `start` elements after an address (bf16 if `half`) as fp32."""
    if half:
        values = _read(address + start * 2, lanes, left, WHOLE, HALF=True).to(tl.float32)
    else:
        values = _read(address + start * 4, lanes, left, WHOLE)
    return values


@triton.jit
def _read(address, lanes, left, WHOLE: tl.constexpr, HALF: tl.constexpr = False):
    """Load the elements of a block, 0 beyond its end."""
    if WHOLE:
        return tl.load(_pointers(address, lanes, WHOLE, HALF))
    return tl.load(_pointers(address, lanes, WHOLE, HALF), mask=lanes < left, other=0.0)


@triton.jit
def _write(address, values, lanes, left, WHOLE: tl.constexpr, HALF: tl.constexpr = False):
    """Store the elements of a block."""
    if WHOLE:
        tl.store(_pointers(address, lanes, WHOLE, HALF), values)
    else:
        tl.store(_pointers(address, lanes, WHOLE, HALF), values, mask=lanes < left)


@triton.jit(do_not_specialize=("first_tensor",))
def note_addresses(gradients, addresses, first_tensor, COUNT: tl.constexpr):
    """Store the gradients' addresses for the update when no norm is computed."""
    for index in tl.static_range(COUNT):
        tl.store(addresses + first_tensor + index, gradients[index])


@triton.jit(do_not_specialize=("blocks", "tensors"))
def settle(
    partials,
    rows,
    constants,
    scalars,
    outcome,
    clip_norm,
    blocks,
    tensors,
    NORM: tl.constexpr,
    SKIP: tl.constexpr,
):
    """One program: norm, clipping coefficient, whether to skip; then step count and scalars of each tensor."""
    counted = 1.0
    if NORM:
        lanes = tl.arange(0, 1024)
        sums = tl.zeros([1024], tl.float64)
        for start in range(0, blocks, 1024):
            sums += tl.load(partials + start + lanes, mask=start + lanes < blocks, other=0.0).to(tl.float64)
        norm = tl.sqrt_rn(tl.sum(sums, 0).to(tl.float32))
        coefficient = clip_norm * tl.div_rn(tl.cast(1.0, tl.float32), norm + 1e-6)
        # Not minimum(): a NaN coefficient must stay NaN.
        tl.store(outcome + 2, tl.where(coefficient > 1.0, 1.0, coefficient))
        tl.store(outcome, norm)
        if SKIP:
            counted = tl.where(norm < float("inf"), 1.0, 0.0)
            tl.store(outcome + 1, 1.0 - counted)
    for first in range(0, tensors, 128):
        number = first + tl.arange(0, 128)
        there = number < tensors
        row = rows + number * 9
        step_pointers = tl.load(row + 3, mask=there, other=0).to(tl.pointer_type(tl.float32))
        step = tl.load(step_pointers, mask=there, other=1.0) + counted
        tl.store(step_pointers, step, mask=there)
        rate_pointers = tl.load(row + 4, mask=there, other=0).to(tl.pointer_type(tl.float32))
        rate = tl.load(rate_pointers, mask=there, other=0.0).to(tl.float64)
        constant = constants + number * 6
        # 1 - beta ** step loses precision in fp32 when beta is close to 1. A skipped first step is not counted.
        count = tl.maximum(step, 1.0).to(tl.float64)
        correction1 = 1.0 - tl.exp(count * tl.load(constant, mask=there, other=-1.0))
        correction2 = 1.0 - tl.exp(count * tl.load(constant + 1, mask=there, other=-1.0))
        decay = tl.load(constant + 5, mask=there, other=0.0)
        scalar = scalars + number * 8
        tl.store(scalar, (rate / correction1).to(tl.float32), mask=there)
        tl.store(scalar + 1, tl.sqrt_rn((1.0 / correction2).to(tl.float32)), mask=there)
        tl.store(scalar + 2, (rate * decay).to(tl.float32), mask=there)
        for index in tl.static_range(3):
            value = tl.load(constant + 2 + index, mask=there, other=0.0)
            tl.store(scalar + 3 + index, value.to(tl.float32), mask=there)


@triton.jit(do_not_specialize=("factor",))
def update(
    rows,
    owners,
    addresses,
    scalars,
    outcome,
    factor,
    NORM: tl.constexpr,
    SKIP: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update the parameters, one program per block."""
    block = tl.program_id(0)
    owner = tl.load(owners + block)
    row = rows + owner * 9
    start = (block - tl.load(row + 7)).to(tl.int64) * BLOCK
    left = tl.load(row + 5) - start
    if SKIP:
        # A block with no elements left changes nothing.
        left = tl.where(tl.load(outcome + 1) == 0.0, left, 0)
    parameter = tl.load(row)
    average = tl.load(row + 1)
    average_square = tl.load(row + 2)
    coded = tl.load(addresses + owner)
    cast = tl.load(row + 8)
    gradient = tl.abs(coded) - 1
    aligned = (parameter | average | average_square | gradient | cast) % 16 == 0
    offset = start * 4
    if (left >= BLOCK) & aligned:
        _update_block(
            parameter + offset, average + offset, average_square + offset, gradient, coded < 0, cast, start, left,
            scalars + owner * 8, outcome, factor, WHOLE=True, NORM=NORM, FACTOR=FACTOR, BLOCK=BLOCK,
        )  # fmt: skip
    elif left > 0:
        _update_block(
            parameter + offset, average + offset, average_square + offset, gradient, coded < 0, cast, start, left,
            scalars + owner * 8, outcome, factor, WHOLE=False, NORM=NORM, FACTOR=FACTOR, BLOCK=BLOCK,
        )  # fmt: skip


@triton.jit
def _update_block(
    parameter,
    average,
    average_square,
    gradient,
    half,
    cast,
    start,
    left,
    scalar,
    outcome,
    factor,
    WHOLE: tl.constexpr,
    NORM: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply AdamW to one block."""
    lanes = tl.arange(0, BLOCK)
    g = _read_either(gradient, start, lanes, left, half, WHOLE)
    p = _read(parameter, lanes, left, WHOLE)
    m = _read(average, lanes, left, WHOLE)
    v = _read(average_square, lanes, left, WHOLE)
    if FACTOR:
        g *= tl.load(factor).to(tl.float32)
    if NORM:
        g *= tl.load(outcome + 2)
    # Step towards the new value instead of beta * old + ...: fp32 is precise enough for 1 - beta, not for beta.
    m += tl.load(scalar + 3) * (g - m)
    v += tl.load(scalar + 4) * (g * g - v)
    p -= tl.load(scalar + 2) * p
    p -= tl.load(scalar) * m / (tl.sqrt(v) * tl.load(scalar + 1) + tl.load(scalar + 5))
    _write(parameter, p, lanes, left, WHOLE)
    _write(average, m, lanes, left, WHOLE)
    _write(average_square, v, lanes, left, WHOLE)
    if cast != 0:
        _write(cast + start * 2, p.to(tl.bfloat16), lanes, left, WHOLE, HALF=True)
