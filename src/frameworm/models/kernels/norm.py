"""Layer norm's backward fused with the residual stream's, in one pass over memory, as a Triton kernel.

The gradient of the stream is added to the gradient through the norm, and three sums over all rows are computed on the
way: the gradients of the norm's weight and bias, and the sum of the stream's gradient. Each program keeps them for its
rows; the partial sums are added afterwards in a fixed order.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

# Rows at a time, warps, programs per multiprocessor, and pipeline stages; tuned on an H200 with 768 columns.
# benchmarks/model_kernels.py tries others.
_ROWS, _WARPS, _PROGRAMS_EACH, _STAGES = 4, 4, 2, 3


@triton.jit
def _norm_backward_kernel(
    gradient,
    stream,
    inputs,
    weight,
    means,
    scales,
    result,
    sums,
    rows,
    width: tl.constexpr,
    at_once: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
):
    """Process every n-th group of rows: the gradient of the inputs, and this program's part of the sums."""
    columns = tl.arange(0, block)
    there = columns < width
    factors = tl.load(weight + columns, mask=there, other=0.0).to(tl.float32)
    to_weight = tl.zeros([at_once, block], tl.float32)
    to_bias = tl.zeros([at_once, block], tl.float32)
    passed = tl.zeros([at_once, block], tl.float32)
    for start in tl.range(tl.program_id(0) * at_once, rows, tl.num_programs(0) * at_once, num_stages=stages):
        numbers = start + tl.arange(0, at_once)
        real = numbers < rows
        places = numbers.to(tl.int64)[:, None] * width + columns[None, :]
        inside = real[:, None] & there[None, :]
        given = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
        past = tl.load(stream + places, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(inputs + places, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(means + numbers, mask=real, other=0.0)
        scale = tl.load(scales + numbers, mask=real, other=0.0)
        values = (values - mean[:, None]) * scale[:, None]
        to_weight += given * values
        to_bias += given
        passed += past
        given = given * factors[None, :]
        level = tl.sum(given, 1) / width
        slope = tl.sum(given * values, 1) / width
        found = (given - level[:, None] - values * slope[:, None]) * scale[:, None] + past
        tl.store(result + places, found.to(result.dtype.element_ty), mask=inside)
    own = sums + tl.program_id(0) * 3 * width + columns
    tl.store(own, tl.sum(to_weight, 0), mask=there)
    tl.store(own + width, tl.sum(to_bias, 0), mask=there)
    tl.store(own + 2 * width, tl.sum(passed, 0), mask=there)


def norm_backward(
    gradient: Tensor, stream: Tensor, inputs: Tensor, weight: Tensor, means: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """See `stream_norm._norm_backward`; all tensors must be contiguous and on a GPU."""
    rows, width = inputs.shape
    result = torch.empty_like(inputs)
    with torch.cuda.device(inputs.device):
        programs = _PROGRAMS_EACH * torch.cuda.get_device_properties(inputs.device).multi_processor_count
        programs = max(1, min(programs, triton.cdiv(rows, _ROWS)))
        sums = inputs.new_empty(programs, 3, width, dtype=torch.float32)
        _norm_backward_kernel[(programs,)](
            gradient,
            stream,
            inputs,
            weight,
            means,
            scales,
            result,
            sums,
            rows,
            width=width,
            at_once=_ROWS,
            block=triton.next_power_of_2(width),
            stages=_STAGES,
            num_warps=_WARPS,
        )
    return result, sums.sum(0)
