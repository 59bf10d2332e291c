"""Checkpoints on disk: finding the newest that is whole, and reading from it what a rank needs.

A checkpoint is a folder of safetensors files and a manifest (`store` says how it comes about). One whose
files do not match its manifest does not count, and reading falls back to the one before. Whoever reads it may be of
any strategy and world size: tensors are read by rows, from whichever files hold them. A checkpoint is data: nothing in
it can execute code, and nothing outside of its folder is read.
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
    """The state in a checkpoint; its tensors are stored ones, read when somebody asks for them.

    Attributes:
        shared: `model` and `optimizer` by parameter names, `schedule`, `precision`, `progress`; `loss` and `ema` (the
            averaged weights, by parameter names) if there are any.
        ranks: What was each rank's own.
    """

    shared: dict[str, Any]
    ranks: list[dict[str, Any]]


@dataclass(frozen=True, order=True)
class StoredCheckpoint:
    """A checkpoint on disk, by its folder."""

    step: int
    attempt: int
    path: Path

    def check(self, rank: int = 0, world_size: int = 1) -> Manifest:
        """Compare the files with the manifest: all sizes, and the checksums of this rank's share of the files.

        Raises:
            CheckpointError: Something is missing, truncated, changed or not a checkpoint.
        """
        path = self.path / manifests.NAME
        if path.is_symlink():
            raise CheckpointError(f"{self.path.name}/{path.name} is no plain file")
        try:
            found = Manifest.parse(read_text(path, manifests.MOST_BYTES))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise CheckpointError(f"{self.path.name}/{path.name} cannot be read: {why}") from None
        except CheckpointError as error:
            raise CheckpointError(f"{self.path.name}: {error}") from None
        if found.step != self.step:
            raise CheckpointError(f"{self.path.name} holds the checkpoint of step {found.step}")
        for place, (name, file) in enumerate(found.files.items()):
            check_file(self.path / name, file, content=place % world_size == rank)
        return found

    def read(self, manifest: Manifest | None = None) -> SavedState:
        """The state; without a manifest that `check` gave, all files are checked first.

        Raises:
            CheckpointError: It is not whole.
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
    """The checkpoints of a folder that have a manifest, oldest first."""
    return [StoredCheckpoint(*item) for item in stored_folders(folder)]


def load_newest(folder: Path, say: Callable[[str], None]) -> tuple[StoredCheckpoint, SavedState] | None:
    """The newest checkpoint that is whole, with its state; None when the folder holds none at all.

    All ranks must call it and get the same one. Each file is read through by one of them only, for its checksum.

    Args:
        folder: Where the checkpoints are.
        say: Told on rank 0 of those that were passed over.

    Raises:
        CheckpointError: There are checkpoints, but none can be read.
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
    """This rank's share of the check of a checkpoint that rank 0 has seen."""
    for checkpoint in list_checkpoints(folder):
        if checkpoint.path.name == name:
            return checkpoint, checkpoint.check(_rank(), dist.get_world_size() if is_distributed() else 1)
    raise CheckpointError(
        f"rank {_rank()} does not see {name} in {folder}: the run folder must be on storage that all machines share"
    )


def _rank() -> int:
    return dist.get_rank() if is_distributed() else 0


def check_same_model(saved: dict[str, Any], model: torch.nn.Module, where: str) -> None:
    """Refuse weights of another model, naming the first thing that differs.

    Raises:
        CheckpointError: A name is missing or unknown, or a shape differs.
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
