"""The tensors of a model as sizes: whole, sharded, or distributed over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]
BLOCK_BYTES = {"cuda": 512, "cpu": 1}  # allocations are rounded up to a multiple of this


@dataclass(frozen=True)
class ModelShapes:
    """The sizes of a model's tensors.

    Attributes:
        units: Shapes of the trainable parameters, grouped by the units that FSDP gathers at once: the layers, then
            everything else, which exists even if it is empty. A shared parameter appears once.
        fixed_bytes: Frozen parameters and buffers, whole on every device under every strategy.
        element_bytes: Bytes per element of a parameter.
    """

    units: tuple[tuple[Shape, ...], ...]
    fixed_bytes: int = 0
    element_bytes: int = 4

    @classmethod
    def of_count(cls, parameters: int, element_bytes: int = 4) -> ModelShapes:
        """Describe a model of which only the number of parameters is known, assuming that it divides evenly."""
        return cls((((parameters,),),), 0, element_bytes)

    @property
    def shapes(self) -> list[Shape]:
        """All shapes, in order."""
        return [shape for unit in self.units for shape in unit]

    @property
    def parameters(self) -> int:
        """Number of trainable parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    def whole_bytes(self, device: str) -> int:
        """Return the bytes of one copy of the trainable parameters."""
        return sum(block(math.prod(shape) * self.element_bytes, device) for shape in self.shapes)

    def shard_bytes(self, world_size: int, device: str) -> int:
        """Return the bytes of the first rank's shard if every parameter is split along its first dimension."""
        total = 0
        for shape in self.shapes:
            rows = shape[0] if shape else 1
            total += block(-(-rows // world_size) * math.prod(shape[1:]) * self.element_bytes, device)
        return total

    def unit_bytes(self, layer_element_bytes: int | None = None) -> list[int]:
        """Return the size of each whole unit.

        Args:
            layer_element_bytes: Bytes per element in layers, if they are gathered in another type.
        """
        widths = [layer_element_bytes or self.element_bytes] * (len(self.units) - 1) + [self.element_bytes]
        return [sum(math.prod(shape) for shape in unit) * width for unit, width in zip(self.units, widths, strict=True)]


def block(size_bytes: int, device: str) -> int:
    """Return the bytes that the allocator counts for a tensor of that size."""
    unit = BLOCK_BYTES[device]
    return -(-size_bytes // unit) * unit


def largest_partition(sizes: Sequence[int], world_size: int) -> int:
    """Elements on the fullest rank if whole tensors are distributed, largest first, always to the emptiest rank."""
    loads = [0] * world_size
    for size in sorted(sizes, reverse=True):
        emptiest = loads.index(min(loads))
        loads[emptiest] += size
    return max(loads)
