"""What one rank writes into a checkpoint: a copy of its part of the state, taken between two steps.

Replicated tensors are distributed over the ranks by size; of a sharded tensor each rank takes its own shard. So no rank
copies or writes more than its part.
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
    """Rows of a tensor, copied to an offset in the staging memory."""

    dtype: torch.dtype
    rows_shape: tuple[int, ...]
    size_bytes: int
    place: int
    first_row: int
    shape: tuple[int, ...]  # of the whole tensor


@dataclass
class Snapshot:
    """One rank's part of a checkpoint.

    Attributes:
        pieces: The tensors that this rank writes, by name.
        shared: The state common to all ranks, as JSON; rank 0 has all of it, others only what they own.
        own: This rank's own state, as JSON.
        problem: Why the snapshot failed; None if it did not.
    """

    pieces: dict[str, Piece] = field(default_factory=dict)
    shared: Any = None
    own: Any = None
    problem: str | None = None


@dataclass(frozen=True)
class ShardPlan:
    """The layout of a rank's file, which is the same for every save; only the values change.

    Attributes:
        pieces: The pieces that it lays out.
        layout: Layout of the file.
        described: Dtype, shape, first row and number of rows of each piece, for the manifest.
    """

    pieces: dict[str, Piece]
    layout: Layout
    described: dict[str, tuple[Any, ...]]

    @classmethod
    def of(cls, pieces: dict[str, Piece]) -> ShardPlan:
        """Plan the file for pieces in memory."""
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


# Further state common to all ranks, and further state of this rank.
MoreState = tuple[dict[str, Any], dict[str, Any]]


class _Collector:
    """Assigns names to the tensors of a state; tensors that share the same memory get the same name."""

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
    """Check, without copying anything, that `take_snapshot` can take a state.

    Raises:
        CheckpointError: If it holds something that a checkpoint cannot; the message names it.
    """
    for state in (held.replicated, held.owned, *more):
        collector = _Collector()
        try:
            encode(state, collector.keep)
        except RecursionError:
            raise CheckpointError("a part of the state contains itself") from None
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
    """Copy this rank's part of the state, without communication; all ranks must do so for the same state.

    Args:
        held: Model and optimizer.
        own: This rank's own state.
        staging: Where the copies go.
        rank: This rank.
        world_size: Number of ranks.
        late: Returns the rest of the state. Called once the above is copied, or will be before the next step can change
            it, so it may wait for the device.
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
    more_common, more_own = late()  # even with nothing to write: it may contain a collective
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
    """Assign tensors to ranks so that all write about the same amount; the result is the same on every rank."""
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
