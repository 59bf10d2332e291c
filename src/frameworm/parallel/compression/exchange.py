"""How each method computes the mean of a bucket: generators that `pipeline` drives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from frameworm.parallel.compression.codecs import Codec
from frameworm.parallel.compression.pipeline import Stages, Wire
from frameworm.parallel.compression.quantize import Quantizer

ALIGNMENT_BYTES = 16  # payloads begin at multiples of this, so that kernels can read whole words


class Scratch:
    """Buffers kept as long as the division into buckets: fresh memory costs a page fault per 4 KB."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def take(self, use: str, number: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D buffer of a bucket for one use; it holds zeros at first, then whatever was last written."""
        buffer = self._buffers.get((use, number))
        if buffer is None or buffer.numel() != count or buffer.dtype != dtype or buffer.device != device:
            buffer = self._buffers[(use, number)] = torch.zeros(count, dtype=dtype, device=device)
        return buffer

    def clear(self) -> None:
        """Release the memory."""
        self._buffers.clear()


@dataclass
class Parcel:
    """A bucket of gradients to be replaced by their mean over the ranks.

    Attributes:
        number: Position of the bucket in this step, from 0.
        values: The gradients, 1-D.
        names: Names of the parameters, in the order of `values`.
        residual: The error of earlier steps, to be added; None without error feedback.
        draw: Returns the random generator of a stage, given its number.
    """

    number: int
    values: Tensor
    names: tuple[str, ...]
    residual: Tensor | None = None
    draw: Callable[[int], torch.Generator | None] = lambda stage: None


def cast(parcel: Parcel, wire: Wire, scratch: Scratch, dtype: torch.dtype) -> Stages:
    """Divide by the world size, round to 16 bits, sum."""
    values = parcel.values
    rounded = scratch.take("cast", parcel.number, values.numel(), dtype, values.device)
    # Divided first, so that the sum over many ranks does not overflow.
    rounded.copy_(values.mul_(1 / wire.world_size))
    yield wire.all_reduce(rounded)
    return values.copy_(rounded)


@dataclass(frozen=True)
class Shards:
    """How a bucket is divided among the ranks.

    Attributes:
        count: Values of the bucket.
        each: Values of a full shard; the last ones may be short or empty.
        payload_bytes: Bytes of a full shard's payload; every shard is sent in that size.
    """

    count: int
    each: int
    payload_bytes: int

    @staticmethod
    def of(count: int, world_size: int, codec: Codec) -> Shards:
        """Choose shards that begin at the codec's blocks, with payloads that begin at whole words."""
        unit = next(
            size
            for size in (codec.granularity * factor for factor in (1, 2, 4, 8, ALIGNMENT_BYTES))
            if codec.encoded_bytes(size) % ALIGNMENT_BYTES == 0 or size == codec.granularity * ALIGNMENT_BYTES
        )
        each = -(-count // (world_size * unit)) * unit
        return Shards(count, each, codec.encoded_bytes(each))

    def span(self, rank: int) -> slice:
        """The values that a rank reduces."""
        begin = min(rank * self.each, self.count)
        return slice(begin, min(begin + self.each, self.count))

    def size(self, rank: int) -> int:
        """The number of values that a rank reduces."""
        span = self.span(rank)
        return int(span.stop - span.start)


def quantized(parcel: Parcel, wire: Wire, scratch: Scratch, codec: Quantizer) -> Stages:
    """Send each rank its quantised shard from all ranks, then gather the quantised means of the shards."""
    values, residual, device = parcel.values, parcel.residual, parcel.values.device
    ranks = range(wire.world_size)
    shards = Shards.of(values.numel(), wire.world_size, codec)
    size = shards.payload_bytes
    written = [codec.encoded_bytes(shards.size(rank)) for rank in ranks]

    def buffer(use: str, count: int) -> Tensor:
        return scratch.take(use, parcel.number, count, torch.uint8, device)

    payloads, received = buffer("sent", len(ranks) * size), buffer("received", len(ranks) * size)
    for rank in ranks:
        span = shards.span(rank)
        payload = payloads[rank * size : rank * size + written[rank]]
        codec.encode(values[span], payload, None if residual is None else residual[span], parcel.draw(rank))
    yield wire.all_to_all(received, payloads)

    own = shards.span(wire.rank)
    mine = buffer("mean", size)
    if shards.size(wire.rank):
        codec.reduce_mean(
            received.view(len(ranks), size)[:, : written[wire.rank]].contiguous(),
            mine[: written[wire.rank]],
            shards.size(wire.rank),
            None if residual is None else residual[own],
            parcel.draw(len(ranks)),
        )
    yield wire.all_gather(payloads, mine)

    # The owner also uses the decoded mean, not its exact one: replicas must agree to the last bit.
    for rank in ranks:
        codec.decode(payloads[rank * size : rank * size + written[rank]], values[shards.span(rank)])
    return values


def sparse(parcel: Parcel, wire: Wire, scratch: Scratch, codec: Codec) -> Stages:
    """Gather the sparse values of all ranks and add them up in rank order."""
    values, device, count = parcel.values, parcel.values.device, parcel.values.numel()
    size = -(-codec.encoded_bytes(count) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    used = codec.encoded_bytes(count)
    payload = scratch.take("sent", parcel.number, size, torch.uint8, device)
    received = scratch.take("received", parcel.number, size * wire.world_size, torch.uint8, device)
    codec.encode(values, payload[:used], parcel.residual, parcel.draw(0))
    yield wire.all_gather(received, payload)

    in_place = values.dtype == torch.float32
    total = values if in_place else torch.empty(count, device=device)
    codec.decode(received[:used], total)
    for begin in range(size, len(received), size):
        codec.decode_add(received[begin : begin + used], total)
    total.mul_(1 / wire.world_size)
    return values if in_place else values.copy_(total)
