"""Find the newest complete checkpoint on disk and read from it what a rank needs.

A checkpoint is a folder of safetensors files and a manifest (`store` describes how it is written). If its files do not
match its manifest, the checkpoint before it is used. It can be read with any strategy and world size: tensors are read
by rows, from the files that hold them. A checkpoint is data: nothing in it can execute code, and nothing outside its
folder is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from frameworm.engine.checkpoint import manifest as manifests
from frameworm.engine.checkpoint.commit import stored_folders
from frameworm.engine.checkpoint.manifest import Manifest
from frameworm.engine.checkpoint.shard_reader import ShardReader, check_file
from frameworm.engine.checkpoint.state_json import decode
from frameworm.errors import CheckpointError
from frameworm.launch.process_group import broadcast_object, gather_objects, is_distributed
from frameworm.records.reading import read_text

_PARTS = ("model", "optimizer", "schedule", "precision", "progress")
_OPTIONAL = ("loss", "ema")


@dataclass(frozen=True)
class SavedState:
    """The state in a checkpoint; its tensors are read from disk on demand.

    Attributes:
        shared: `model` and `optimizer` by parameter name, `schedule`, `precision`, `progress`; `loss` and `ema` (the
            averaged weights by parameter name) if present.
        ranks: Each rank's own state.
    """

    shared: dict[str, Any]
    ranks: list[dict[str, Any]]


@dataclass(frozen=True, order=True)
class StoredCheckpoint:
    """A checkpoint folder on disk."""

    step: int
    attempt: int
    path: Path

    def check(self, rank: int = 0, world_size: int = 1) -> Manifest:
        """Compare the files with the manifest: the sizes of all, and the checksums of this rank's fraction of them.

        Raises:
            CheckpointError: If a file is missing, truncated or changed, or this is not a checkpoint.
        """
        path = self.path / manifests.NAME
        if path.is_symlink():
            raise CheckpointError(f"{self.path.name}/{path.name} is not a regular file")
        try:
            found = Manifest.parse(read_text(path, manifests.MOST_BYTES))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise CheckpointError(f"{self.path.name}/{path.name} cannot be read: {why}") from None
        except CheckpointError as error:
            raise CheckpointError(f"{self.path.name}: {error}") from None
        if found.step != self.step:
            raise CheckpointError(f"{self.path.name} holds the checkpoint of step {found.step}")
        for place, (name, file) in enumerate(found.files.items()):
            check_file(self.path / name, file, content=place % world_size == rank)
        return found

    def read(self, manifest: Manifest | None = None) -> SavedState:
        """Read the state; without a manifest from `check`, all files are checked first.

        Raises:
            CheckpointError: If the checkpoint is incomplete or corrupt.
        """
        manifest = manifest or self.check()
        reader = ShardReader(self.path, manifest)
        try:
            shared = decode(manifest.shared, reader.tensor)
            ranks = decode(manifest.ranks, reader.tensor)
        except RecursionError:
            raise CheckpointError(f"{self.path.name}: its manifest is nested too deeply") from None
        missing = [name for name in _PARTS if not isinstance(shared.get(name), dict)]
        missing += [name for name in _OPTIONAL if not isinstance(shared.get(name, {}), dict)]
        if missing or not ranks or not all(isinstance(item, dict) for item in ranks):
            raise CheckpointError(f"{self.path.name} has no {missing[0] if missing else 'state of the ranks'}")
        return SavedState(shared, ranks)


def list_checkpoints(folder: Path) -> list[StoredCheckpoint]:
    """List the checkpoints of a folder that have a manifest, oldest first."""
    return [StoredCheckpoint(*item) for item in stored_folders(folder)]


def load_newest(folder: Path, say: Callable[[str], None]) -> tuple[StoredCheckpoint, SavedState] | None:
    """Load the newest complete checkpoint with its state; None if the folder holds no checkpoint at all.

    All ranks must call it and get the same checkpoint. Each file's checksum is verified by one rank only.

    Args:
        folder: The folder of all checkpoints.
        say: Called on rank 0 with a message about each checkpoint that was skipped.

    Raises:
        CheckpointError: If there are checkpoints, but none can be read.
    """
    names = broadcast_object([item.path.name for item in list_checkpoints(folder)])
    if not names:
        if broadcast_object(any(folder.glob("step-*"))):
            raise CheckpointError(
                f"{folder} holds no complete checkpoint of this version: none has a manifest in a folder of its own "
                "(step-*.pt are of an earlier version); start afresh in another folder (--out)"
            )
        return None
    for name in reversed(names):
        problem = manifest = None
        try:
            checkpoint, manifest = _check(folder, name)
        except CheckpointError as error:
            problem = str(error)
        problems = broadcast_object(gather_objects(problem)) or []
        first = next((item for item in problems if item is not None), None)
        if first is None:
            return checkpoint, checkpoint.read(manifest)
        if _rank() == 0:
            say(f"{first}; trying the checkpoint before it")
    raise CheckpointError(f"no checkpoint in {folder} can be read; start afresh in another folder (--out)")


def _check(folder: Path, name: str) -> tuple[StoredCheckpoint, Manifest]:
    """Check this rank's fraction of the files of a checkpoint that rank 0 has found."""
    for checkpoint in list_checkpoints(folder):
        if checkpoint.path.name == name:
            return checkpoint, checkpoint.check(_rank(), dist.get_world_size() if is_distributed() else 1)
    raise CheckpointError(
        f"rank {_rank()} does not see {name} in {folder}: the run folder must be on storage that all machines share"
    )


def _rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def check_same_model(saved: dict[str, Any], model: torch.nn.Module, where: str) -> None:
    """Check that saved weights belong to this model.

    Raises:
        CheckpointError: If a name is missing or unknown, or a shape differs; the message names the first difference.
    """
    own = model.state_dict()
    for name, tensor in own.items():
        if name not in saved:
            raise CheckpointError(f"{where} is of another model: it has no {name}")
        found = getattr(saved[name], "shape", ())
        if isinstance(tensor, torch.Tensor) and found != tensor.shape:
            raise CheckpointError(
                f"{where} is of another model: {name} has shape {tuple(found)} there and {tuple(tensor.shape)} here"
            )
    for name in saved:
        if name not in own:
            raise CheckpointError(f"{where} is of another model: {name} is unknown here")
