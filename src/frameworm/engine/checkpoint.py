"""Checkpoints that are whole or not there.

A checkpoint is a data file and, written after it, a small JSON manifest with its size and SHA-256. Both go through a
temporary file, fsync and rename, then the folder is synced; `latest` moves last. A checkpoint without a manifest, or
whose data do not match it, does not count, and reading falls back to the one before. Data are read with
`weights_only=True`: nothing in a checkpoint can execute code.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from frameworm.config.schema import CheckpointConfig
from frameworm.errors import CheckpointError
from frameworm.records.atomic import replacing

FORMAT = 1
_LATEST = "latest"


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on disk, by its manifest."""

    step: int
    data: Path
    manifest: Path
    size_bytes: int
    sha256: str

    def read(self) -> dict[str, Any]:
        """Load the state after checking it against the manifest.

        Raises:
            CheckpointError: The data are missing, truncated, changed or not a checkpoint.
        """
        try:
            content = self.data.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{self.data.name} cannot be read: {error.strerror}") from None
        if len(content) != self.size_bytes:
            raise CheckpointError(f"{self.data.name} is truncated: {len(content)} of {self.size_bytes} bytes")
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise CheckpointError(f"{self.data.name} is corrupt: its content does not match its checksum")
        try:
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CheckpointError(f"{self.data.name} is not a checkpoint that can be read safely: {first}") from None
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise CheckpointError(f"{self.data.name} was written by another version of frameworm")
        return state


def list_checkpoints(folder: Path) -> list[StoredCheckpoint]:
    """The checkpoints of a folder that have a readable manifest, oldest first."""
    found = []
    for manifest in folder.glob("step-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            fields = json.loads(manifest.read_text())
            # The file's name is ours, not the manifest's: a manifest cannot point elsewhere.
            data = manifest.with_suffix(".pt")
            found.append(
                StoredCheckpoint(int(fields["step"]), data, manifest, int(fields["bytes"]), str(fields["sha256"]))
            )
    return sorted(found, key=lambda item: item.step)


def load_newest(folder: Path, say: Callable[[str], None]) -> tuple[StoredCheckpoint, dict[str, Any]] | None:
    """The newest checkpoint that is whole, with its state; None when the folder holds none at all.

    Raises:
        CheckpointError: There are checkpoints, but none can be read.
    """
    stored = list_checkpoints(folder)
    if not stored:
        if any(folder.glob("step-*.pt")):
            raise CheckpointError(f"{folder} holds no complete checkpoint: every one lacks its manifest")
        return None
    for checkpoint in reversed(stored):
        try:
            return checkpoint, checkpoint.read()
        except CheckpointError as error:
            say(f"{error}; trying the checkpoint before it")
    raise CheckpointError(f"no checkpoint in {folder} can be read; start afresh in another folder (--out)")


class CheckpointStore:
    """Writes checkpoints into a folder, beside training (`async`) or not (`sync`), and keeps the newest few."""

    def __init__(self, folder: Path, *, keep: int, asynchronous: bool) -> None:
        self.folder = folder
        self.count = 0
        self.stall_s = 0.0
        self.problem: str | None = None
        self._keep = keep
        self._asynchronous = asynchronous
        self._writer: threading.Thread | None = None

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save a state that nobody else will change (see `snapshot`). A disk that refuses does not stop training."""
        begin = perf_counter()
        self.wait()
        if self._asynchronous:
            self._writer = threading.Thread(target=self._write, args=(step, state), name="checkpoint-writer")
            self._writer.start()
        else:
            self._write(step, state)
        self.stall_s += perf_counter() - begin

    def wait(self) -> None:
        """Until the checkpoint being written is durable."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _write(self, step: int, state: dict[str, Any]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            buffer = io.BytesIO()
            torch.save({"format": FORMAT, **state}, buffer)
            content = buffer.getbuffer()
            name = f"step-{step:08d}"
            manifest = {"step": step, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for path, part in (
                (self.folder / f"{name}.pt", content),
                (self.folder / f"{name}.json", json.dumps(manifest).encode()),
                (self.folder / _LATEST, f"{name}\n".encode()),
            ):
                with replacing(path) as file:
                    file.write(part)
            self.count += 1
            self._prune()
        except OSError as error:
            self.problem = f"checkpoint of step {step} could not be written: {error.strerror or error}"

    def _prune(self) -> None:
        for old in list_checkpoints(self.folder)[: -self._keep]:
            # The manifest goes first: without it the data no longer count.
            old.manifest.unlink(missing_ok=True)
            old.data.unlink(missing_ok=True)


def make_store(folder: Path, settings: CheckpointConfig) -> CheckpointStore:
    """The store that a config asks for."""
    return CheckpointStore(folder, keep=settings.keep, asynchronous=settings.mode == "async")


def snapshot(value: Any) -> Any:
    """A copy of nested state on the CPU that shares no memory with the original; shared tensors stay shared."""
    copies: dict[tuple[int, int, tuple[int, ...]], torch.Tensor] = {}

    def copy(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            key = (item.untyped_storage().data_ptr(), int(item.storage_offset()), tuple(item.shape))
            if key[0] == 0 or key not in copies:
                duplicate = item.detach().to("cpu", copy=True)
                if key[0] == 0:
                    return duplicate
                copies[key] = duplicate
            return copies[key]
        if isinstance(item, dict):
            return {name: copy(part) for name, part in item.items()}
        if isinstance(item, (list, tuple)):
            return type(item)(copy(part) for part in item)
        return item

    return copy(value)


def check_same_model(saved: dict[str, Any], model: torch.nn.Module, where: str) -> None:
    """Refuse weights of another model, naming the first thing that differs.

    Raises:
        CheckpointError: A name is missing or unknown, or a shape differs.
    """
    own = model.state_dict()
    for name, tensor in own.items():
        if name not in saved:
            raise CheckpointError(f"{where} is of another model: it has no {name}")
        if isinstance(tensor, torch.Tensor) and saved[name].shape != tensor.shape:
            raise CheckpointError(
                f"{where} is of another model: {name} has shape {tuple(saved[name].shape)} there and "
                f"{tuple(tensor.shape)} here"
            )
    for name in saved:
        if name not in own:
            raise CheckpointError(f"{where} is of another model: {name} is unknown here")
