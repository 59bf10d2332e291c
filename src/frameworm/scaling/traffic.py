"""The cost of sending a bucket of gradients: on the wire, in the codec, and on the processor, by method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from frameworm.scaling.fabrics import Network

OFF = "off"
METHODS = ("off", "fp16", "bf16", "int8", "int4", "topk", "powersgd")
ONLY_ROUNDING = ("fp16", "bf16", "int8", "int4")

# Bytes per value including the blocks' scales: one float32 per 256 values in int8, per 128 in int4.
_QUANTIZED_BYTES = {"int8": 1 + 4 / 256, "int4": 0.5 + 4 / 128}
_HALF_BYTES = 2
_TOPK_BYTES = 3  # index and bf16 value
_FLOAT_BYTES = 4
_WORTH_FACTOR = 2  # powersgd sends a matrix whole unless it shrinks by this factor


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of one parameter: its size, and when in backward it is ready."""

    size_bytes: int
    ready_s: float  # from the start of the backward that sends it
    values: int
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, size_bytes: int, ready_s: float) -> Gradient:
        """Make a float32 gradient of unknown shape."""
        return cls(size_bytes, ready_s, size_bytes // _FLOAT_BYTES)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are sent together; ready when the last of them is."""

    gradients: tuple[Gradient, ...]
    ready_s: float
    size_bytes: int
    values: int


class Sending(NamedTuple):
    """The cost of reducing one bucket."""

    encode_s: float
    wire_s: float
    decode_s: float
    host_s: float  # processor time taken from computing, if they share cores
    sent_bytes: float  # by one rank

    @property
    def total_s(self) -> float:
        """Sum of encoding, sending and decoding."""
        return self.encode_s + self.wire_s + self.decode_s


@dataclass(frozen=True)
class Codec:
    """How gradients are compressed, and what that costs.

    Attributes:
        method: One of `METHODS`.
        seconds_per_value: By method, measured for encoding and decoding together.
        ratio: Fraction of the values that topk keeps.
        powersgd_rank: Columns of powersgd's matrices.
    """

    method: str = OFF
    seconds_per_value: Mapping[str, float] = field(default_factory=dict)
    ratio: float = 0.01
    powersgd_rank: int = 1

    def send(self, bucket: Bucket, network: Network, world_size: int) -> Sending:
        """Return the cost of one bucket."""
        if world_size <= 1 or bucket.size_bytes == 0:
            return Sending(0.0, 0.0, 0.0, 0.0, 0.0)
        ring = 2 * (world_size - 1) / world_size
        if self.method == OFF:
            size: float = bucket.size_bytes
            return self._sum(bucket, network, world_size, [("all_reduce", size)], ring * size)
        if self.method in ("fp16", "bf16"):
            size = _HALF_BYTES * bucket.values
            return self._sum(bucket, network, world_size, [("all_reduce", size)], ring * size)
        if self.method in _QUANTIZED_BYTES:
            size = _QUANTIZED_BYTES[self.method] * bucket.values
            parts = [("all_to_all", size), ("all_gather", size)]
            return self._sum(bucket, network, world_size, parts, ring * size, own_exchange=True)
        if self.method == "topk":
            size = _TOPK_BYTES * max(1.0, self.ratio * bucket.values)
            parts = [("all_gather", size * world_size)]
            return self._sum(bucket, network, world_size, parts, (world_size - 1) * size, own_exchange=True)
        left, right = matrix_values([gradient.shape or (gradient.values,) for gradient in bucket.gradients], self)
        parts = [("all_reduce", float(_FLOAT_BYTES * values)) for values in (left, right) if values]
        return self._sum(bucket, network, world_size, parts, ring * sum(size for _, size in parts))

    def _sum(
        self,
        bucket: Bucket,
        network: Network,
        world_size: int,
        parts: Sequence[tuple[str, float]],
        sent_bytes: float,
        own_exchange: bool = False,
    ) -> Sending:
        codec_s = bucket.values * self.seconds_per_value.get(self.method, 0.0)
        ask = network.exchange_seconds if own_exchange else network.seconds
        wire_s = sum(ask(kind, size, world_size) for kind, size in parts)
        host_s = sum(network.host_seconds(kind, size, world_size) for kind, size in parts)
        return Sending(codec_s / 2, wire_s, codec_s / 2, min(host_s, wire_s) + codec_s, sent_bytes)


def matrix_values(shapes: Sequence[tuple[int, ...]], codec: Codec) -> tuple[int, int]:
    """Values of powersgd's two exchanges; non-matrices, and matrices too thin to gain, go whole with the first."""
    left = right = 0
    for shape in shapes:
        values = 1
        for side in shape:
            values *= side
        rows = shape[0] if shape else 1
        if len(shape) < 2 or _WORTH_FACTOR * (rows + values // rows) * codec.powersgd_rank >= values:
            left += values
            continue
        left += rows * codec.powersgd_rank
        right += values // rows * codec.powersgd_rank
    return left, right


def divide_into_buckets(gradients: Sequence[Gradient], first_bytes: float, cap_bytes: float) -> list[Bucket]:
    """Divide into DDP's buckets: gradients in the order they become ready; the one that fills a bucket closes it."""
    buckets: list[Bucket] = []
    held: list[Gradient] = []
    size = 0
    for gradient in sorted(gradients, key=lambda item: item.ready_s):
        held.append(gradient)
        size += gradient.size_bytes
        if size >= (first_bytes if not buckets else cap_bytes):
            buckets.append(_bucket(held))
            held, size = [], 0
    if held:
        buckets.append(_bucket(held))
    return buckets


def _bucket(gradients: Sequence[Gradient]) -> Bucket:
    return Bucket(
        tuple(gradients),
        max(gradient.ready_s for gradient in gradients),
        sum(gradient.size_bytes for gradient in gradients),
        sum(gradient.values for gradient in gradients),
    )
