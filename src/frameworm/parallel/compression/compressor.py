"""Compress and restore single tensors, without a process group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from frameworm.errors import ConfigError

_NUM_BITS = (1, 2, 4, 8)
_LARGEST_INT32 = 2**31 - 1


class GradientCompressor:
    """Top-k and quantization of single tensors: any device and dtype, also empty and constant tensors.

    DDP sends gradients through the blockwise codecs (`make_codec`) with error feedback instead. Here top-k is exact,
    and quantization has one scale for the whole tensor.

    Args:
        compression_ratio: Fraction of the values that top-k keeps, above 0 and at most 1; at least one value is kept.
    """

    def __init__(self, compression_ratio: float = 0.01) -> None:
        if not 0 < compression_ratio <= 1:
            raise ConfigError(f"compression_ratio must be above 0 and at most 1, not {compression_ratio}")
        self.compression_ratio = compression_ratio

    def compress_topk(self, tensor: Tensor) -> dict[str, Any]:
        """Keep the values of largest magnitude.

        Returns:
            `values` in the tensor's dtype, `indices` into the flat tensor (int32, or int64 if it is huge), `shape`, and
            `compression_ratio`, the fraction that was actually kept.
        """
        flat = tensor.detach().reshape(-1)
        count = flat.numel()
        kept = min(count, max(1, int(count * self.compression_ratio)))
        indices = _magnitude(flat).topk(kept, sorted=False).indices
        return {
            "values": flat[indices],
            "indices": indices.to(torch.int32) if count <= _LARGEST_INT32 else indices,
            "shape": tensor.shape,
            "compression_ratio": kept / count if count else self.compression_ratio,
        }

    def decompress_topk(self, compressed: dict[str, Any]) -> Tensor:
        """Restore the tensor in its shape and dtype, with zeros for the values that were not kept."""
        values: Tensor = compressed["values"]
        shape = torch.Size(compressed["shape"])
        out = torch.zeros(shape.numel(), dtype=values.dtype, device=values.device)
        out[compressed["indices"].long()] = values
        return out.view(shape)

    def compress_quantize(self, tensor: Tensor, num_bits: int = 8) -> dict[str, Any]:
        """Round to evenly spaced values between the smallest and the largest.

        Args:
            tensor: The tensor to compress. A NaN or an infinity anywhere makes all of it NaN (zero for integers).
            num_bits: 8, 4, 2 or 1; below 8, several values share a byte.

        Returns:
            `quantized` (uint8; flat below 8 bits), `min_val`, `max_val` and `scale` (0-dimensional tensors on the
            tensor's device), `shape`, `num_bits` and `dtype`.
        """
        if num_bits not in _NUM_BITS:
            raise ConfigError(f"num_bits must be one of {', '.join(map(str, _NUM_BITS))}, not {num_bits}")
        numbers = tensor.detach()
        if numbers.is_complex():
            numbers = torch.view_as_real(numbers.resolve_conj())
        numbers = numbers.reshape(-1).to(_working_dtype(numbers))
        if numbers.numel():
            smallest, largest = torch.aminmax(numbers)
        else:
            smallest = largest = numbers.new_zeros(())
        levels = 2**num_bits - 1
        scale = largest / levels - smallest / levels
        scale = torch.where(torch.isfinite(scale), scale, torch.nan)
        # Halved, because the difference of two finite numbers may overflow.
        integers = (numbers * 0.5).sub_(smallest * 0.5).div_(scale * 0.5).round_().clamp_(0, levels)
        # For a constant tensor this is 0 / 0.
        quantized = torch.nan_to_num_(integers, 0.0).to(torch.uint8)
        return {
            "quantized": quantized.view(tensor.shape)
            if _stays_in_shape(tensor, num_bits)
            else _pack(quantized, num_bits),
            "min_val": smallest,
            "max_val": largest,
            "scale": scale,
            "shape": tensor.shape,
            "num_bits": num_bits,
            "dtype": tensor.dtype,
        }

    def decompress_quantize(self, compressed: dict[str, Any], num_bits: int | None = None) -> Tensor:
        """Restore the tensor in its shape and dtype; each value is off by at most half a `scale`.

        Args:
            compressed: The result of `compress_quantize`.
            num_bits: Optional; must equal the number of bits used to compress.
        """
        used = compressed["num_bits"]
        if num_bits not in (None, used):
            raise ConfigError(
                f"this tensor was quantized to {used} bits and cannot be read as {num_bits}: leave it out"
            )
        dtype: torch.dtype = compressed["dtype"]
        shape = torch.Size(compressed["shape"])
        count = shape.numel() * (2 if dtype.is_complex else 1)
        smallest, largest, scale = compressed["min_val"], compressed["max_val"], compressed["scale"]
        integers = _unpack(compressed["quantized"].reshape(-1), used)[:count]
        numbers = integers.to(scale.dtype).mul_(scale * 0.5).add_(smallest * 0.5).mul_(2)
        numbers = torch.minimum(torch.maximum(numbers, smallest), largest)
        if dtype.is_complex:
            return torch.view_as_complex(numbers.view(*shape, 2)).to(dtype)
        if not dtype.is_floating_point:
            numbers = torch.nan_to_num_(numbers.round_())
        return numbers.to(dtype).view(shape)


def _magnitude(flat: Tensor) -> Tensor:
    """The sort key of the values; integers as fp64, because the smallest has no magnitude in its own type."""
    if flat.is_complex():
        return flat.abs()
    if not flat.is_floating_point():
        return flat.to(_working_dtype(flat)).abs()
    return (flat if flat.element_size() > 1 else flat.float()).abs()


def _working_dtype(numbers: Tensor) -> torch.dtype:
    """fp32, or fp64 for types that fp32 cannot represent, if the device supports it."""
    exact = numbers.dtype == torch.float64 or not numbers.is_floating_point()
    return torch.float64 if exact and numbers.device.type != "mps" else torch.float32


def _stays_in_shape(tensor: Tensor, num_bits: int) -> bool:
    return num_bits == 8 and not tensor.is_complex()


def _pack(integers: Tensor, num_bits: int) -> Tensor:
    """Pack several small integers into a byte, the first in the lowest bits."""
    per_byte = 8 // num_bits
    padded = torch.nn.functional.pad(integers, (0, -integers.numel() % per_byte)).view(-1, per_byte)
    packed = padded[:, 0].clone()
    for place in range(1, per_byte):
        packed |= padded[:, place] << (num_bits * place)
    return packed


def _unpack(packed: Tensor, num_bits: int) -> Tensor:
    """Unpack the integers, including those that pad the last byte."""
    mask = 2**num_bits - 1
    places = [(packed >> (num_bits * place)) & mask for place in range(8 // num_bits)]
    return torch.stack(places, 1).view(-1)
