"""How fast this GPU multiplies matrices of given shapes: the part of its peak that they can reach."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from frameworm.records.observations import MatrixProduct

_WARMUP, _RUNS = 3, 10
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def achievable_flops(products: Sequence[MatrixProduct], device: torch.device) -> float | None:
    """Measure FLOP/s of matrix products of these shapes, weighted by share; None without a GPU or memory for them.

    Takes a few milliseconds per shape, once per process.
    """
    if device.type != "cuda" or not products:
        return None
    shapes = tuple((item.batch, item.rows, item.inner, item.columns, item.precision) for item in products)
    try:
        rates = [_rate(shape, device) for shape in shapes]
    except torch.OutOfMemoryError:
        return None
    timed = [(item.share, rate) for item, rate in zip(products, rates) if rate]
    return sum(share for share, _ in timed) / sum(share / rate for share, rate in timed) if timed else None


@functools.lru_cache
def _rate(shape: tuple[int, int, int, int, str], device: torch.device) -> float | None:
    batch, rows, inner, columns, precision = shape
    dtype = _TYPES.get(precision)
    if dtype is None:
        return None
    left = torch.randn(batch, rows, inner, device=device, dtype=dtype)
    right = torch.randn(batch, inner, columns, device=device, dtype=dtype)
    result = torch.empty(batch, rows, columns, device=device, dtype=dtype)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for run in range(_WARMUP + _RUNS):
        if run == _WARMUP:
            begin.record()
        torch.matmul(left, right, out=result)
    end.record()
    end.synchronize()
    seconds = begin.elapsed_time(end) / 1e3 / _RUNS
    return 2 * batch * rows * inner * columns / seconds if seconds > 0 else None
