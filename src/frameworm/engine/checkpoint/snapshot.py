"""What one rank writes into a checkpoint: a copy of its share of the state, taken between two steps.

What all ranks hold alike is spread over them by size; of a divided tensor each takes the part that it holds. So no rank
ever copies or writes more than its share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from frameworm.engine.checkpoint.file_writer import Layout, Stored, lay_out
from frameworm.engine.checkpoint.manifest import merge
from frameworm.engine.checkpoint.shard_reader import type_name
from frameworm.engine.checkpoint.staging import Staging
from frameworm.engine.checkpoint.state_json import Path, encode
from frameworm.errors import CheckpointError
from frameworm.parallel.shards import HeldState, first_row, is_part, own_part


@dataclass(frozen=True)
class Piece:
    """Rows of a tensor, copied to a place in the staging memory."""

    dtype: torch.dtype
    rows_shape: tuple[int, ...]
    size_bytes: int
    place: int
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


@dataclass(frozen=True)
class SharePlan:
    """The file of a share, which is the same from save to save; only the values change.

    Attributes:
        pieces: What it is the plan of.
        layout: The file.
        described: Type, shape, first row and rows of each, for the manifest.
    """

    pieces: dict[str, Piece]
    layout: Layout
    described: dict[str, tuple[Any, ...]]

    @classmethod
    def of(cls, pieces: dict[str, Piece]) -> SharePlan:
        """The plan of pieces in memory."""
        stored = {
            name: Stored(
                type_name(piece.dtype, name), piece.dtype.itemsize, piece.rows_shape, piece.place, piece.size_bytes
            )
            for name, piece in pieces.items()
        }
        described = {
            name: (stored[name].dtype, piece.shape, piece.first_row, piece.rows_shape[0] if piece.shape else 1)
            for name, piece in pieces.items()
        }
        return cls(pieces, lay_out(stored), described)


# What else is everybody's, and what else is this rank's.
MoreState = tuple[dict[str, Any], dict[str, Any]]


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


def check_state(held: HeldState, *more: Any) -> None:
    """Refuse a state that `take_snapshot` could not take; nothing is copied.

    Raises:
        CheckpointError: Names what no checkpoint can hold.
    """
    for state in (held.replicated, held.owned, *more):
        collector = _Collector()
        try:
            encode(state, collector.keep)
        except RecursionError:
            raise CheckpointError("a part of the state holds itself") from None
        for name, tensor in collector.tensors.items():
            type_name(tensor.dtype, name)


def take_snapshot(
    held: HeldState,
    own: dict[str, Any],
    staging: Staging,
    rank: int,
    world_size: int,
    late: Callable[[], MoreState] = lambda: ({}, {}),
) -> Snapshot:
    """A copy of this rank's share; nobody is asked, but all ranks must take theirs of the same state.

    Args:
        held: Model and optimizer.
        own: What is this rank's.
        staging: Where the copies go.
        rank: This rank.
        world_size: Number of ranks.
        late: Gives the rest of the state. Called when all above has been copied, or will be before the next step can
            change it: it may wait for the device.
    """
    snapshot = Snapshot()
    try:
        alike, alone, personal = _Collector(), _Collector(), _Collector(f"rank-{rank}/")
        shared = encode(held.replicated, alike.keep)
        owned = encode(held.owned, alone.keep)
        own_outline = encode(own, personal.keep)
        whole = {name: item.nbytes for name, item in alike.tensors.items() if not is_part(item)}
        writers = spread(whole, world_size)
        mine = {name: item for name, item in alike.tensors.items() if writers.get(name, rank) == rank}
        staging.begin()
        snapshot.pieces = _copies({**mine, **alone.tensors, **personal.tensors}, staging)
    except (CheckpointError, OSError) as error:
        snapshot.problem = _problem(error)
    more_common, more_own = late()  # also where there is nothing to write: it may be a meeting of all ranks
    if snapshot.problem is not None:
        return snapshot
    try:
        later_alike, later_own = _Collector(), _Collector(f"rank-{rank}/late/")
        shared = merge(shared, encode(more_common, later_alike.keep))
        own_outline = merge(own_outline, encode(more_own, later_own.keep))
        snapshot.pieces |= _copies({**(later_alike.tensors if rank == 0 else {}), **later_own.tensors}, staging)
    except (CheckpointError, OSError) as error:
        return Snapshot(problem=_problem(error))
    snapshot.shared = {"replicated": shared if rank == 0 else {}, "owned": owned}
    snapshot.own = own_outline
    return snapshot


def spread(sizes: dict[str, int], world_size: int) -> dict[str, int]:
    """Which rank writes what, so that all have about as much; the same on every rank."""
    loads = [0] * world_size
    writers = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        writers[name] = min(range(world_size), key=loads.__getitem__)
        loads[writers[name]] += sizes[name]
    return writers


def _copies(tensors: dict[str, torch.Tensor], staging: Staging) -> dict[str, Piece]:
    parts = {name: own_part(item).detach() for name, item in tensors.items()}
    places = staging.copy(parts)
    return {
        name: Piece(
            part.dtype,
            tuple(part.shape),
            part.nbytes,
            places[name],
            _first_row(tensors[name]),
            tuple(tensors[name].shape),
        )
        for name, part in parts.items()
    }


def _first_row(tensor: torch.Tensor) -> int:
    return first_row(tensor) if is_part(tensor) else 0


def _problem(error: Exception) -> str:
    return f"no memory for a copy of the state: {error.strerror}" if isinstance(error, OSError) else str(error)
