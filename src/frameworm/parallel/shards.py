"""Convert between whole tensors and the row shards that a rank holds, as torch's fully_shard divides them."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:  # imported late elsewhere: it loads the whole compiler
    from torch.distributed.tensor import DTensor


SAFETENSORS_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class HeldState:
    """The part of `model` and `optimizer` that this rank holds, by parameter names; tensors may be the live ones.

    Attributes:
        replicated: Entries that are equal on every rank, and DTensors of which each rank holds its own shard.
        owned: Entries that no other rank holds.
    """

    replicated: dict[str, Any]
    owned: dict[str, Any] = field(default_factory=dict)


class StoredTensor(ABC):
    """A tensor in a checkpoint that has not been read yet; it can be read whole or by rows."""

    shape: torch.Size
    dtype: torch.dtype

    @abstractmethod
    def read(self, first_row: int = 0, rows: int | None = None) -> torch.Tensor:
        """Read these rows, by default all, into host memory that nothing else uses."""


@dataclass(frozen=True)
class StoredArray:
    """A numpy array in a checkpoint, stored as a tensor."""

    tensor: StoredTensor


@dataclass(frozen=True)
class StoredSparse:
    """A sparse tensor in a checkpoint, stored as two dense ones."""

    indices: StoredTensor
    values: StoredTensor
    size: list[int]
    coalesced: bool


def is_part(tensor: object) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, without importing the module: if that is not loaded, there are none."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory; for a plain tensor, the tensor itself."""
    return tensor.to_local() if is_part(tensor) else tensor


def first_row(tensor: DTensor) -> int:
    """The row of the whole tensor at which this rank's part begins."""
    from torch.distributed.tensor import Shard

    assert tuple(tensor.placements) == (Shard(0),), tensor.placements
    rows = tensor.shape[0]
    # As Tensor.chunk: the first ranks get equal parts, the last one fewer rows, and some may get none.
    return min(rows, tensor.device_mesh.get_local_rank() * -(-rows // tensor.device_mesh.size()))


def shard_of(value: torch.Tensor | StoredTensor, like: DTensor) -> DTensor:
    """This rank's shard of a whole value, placed like `like`; a copy, made without communication."""
    own = like.to_local()
    first, rows = first_row(like), own.shape[0]
    part = value.read(first, rows) if isinstance(value, StoredTensor) else value[first : first + rows].clone()
    assert part.shape == own.shape, (part.shape, own.shape)
    return like_part(part.to(own.device), like)


def like_part(part: torch.Tensor, like: DTensor) -> DTensor:
    """The sharded tensor of which this rank holds `part`, placed like `like`; no copy, no communication."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def loaded(state: Any) -> Any:
    """Read all stored tensors in a nested state; a tensor that occurs several times is read once."""
    known: dict[int, torch.Tensor] = {}

    def load(item: Any) -> Any:
        if isinstance(item, StoredTensor):
            if id(item) not in known:
                known[id(item)] = item.read()
            return known[id(item)]
        if isinstance(item, StoredArray):
            return load(item.tensor).numpy()
        if isinstance(item, StoredSparse):
            return torch.sparse_coo_tensor(
                load(item.indices),
                load(item.values),
                item.size,
                is_coalesced=item.coalesced,
                check_invariants=True,
            )
        if isinstance(item, dict):
            return {name: load(part) for name, part in item.items()}
        if isinstance(item, (list, tuple)):
            return type(item)(load(part) for part in item)
        return item

    return load(state)
