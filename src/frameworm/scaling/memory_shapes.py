"""The tensors of a model as sizes: whole, in shards, or dealt out to ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]
BLOCK_BYTES = {"cuda": 512, "cpu": 1}  # what an allocation is rounded up to


@dataclass(frozen=True)
class ModelShapes:
    """The tensors of a model, as far as their sizes matter.

    Attributes:
        units: Shapes of the trainable parameters, by the unit that FSDP gathers at once: the layers, then all else,
            which is there even if it is empty. A shared parameter is there once.
        fixed_bytes: Frozen parameters and buffers, whole on every device under every strategy.
        element_bytes: Of a parameter.
    """

    units: tuple[tuple[Shape, ...], ...]
    fixed_bytes: int = 0
    element_bytes: int = 4

    @classmethod
    def of_count(cls, parameters: int, element_bytes: int = 4) -> ModelShapes:
        """A model of which only the number of parameters is known; taken to divide evenly."""
        return cls((((parameters,),),), 0, element_bytes)

    @property
    def shapes(self) -> list[Shape]:
        """All of them, in order."""
        return [shape for unit in self.units for shape in unit]

    @property
    def parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    def whole_bytes(self, device: str) -> int:
        """One copy of the trainable parameters."""
        return sum(block(math.prod(shape) * self.element_bytes, device) for shape in self.shapes)

    def shard_bytes(self, world_size: int, device: str) -> int:
        """The first rank's part where every parameter is cut along its first dimension."""
        total = 0
        for shape in self.shapes:
            rows = shape[0] if shape else 1
            total += block(-(-rows // world_size) * math.prod(shape[1:]) * self.element_bytes, device)
        return total

    def unit_bytes(self, layer_element_bytes: int | None = None) -> list[int]:
        """Size of each unit when whole.

        Args:
            layer_element_bytes: Of a parameter in a layer, where layers are gathered in another type.
        """
        widths = [layer_element_bytes or self.element_bytes] * (len(self.units) - 1) + [self.element_bytes]
        return [sum(math.prod(shape) for shape in unit) * width for unit, width in zip(self.units, widths, strict=True)]


def block(size_bytes: int, device: str) -> int:
    """What the allocator counts for a tensor of that size."""
    unit = BLOCK_BYTES[device]
    return -(-size_bytes // unit) * unit


def largest_partition(sizes: Sequence[int], world_size: int) -> int:
    """Elements on the fullest rank when whole tensors are dealt out, largest first, always to the emptiest rank."""
    loads = [0] * world_size
    for size in sorted(sizes, reverse=True):
        emptiest = loads.index(min(loads))
        loads[emptiest] += size
    return max(loads)
