"""What one rank writes into a checkpoint: a copy of its share of the state, taken between two steps.

What all ranks hold alike is spread over them by size; of a divided tensor each takes the part that it holds. So no rank
ever copies or writes more than its share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from frameworm.engine.outline import Path, encode
from frameworm.errors import CheckpointError
from frameworm.parallel.shards import HeldState, first_row, own_part


@dataclass(frozen=True)
class Piece:
    """Rows of a tensor, in host memory that nobody else uses."""

    rows: torch.Tensor
    first_row: int
    shape: tuple[int, ...]  # of the whole tensor


@dataclass
class Snapshot:
    """One rank's share of a checkpoint.

    Attributes:
        pieces: What this rank writes, by the tensors' names.
        shared: The state that is everybody's, as JSON; rank 0 gives all of it, the others what only they know.
        own: The state that is this rank's, as JSON.
        problem: Why there is none, if so.
    """

    pieces: dict[str, Piece] = field(default_factory=dict)
    shared: Any = None
    own: Any = None
    problem: str | None = None


class _Collector:
    """Names for the tensors of a state; those that are the same memory get the same name."""

    def __init__(self, prefix: str = "") -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._prefix = prefix
        self._known: dict[tuple[Any, ...], str] = {}

    def keep(self, path: Path, tensor: torch.Tensor) -> str:
        if tensor.layout is not torch.strided:
            raise CheckpointError(f"{'/'.join(path)} is a {tensor.layout} tensor, which a checkpoint cannot hold")
        part = own_part(tensor)
        place = part.untyped_storage().data_ptr()
        key = (place, part.storage_offset(), tensor.shape, part.shape, part.stride(), part.dtype)
        if place and key in self._known:
            return self._known[key]
        name = self._prefix + "/".join(path)
        while name in self.tensors:
            name += "~"
        self._known[key] = name
        self.tensors[name] = tensor
        return name


def take_snapshot(held: HeldState, common: dict[str, Any], own: dict[str, Any], rank: int, world_size: int) -> Snapshot:
    """A copy of this rank's share; nobody is asked, but all ranks must take theirs of the same state.

    Args:
        held: Model and optimizer.
        common: What else is everybody's.
        own: What is this rank's.
        rank: This rank.
        world_size: Number of ranks.
    """
    alike, alone, personal = _Collector(), _Collector(), _Collector(f"rank-{rank}/")
    try:
        shared = encode({**held.replicated, **common}, alike.keep)
        owned = encode(held.owned, alone.keep)
        personal_outline = encode(own, personal.keep)
    except CheckpointError as error:
        return Snapshot(problem=str(error))
    pieces = {name: _piece(tensor) for name, tensor in (*alone.tensors.items(), *personal.tensors.items())}
    whole = {name: item.nbytes for name, item in alike.tensors.items() if not isinstance(item, DTensor)}
    writers = spread(whole, world_size)
    for name, tensor in alike.tensors.items():
        if writers.get(name, rank) == rank:
            pieces[name] = _piece(tensor)
    return Snapshot(pieces, {"replicated": shared if rank == 0 else {}, "owned": owned}, personal_outline)


def spread(sizes: dict[str, int], world_size: int) -> dict[str, int]:
    """Which rank writes what, so that all have about as much; the same on every rank."""
    loads = [0] * world_size
    writers = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        writers[name] = min(range(world_size), key=loads.__getitem__)
        loads[writers[name]] += sizes[name]
    return writers


def _piece(tensor: torch.Tensor) -> Piece:
    part = own_part(tensor).detach()
    begin = first_row(tensor) if isinstance(tensor, DTensor) else 0
    return Piece(torch.empty(part.shape, dtype=part.dtype).copy_(part), begin, tuple(tensor.shape))
