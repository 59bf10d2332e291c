"""Gradients as small integers: one step size per block of consecutive values, 8 or 4 bits per value.

Payload of `blocks` blocks, the last one padded with zeros: first the integers, then one fp32 step per block.
8 bits: an int8 per value. 4 bits: byte j of a block holds value j and value j + half a block (halves, not neighbours,
so that packing reads and writes contiguous runs), as the signed number `first + 16 * second`, both -7 to 7.

    step = largest magnitude of the block / 127 (or 7)
    integer = value / step, rounded half to even
    decoded = integer * step

A step below 1e-42 is stored as 0: such a block decodes to zeros, and the residual keeps its values. A NaN step marks a
block that held a NaN or an infinity.

On a GPU with triton every method is one kernel (kernels.py). Elsewhere values are processed in chunks, in buffers that
are allocated once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from frameworm.errors import ConfigError
from frameworm.parallel.compression.codecs import CHUNK_VALUES, ROUNDINGS, Codec, aligned, kernels_take, sum_into

_STEP_BYTES = 4
_BLOCK_SIZES = {8: 256, 4: 128}
# A smaller step is a subnormal number, too coarse to divide by.
SMALLEST_STEP = 1e-42
# From here on 1 / step is finite, and multiplying by it is as accurate as dividing and three times as fast.
_SMALLEST_INVERTIBLE_STEP = 1e-37
_LARGEST_STEP = torch.finfo(torch.float32).max


class _Chunk(NamedTuple):
    """A range of values that is processed at once, and its blocks."""

    start: int
    stop: int
    first_block: int
    last_block: int


class Quantizer(Codec):
    """Blockwise symmetric integers.

    Args:
        bits: 8 or 4.
        block_size: Values that share a step; even. None: 256 for 8 bits, 128 for 4.
        rounding: "nearest", or "stochastic", which is unbiased.
    """

    def __init__(self, bits: int, block_size: int | None = None, rounding: str = "nearest") -> None:
        super().__init__()
        if bits not in _BLOCK_SIZES:
            raise ConfigError(f"a gradient can be quantized to 8 or 4 bits, not {bits}")
        if rounding not in ROUNDINGS:
            raise ConfigError(f"unknown rounding {rounding!r}: use one of {', '.join(ROUNDINGS)}")
        self.name = f"int{bits}"
        self.bits = bits
        self.levels = 127 if bits == 8 else 7
        self.rounding = rounding
        self.granularity = _BLOCK_SIZES[bits] if block_size is None else block_size
        if self.granularity < 4 or self.granularity % (8 if bits == 4 else 4):
            raise ConfigError(f"block_size {block_size} must be a multiple of 8 for 4 bits and of 4 for 8 bits")
        self._packed_width = self.granularity * bits // 8

    def encoded_bytes(self, count: int) -> int:
        """Size of the payload of `count` values."""
        return self._blocks(count) * (self._packed_width + _STEP_BYTES)

    def encode(
        self,
        values: Tensor,
        payload: Tensor,
        residual: Tensor | None = None,
        draw: torch.Generator | None = None,
    ) -> None:
        """Write `values + residual` into `payload`; see `Codec.encode`."""
        if self._by_kernel(payload, values.numel()):
            from frameworm.parallel.compression import kernels

            kernels.encode(values, payload, residual, self.bits, self.granularity, self._seed(values, draw))
            return
        written = aligned(payload)
        packed, steps = self._parts(written, values.numel())
        noise = self._noise(values, draw)
        for chunk in self._chunks(values):
            part = slice(chunk.start, chunk.stop)
            total = self._zero_filled("total", chunk, values)
            before = None if residual is None else residual[part]
            sum_into(total.view(-1)[: chunk.stop - chunk.start], values[part], before)
            blocks = slice(chunk.first_block, chunk.last_block)
            integers, bad = self._quantize(total, packed[blocks], steps[blocks], noise)
            if before is None:
                continue
            if bad is None and before.numel() == total.numel():
                torch.addcmul(total, integers, steps[blocks, None], value=-1, out=before.view_as(total))
                continue
            torch.addcmul(total, integers, steps[blocks, None], value=-1, out=total)
            lost = total.view(-1)[: before.numel()]
            if bad is not None:
                kept = bad[:, None].expand_as(total).reshape(-1)[: before.numel()]
                lost = torch.where(kept, before, lost)
            before.copy_(lost)
        if written is not payload:
            payload.copy_(written)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Overwrite `out` with the decoded values."""
        if self._by_kernel(payload, out.numel()):
            from frameworm.parallel.compression import kernels

            kernels.decode(payload, out, self.bits, self.granularity)
            return
        packed, steps = self._parts(aligned(payload), out.numel())
        for chunk in self._chunks(out):
            blocks = slice(chunk.first_block, chunk.last_block)
            part = out[chunk.start : chunk.stop]
            if out.dtype == torch.float32 and part.numel() == (blocks.stop - blocks.start) * self.granularity:
                self._dequantize(packed[blocks], steps[blocks], part.view(-1, self.granularity))
                continue
            decoded = self._matrix("decoded", chunk, out)
            self._dequantize(packed[blocks], steps[blocks], decoded)
            part.copy_(decoded.view(-1)[: part.numel()])

    def decode_add(self, payload: Tensor, total: Tensor) -> None:
        """Add the decoded values to `total`."""
        if self._by_kernel(payload, total.numel()):
            from frameworm.parallel.compression import kernels

            kernels.decode(payload, total, self.bits, self.granularity, add=True)
            return
        packed, steps = self._parts(aligned(payload), total.numel())
        for chunk in self._chunks(total):
            blocks = slice(chunk.first_block, chunk.last_block)
            decoded = self._matrix("decoded", chunk, total)
            self._dequantize(packed[blocks], steps[blocks], decoded)
            part = total[chunk.start : chunk.stop]
            part.add_(decoded.view(-1)[: part.numel()])

    def reduce_mean(
        self,
        payloads: Tensor,
        payload: Tensor,
        count: int,
        residual: Tensor | None = None,
        draw: torch.Generator | None = None,
    ) -> None:
        """Encode the mean of all ranks' payloads.

        Args:
            payloads: uint8, one row of `encoded_bytes(count)` per rank; added up in this order, in fp32.
            payload: uint8, receives the encoded mean.
            count: Number of values in each payload.
            residual: fp32, `count` long: the owner's part of its residual. It grows by world size x the error of
                the second rounding, so that the owner's next contribution brings exactly that back into the mean.
            draw: As in `encode`.
        """
        if self._by_kernel(payload, count) and kernels_take(payloads):
            from frameworm.parallel.compression import kernels

            seed = self._seed(payload, draw)
            kernels.reduce_mean(payloads, payload, count, residual, self.bits, self.granularity, seed)
            return
        world_size = payloads.size(0)
        rows = [self._parts(aligned(row), count) for row in payloads]
        # Scaled before they are added, so that huge values do not overflow in the sum.
        shares = [steps * (1 / world_size) for _, steps in rows]
        written = aligned(payload)
        packed, steps = self._parts(written, count)
        noise = self._noise(payloads, draw)
        for chunk in self._chunks(payload, count):
            blocks = slice(chunk.first_block, chunk.last_block)
            total = self._matrix("total", chunk, payload)
            decoded = self._matrix("decoded", chunk, payload)
            for rank, (their_packed, _) in enumerate(rows):
                self._dequantize(their_packed[blocks], shares[rank][blocks], decoded if rank else total)
                if rank:
                    total.add_(decoded)
            integers, bad = self._quantize(total, packed[blocks], steps[blocks], noise)
            if residual is None:
                continue
            torch.addcmul(total, integers, steps[blocks, None], value=-1, out=total)
            if bad is not None:
                total.masked_fill_(bad[:, None], 0.0)
            part = residual[chunk.start : chunk.stop]
            part.add_(total.view(-1)[: part.numel()], alpha=world_size)
        if written is not payload:
            payload.copy_(written)

    def _quantize(
        self, total: Tensor, packed: Tensor, steps: Tensor, noise: np.random.BitGenerator | torch.Generator | None
    ) -> tuple[Tensor, Tensor | None]:
        """Write integers and steps of whole blocks; returns the integers as fp32 and a mask of non-finite blocks."""
        scaled = self._scratch("scaled", total.numel(), total, torch.float32).view_as(total)
        torch.abs(total, out=scaled)
        torch.amax(scaled, 1, out=steps)
        steps.div_(self.levels)
        bad = None
        if total.is_cuda or not _ordinary(steps):
            bad = ~torch.isfinite(steps)
            empty = steps < SMALLEST_STEP
            divisors = steps.masked_fill(empty | bad, torch.inf)
            steps.masked_fill_(empty, 0.0).masked_fill_(bad, torch.nan)
            if total.is_cuda or float(divisors.min()) < _SMALLEST_INVERTIBLE_STEP:
                torch.div(total, divisors[:, None], out=scaled)
            else:
                torch.mul(total, divisors.reciprocal_()[:, None], out=scaled)
            if total.is_cuda or bool(bad.any()):
                scaled.masked_fill_(bad[:, None], 0.0)
            else:
                bad = None
        else:
            torch.mul(total, steps.reciprocal()[:, None], out=scaled)
        if self.rounding == "stochastic":
            scaled.add_(self._uniform(scaled, noise)).floor_().clamp_(-self.levels, self.levels)
        else:
            scaled.round_()
        if self.bits == 8:
            packed.copy_(scaled)
        else:
            halves = self._halves(scaled)
            halves.copy_(scaled.view_as(halves))
            torch.add(halves[:, 0], halves[:, 1], alpha=16, out=packed)
        return scaled, bad

    def _dequantize(self, packed: Tensor, steps: Tensor, out: Tensor) -> None:
        """Decode whole blocks into `out`, fp32, one block per row."""
        if self.bits == 8:
            out.copy_(packed)
        else:
            halves = self._halves(out)
            shifted = self._scratch("shifted", packed.numel(), packed, torch.int8).view_as(packed)
            torch.add(packed, 8, out=shifted)
            torch.bitwise_right_shift(shifted, 4, out=halves[:, 1])
            torch.sub(packed, halves[:, 1], alpha=16, out=halves[:, 0])
            out.view_as(halves).copy_(halves)
        out.mul_(steps[:, None])

    def _halves(self, like: Tensor) -> Tensor:
        flat = self._scratch("halves", like.numel(), like, torch.int8)
        return flat.view(-1, 2, self.granularity // 2)

    def _noise(self, like: Tensor, draw: torch.Generator | None) -> np.random.BitGenerator | torch.Generator | None:
        """The random source of stochastic rounding in this call."""
        if self.rounding != "stochastic" or like.is_cuda:
            return draw
        # On a CPU torch's generator takes longer than the rest of the codec; numpy's 16 bits per value do not.
        return np.random.SFC64(int(torch.randint(2**62, (), generator=draw)))

    def _uniform(self, like: Tensor, noise: np.random.BitGenerator | torch.Generator | None) -> Tensor:
        """Numbers between 0 and 1, both excluded, in the shape of `like`."""
        if not isinstance(noise, np.random.BitGenerator):
            return torch.rand(like.shape, generator=noise, device=like.device)
        words = noise.random_raw((like.numel() + 3) // 4)
        sixteen_bits = torch.from_numpy(words.view(np.int16))[: like.numel()]
        uniform = self._scratch("uniform", like.numel(), like, torch.float32)
        return uniform.copy_(sixteen_bits).add_(32768.5).mul_(2.0**-16).view_as(like)

    def _by_kernel(self, payload: Tensor, count: int) -> bool:
        """Whether a kernel is used; it requires blocks of a power of two."""
        assert payload.dtype == torch.uint8, payload.dtype
        assert payload.numel() == self.encoded_bytes(count), (payload.numel(), self.encoded_bytes(count))
        return self.granularity & (self.granularity - 1) == 0 and self.granularity <= 2048 and kernels_take(payload)

    def _seed(self, like: Tensor, draw: torch.Generator | None) -> Tensor | None:
        """The seed of stochastic rounding for a kernel."""
        from frameworm.parallel.compression import kernels

        return kernels.seed_from(draw, like.device) if self.rounding == "stochastic" else None

    def _blocks(self, count: int) -> int:
        return -(-count // self.granularity)

    def _parts(self, payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Views of the integers, one block per row, and of the steps."""
        blocks = self._blocks(count)
        assert payload.dtype == torch.uint8, payload.dtype
        assert payload.numel() == self.encoded_bytes(count), (payload.numel(), self.encoded_bytes(count))
        integers = blocks * self._packed_width
        packed = payload[:integers].view(torch.int8).view(blocks, self._packed_width)
        return packed, payload[integers:].view(torch.float32)

    def _chunks(self, like: Tensor, count: int | None = None) -> Iterator[_Chunk]:
        count = like.numel() if count is None else count
        # On a GPU a launch per pass and chunk would cost more than small chunks gain.
        per_chunk = self._blocks(count) if like.is_cuda else max(1, CHUNK_VALUES // self.granularity)
        for first in range(0, self._blocks(count), max(1, per_chunk)):
            last = min(first + per_chunk, self._blocks(count))
            yield _Chunk(first * self.granularity, min(last * self.granularity, count), first, last)

    def _matrix(self, name: str, chunk: _Chunk, like: Tensor) -> Tensor:
        """Scratch memory for the blocks of a chunk, one per row."""
        size = (chunk.last_block - chunk.first_block) * self.granularity
        return self._scratch(name, size, like, torch.float32).view(-1, self.granularity)

    def _zero_filled(self, name: str, chunk: _Chunk, like: Tensor) -> Tensor:
        """Like `_matrix`, with zeros after the values of the chunk."""
        matrix = self._matrix(name, chunk, like)
        matrix.view(-1)[chunk.stop - chunk.start :].zero_()
        return matrix


def _ordinary(steps: Tensor) -> bool:
    """Whether all steps are finite and can be inverted."""
    smallest, largest = torch.aminmax(steps)
    return bool(smallest >= _SMALLEST_INVERTIBLE_STEP) and bool(largest <= _LARGEST_STEP)
