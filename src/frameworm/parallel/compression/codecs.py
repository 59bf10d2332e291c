"""The interface of codecs: values in, bytes out, and the error kept for the next step.

A codec only sees tensors, not processes: the hooks decide what is sent to which rank. The size of a payload depends
only on the number of values, so that all ranks know it without communicating.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from abc import ABC, abstractmethod

import torch
from torch import Tensor

ROUNDINGS = ("nearest", "stochastic")

# Values processed at a time on a CPU. Chunks that fit into the cache are slower, because some twenty calls per chunk
# cost more than the cache saves. Larger chunks gain little and take scratch memory.
CHUNK_VALUES = 2**21

_PAYLOAD_ALIGNMENT = 4
_DEVICE_TYPES = ("cuda",)  # where kernels run; tests add "cpu", which triton can interpret


class Codec(ABC):
    """Encodes flat gradients into bytes. For one thread at a time: the scratch memory is kept between calls.

    Attributes:
        name: Name of the method in a config.
        granularity: Slices of a bucket that are encoded separately start at multiples of this many values.
    """

    name: str
    granularity: int

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.device], Tensor] = {}

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """Size of the payload of `count` values; a multiple of 4."""

    @abstractmethod
    def encode(
        self,
        values: Tensor,
        payload: Tensor,
        residual: Tensor | None = None,
        draw: torch.Generator | None = None,
    ) -> None:
        """Write `values + residual` into `payload`, and the encoding error into `residual`.

        A block that holds a NaN or an infinity decodes to NaN, and its part of the residual is left unchanged.

        Args:
            values: 1-D, contiguous, fp32, bf16 or fp16; not changed.
            payload: uint8, `encoded_bytes(len(values))` long; every byte is written.
            residual: fp32, as long as `values`, or None.
            draw: Generator for stochastic rounding; None: torch's default.
        """

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Overwrite `out` (1-D, contiguous, fp32, bf16 or fp16) with the decoded values."""

    @abstractmethod
    def decode_add(self, payload: Tensor, total: Tensor) -> None:
        """Add the decoded values to `total` (fp32)."""

    def _scratch(self, name: str, count: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Scratch memory of `count` values, reused between calls."""
        key = (name, like.device)
        kept = self._kept.get(key)
        if kept is None or kept.numel() < count:
            kept = self._kept[key] = torch.empty(count, dtype=dtype, device=like.device)
        return kept[:count]


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether the kernels work on this device: triton needs a C compiler and does not support every GPU."""
    if device.type not in _DEVICE_TYPES or importlib.util.find_spec("triton") is None:
        return False
    try:
        from frameworm.parallel.compression import kernels

        kernels.try_out(device)
    except Exception as error:
        warnings.warn(f"gradients are compressed without kernels, triton cannot run here: {error}", stacklevel=2)
        return False
    return True


def kernels_take(payload: Tensor) -> bool:
    """Whether the kernels can read or write this payload in place."""
    return (
        has_kernels(payload.device) and payload.is_contiguous() and payload.storage_offset() % _PAYLOAD_ALIGNMENT == 0
    )


def aligned(payload: Tensor) -> Tensor:
    """The payload, or an aligned copy of it if it cannot be read in place."""
    if payload.storage_offset() % _PAYLOAD_ALIGNMENT or not payload.is_contiguous():
        return payload.clone(memory_format=torch.contiguous_format)
    return payload


def sum_into(total: Tensor, values: Tensor, residual: Tensor | None) -> None:
    """Set `total` to values + residual in fp32."""
    if residual is not None and values.dtype == torch.float32:
        torch.add(values, residual, out=total)
        return
    total.copy_(values)
    if residual is not None:
        total.add_(residual)
