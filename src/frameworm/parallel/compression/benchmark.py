"""`benchmark_compression`: how much each method compresses gradients, how long that takes, and what it loses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import cast

import torch
from torch import Tensor, nn

from frameworm.errors import ConfigError
from frameworm.hardware.devices import choose_device
from frameworm.parallel.compression.codec_cost import NoWire, run_stages, seconds_of, stages_of
from frameworm.parallel.compression.exchange import Parcel, Scratch
from frameworm.parallel.compression.hook import CASTS, METHODS, OFF
from frameworm.parallel.compression.pipeline import Wire
from frameworm.parallel.compression.registry import CODECS, make_codec
from frameworm.parallel.compression.residuals import Named
from frameworm.report.checks.network import render_compression
from frameworm.report.kit.printed import Printed

SIZES = (10_000, 1_000_000, 10_000_000)


class _CountingWire(NoWire):
    """A single rank: counts what would be sent, and receives what it sent itself."""

    def __init__(self) -> None:
        super().__init__(1)
        self.sent_bytes = 0

    def all_reduce(self, values: Tensor) -> object:  # type: ignore[override]
        self.sent_bytes += values.nbytes
        return super().all_reduce(values)


def benchmark_compression(
    sizes: Sequence[int | Sequence[int]] = SIZES,
    methods: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    *,
    compression_ratio: float = 0.01,
    powersgd_rank: int = 1,
    repetitions: int = 5,
    show: bool = True,
) -> Printed:
    """Compress random gradients with every method, once each without error feedback, and print a table.

    Random numbers are the hardest to compress: real gradients lose less with topk and powersgd. Whether fewer bytes
    make a step faster depends on the network; `method="auto"` of `enable_gradient_compression` measures that.

    Args:
        sizes: Values of each gradient, as a number (a square matrix, for powersgd) or a shape.
        methods: Some of fp16, bf16, int8, int4, topk, powersgd; None: all.
        device: Where to run; None: a GPU if there is one.
        compression_ratio: Fraction of the values that topk keeps.
        powersgd_rank: Columns of powersgd's matrices.
        repetitions: Timed repetitions, of which the median is reported.
        show: Print the table.

    Returns:
        `device` and `rows`, each {method, values, bytes, compressed_bytes, ratio, time_ms, error}: `ratio` is the
        factor by which bytes shrink, `time_ms` the time to compress and decompress, `error` the norm of the loss
        relative to that of the gradient. It prints as a table.

    Raises:
        ConfigError: An unknown method, or a size below 1.
    """
    chosen = [method for method in METHODS if method != OFF] if methods is None else list(methods)
    for method in chosen:
        if method not in METHODS or method == OFF:
            known = ", ".join(name for name in METHODS if name != OFF)
            raise ConfigError(f"unknown compression method {method!r}; use some of {known}")
    place = choose_device() if device is None else torch.device(device)
    draw = torch.Generator().manual_seed(0)
    rows = []
    for size in sizes:
        shapes = _shapes(size)
        gradient = torch.randn(sum(map(math.prod, shapes)), generator=draw).to(place)
        for method in chosen:
            trip = _round_trip(method, shapes, gradient, compression_ratio, powersgd_rank)
            decoded, sent = trip()
            taken = [seconds_of(place, trip) for _ in range(repetitions)]
            rows.append(
                {
                    "method": method,
                    "values": gradient.numel(),
                    "bytes": gradient.nbytes,
                    "compressed_bytes": sent,
                    "ratio": gradient.nbytes / sent,
                    "time_ms": median(taken) * 1e3,
                    "error": float((decoded - gradient).norm() / gradient.norm()),
                }
            )
    result = Printed({"device": str(place), "rows": rows}, render_compression)
    if show:
        result.print_summary()
    return result


def _shapes(size: int | Sequence[int]) -> list[tuple[int, ...]]:
    """The parameter shapes of a gradient: a matrix as square as possible, and the remaining values."""
    shape = (size,) if isinstance(size, int) else tuple(size)
    if math.prod(shape) < 1:
        raise ConfigError(f"sizes: {size} must be 1 or more values")
    if not isinstance(size, int):
        return [shape]
    side = math.isqrt(size)
    matrix = (side, size // side)
    rest = size - math.prod(matrix)
    return [matrix, (rest,)] if rest else [matrix]


def _round_trip(
    method: str, shapes: list[tuple[int, ...]], gradient: Tensor, ratio: float, powersgd_rank: int
) -> Callable[[], tuple[Tensor, int]]:
    """Return a function that compresses and decompresses, and returns the result and the bytes in between."""
    if method in CASTS:

        def cast_and_back() -> tuple[Tensor, int]:
            small = gradient.to(CASTS[method])
            return small.float(), small.nbytes

        return cast_and_back
    if method in CODECS:
        codec = make_codec(method, ratio=ratio)
        payload = torch.empty(codec.encoded_bytes(gradient.numel()), dtype=torch.uint8, device=gradient.device)
        out = torch.empty_like(gradient)

        def code_and_back() -> tuple[Tensor, int]:
            codec.encode(gradient, payload)
            codec.decode(payload, out)
            return out, payload.nbytes

        return code_and_back
    named = Named(nn.ParameterList(nn.Parameter(torch.empty(shape, device=gradient.device)) for shape in shapes))
    scratch = Scratch()

    def approximate() -> tuple[Tensor, int]:
        wire = _CountingWire()
        stages = stages_of(method, named, cast("Wire", wire), scratch, ratio, powersgd_rank)
        values = run_stages(stages(Parcel(0, gradient.clone(), tuple(named.parameters))))
        return values, wire.sent_bytes

    return approximate
