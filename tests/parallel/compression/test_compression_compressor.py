"""`GradientCompressor` on tensors of all kinds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from frameworm.errors import ConfigError
from frameworm.parallel.compression.compressor import GradientCompressor

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OTHERS = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64)
SHAPES = ((), (0,), (1,), (3, 0, 2), (7,), (5, 9), (2, 3, 5), (1001,))


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(4)
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=draw)
    return torch.randn(shape, generator=draw).mul_(3).to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS])
@pytest.mark.parametrize("shape", SHAPES)
def test_top_k_keeps_the_largest(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = tensor_of(shape, dtype)
    compressor = GradientCompressor(0.1)
    compressed = compressor.compress_topk(tensor)
    assert {"values", "indices", "shape", "compression_ratio"} <= compressed.keys()
    kept = compressed["values"].numel()
    assert kept == compressed["indices"].numel() == (max(1, int(tensor.numel() * 0.1)) if tensor.numel() else 0)
    if tensor.numel():
        assert compressed["compression_ratio"] == kept / tensor.numel()
    out = compressor.decompress_topk(compressed)
    assert out.shape == tensor.shape
    assert out.dtype == tensor.dtype
    flat, indices = tensor.reshape(-1), compressed["indices"].long()
    assert torch.equal(out.reshape(-1)[indices], flat[indices])
    rest = torch.ones(flat.numel(), dtype=torch.bool)
    rest[indices] = False
    assert torch.count_nonzero(out.reshape(-1)[rest]) == 0
    size = (flat if dtype.is_complex else flat.double()).abs()
    if kept and rest.any():
        assert size[indices].min() >= size[rest].max()


def test_top_k_takes_a_gradient_that_is_not_contiguous_and_belongs_to_a_graph() -> None:
    tensor = torch.randn(20, 30, requires_grad=True).t()
    compressor = GradientCompressor(1.0)
    out = compressor.decompress_topk(compressor.compress_topk(tensor))
    assert torch.equal(out, tensor.detach())
    assert not out.requires_grad
    quantized = compressor.decompress_quantize(compressor.compress_quantize(tensor))
    assert torch.allclose(quantized, tensor.detach(), atol=0.05)


@pytest.mark.parametrize("num_bits", [8, 4, 2, 1])
@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantized_values_are_half_a_scale_off(shape: tuple[int, ...], dtype: torch.dtype, num_bits: int) -> None:
    tensor = tensor_of(shape, dtype)
    compressor = GradientCompressor()
    compressed = compressor.compress_quantize(tensor, num_bits=num_bits)
    assert {"quantized", "min_val", "max_val", "scale", "shape"} <= compressed.keys()
    numbers = tensor.numel() * (2 if dtype.is_complex else 1)
    assert compressed["quantized"].dtype == torch.uint8
    assert compressed["quantized"].numel() == math.ceil(numbers * num_bits / 8)
    out = compressor.decompress_quantize(compressed, num_bits)
    assert out.shape == tensor.shape
    assert out.dtype == tensor.dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64
    off = tensor.to(wide) - out.to(wide)
    off = torch.view_as_real(off) if dtype.is_complex else off
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(dtype, 2.0**-21) * 16
    if not (dtype.is_floating_point or dtype.is_complex):
        rounding = 0.5
    assert (off.abs() <= compressed["scale"].double() * 0.5 + rounding).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.sampled_from((8, 4, 2, 1)),
)
def test_any_finite_numbers_survive(numbers: list[float], num_bits: int) -> None:
    tensor = torch.tensor(numbers)
    compressor = GradientCompressor()
    compressed = compressor.compress_quantize(tensor, num_bits)
    out = compressor.decompress_quantize(compressed)
    assert out.isfinite().all()
    scale = compressed["scale"].double()
    bound = scale * 0.5001 + tensor.double().abs().max() * 2.0**-21 + 2.0**-148 * 2**num_bits
    assert ((tensor.double() - out.double()).abs() <= bound).all()


@pytest.mark.parametrize("value", [0.0, -2.5, 3e38, 1e-45, 7.0])
@pytest.mark.parametrize("num_bits", [8, 4])
def test_constant_tensors_come_back_exactly(value: float, num_bits: int) -> None:
    tensor = torch.full((5, 3), value)
    compressor = GradientCompressor()
    assert torch.equal(compressor.decompress_quantize(compressor.compress_quantize(tensor, num_bits)), tensor)


def test_a_range_beyond_the_largest_number() -> None:
    tensor = torch.tensor([-3e38, 0.0, 1e38, 3e38])
    compressor = GradientCompressor()
    out = compressor.decompress_quantize(compressor.compress_quantize(tensor))
    assert ((out.double() - tensor.double()).abs() <= 6e38 / 255 * 0.501).all()


def test_a_nan_makes_the_tensor_nan() -> None:
    compressor = GradientCompressor()
    for bad in (math.nan, math.inf, -math.inf):
        out = compressor.decompress_quantize(compressor.compress_quantize(torch.tensor([1.0, bad, 2.0])))
        assert out.isnan().all()
    kept = compressor.compress_topk(torch.tensor([1.0, math.nan, 2.0]))
    assert kept["values"].isnan().all()


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.01, math.nan])
def test_a_ratio_out_of_range_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="compression_ratio"):
        GradientCompressor(ratio)


@pytest.mark.parametrize("num_bits", [0, 3, 16, -4])
def test_bits_that_do_not_fill_a_byte_are_refused(num_bits: int) -> None:
    with pytest.raises(ConfigError, match="num_bits"):
        GradientCompressor().compress_quantize(torch.ones(3), num_bits)


def test_reading_with_other_bits_is_refused() -> None:
    compressor = GradientCompressor()
    with pytest.raises(ConfigError, match="quantized to 4 bits"):
        compressor.decompress_quantize(compressor.compress_quantize(torch.ones(3), 4), 8)
