"""What every codec promises: values in, bytes out, and what the bytes lost kept for the next step.

A codec knows tensors only, no processes: the hooks decide what is sent to whom. The payload of a codec has a size that
depends on the number of values alone, so that all ranks know it without asking.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from abc import ABC, abstractmethod

import torch
from torch import Tensor

ROUNDINGS = ("nearest", "stochastic")

# Values worked on at a time on a CPU. Chunks that stay in the cache are slower: what some twenty calls for each cost is
# more than the cache saves. Larger ones gain little and take scratch memory.
CHUNK_VALUES = 2**21

_PAYLOAD_ALIGNMENT = 4
_DEVICE_TYPES = ("cuda",)  # where kernels run; tests add "cpu", which triton can interpret


class Codec(ABC):
    """Encodes flat gradients into bytes. One thread at a time: the working memory is kept between calls.

    Attributes:
        name: How the method is called in a config.
        granularity: Slices of a bucket that are encoded apart start at multiples of this many values.
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
        """Write `values + residual` into `payload`; `residual` becomes what the payload lost of that sum.

        A block with a NaN or an infinity in it decodes to NaN, and its part of the residual stays as it was.

        Args:
            values: 1-D, contiguous, fp32, bf16 or fp16; not changed.
            payload: uint8, `encoded_bytes(len(values))` long; every byte is written.
            residual: fp32, as long as `values`, or None.
            draw: Where stochastic rounding takes its numbers from; None is torch's own generator.
        """

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Overwrite `out` (1-D, contiguous, fp32, bf16 or fp16) with what `payload` holds."""

    @abstractmethod
    def decode_add(self, payload: Tensor, total: Tensor) -> None:
        """Add what `payload` holds to `total` (fp32)."""

    def _scratch(self, name: str, count: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Working memory of at least `count` values, the same at every call."""
        key = (name, like.device)
        kept = self._kept.get(key)
        if kept is None or kept.numel() < count:
            kept = self._kept[key] = torch.empty(count, dtype=dtype, device=like.device)
        return kept[:count]


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether the kernels can be compiled and launched there: triton needs a C compiler and knows not every GPU."""
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
    """The payload, or a copy of it where its numbers could not be read in place."""
    if payload.storage_offset() % _PAYLOAD_ALIGNMENT or not payload.is_contiguous():
        return payload.clone(memory_format=torch.contiguous_format)
    return payload


def sum_into(total: Tensor, values: Tensor, residual: Tensor | None) -> None:
    """`total` becomes values + residual in fp32."""
    if residual is not None and values.dtype == torch.float32:
        torch.add(values, residual, out=total)
        return
    total.copy_(values)
    if residual is not None:
        total.add_(residual)
