"""Turn what the ranks wrote into a checkpoint: manifest, rename, `latest`, then pruning. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from frameworm.engine.checkpoint import manifest as manifests
from frameworm.engine.checkpoint.manifest import Manifest, assemble
from frameworm.errors import CheckpointError
from frameworm.records.atomic import refuse_link, replacing, sync_folder
from frameworm.records.reading import read_text

if TYPE_CHECKING:  # the writer process needs no config
    from frameworm.config.checkpoint_section import CheckpointConfig

_LATEST = "latest"
_Item = TypeVar("_Item")
# The same step may be saved again after a resume: the old one is removed once the new one is durable.
_FOLDER_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep.

    Attributes:
        keep: How many of the newest.
        keep_best: How many of the best in addition, among those taken at the end of an epoch.
        metric: The metric that ranks them.
        highest: Whether higher is better.
    """

    keep: int = 3
    keep_best: int = 0
    metric: str = "val_loss"
    highest: bool = False

    @classmethod
    def of(cls, settings: CheckpointConfig) -> Retention:
        """Create from a config."""
        return cls(settings.keep, settings.keep_best, settings.metric, settings.prefers_higher)


@dataclass(frozen=True)
class CommitOrder:
    """Everything needed to turn the files of all ranks into a checkpoint.

    Attributes:
        folder: The folder of all checkpoints.
        draft: The folder where the ranks wrote.
        step: The step after which the state was taken.
        reports: The ranks' reports on their files.
        retention: Which other checkpoints to keep.
        visible_s: How long a network file system may take to show what another machine wrote.
    """

    folder: str
    draft: str
    step: int
    reports: list[dict[str, Any]]
    retention: Retention
    visible_s: float = 60.0

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**vars(self), "retention": asdict(self.retention)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> CommitOrder:
        """Restore from `to_json`."""
        return cls(**{**fields, "retention": Retention(**fields["retention"])})


def stored_folders(folder: Path) -> list[tuple[int, int, Path]]:
    """List step, attempt and path of the checkpoints in a folder that have a manifest, oldest first."""
    found = []
    for path in folder.glob("step-*"):
        match = _FOLDER_NAME.fullmatch(path.name)
        if match and not path.is_symlink() and (path / manifests.NAME).is_file():
            found.append((int(match[1]), int(match[2] or 0), path))
    return sorted(found)


def commit(order: CommitOrder) -> str:
    """Commit what the ranks wrote as a checkpoint, durable before `latest` names it; return its name.

    Raises:
        CheckpointError: If the files are missing or do not form a complete state.
        RunFolderError: If the draft is a symbolic link.
        OSError: If writing fails.
    """
    folder, draft = Path(order.folder), Path(order.draft)
    manifest = assemble(order.step, order.reports)
    text = manifest.dump()
    refuse_link(draft)
    target = None if draft.is_dir() else _already_there(folder, order.step, text)
    if target is None:
        _wait_for_files(draft, manifest, order.visible_s)
        with replacing(draft / manifests.NAME) as file:
            file.write(text.encode())
        target = _free_name(folder, order.step)
        draft.rename(target)
        sync_folder(folder)
        sync_folder(folder.parent)
    with replacing(folder / _LATEST) as file:
        file.write(f"{target.name}\n".encode())
    prune(folder, target, order.retention)
    return target.name


def _already_there(folder: Path, step: int, text: str) -> Path | None:
    """Return the checkpoint if an earlier attempt to commit it died only after renaming it."""
    for number, _, path in stored_folders(folder):
        if number == step and read_text(path / manifests.NAME, manifests.MOST_BYTES) == text:
            return path
    return None


def _free_name(folder: Path, step: int) -> Path:
    path = folder / f"step-{step:08d}"
    attempt = 1
    while os.path.lexists(path):
        path = folder / f"step-{step:08d}.{attempt}"
        attempt += 1
    return path


def prune(folder: Path, newest: Path, retention: Retention) -> None:
    """Remove checkpoints not to be kept and what earlier runs left half written; the newest always stays."""
    for path in superseded(stored_folders(folder), newest, retention, lambda path: figure_of(path, retention.metric)):
        # Delete the manifest first: without it the folder is no checkpoint.
        with contextlib.suppress(OSError):
            (path / manifests.NAME).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    for left in folder.glob(".step-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    for path in folder.glob("step-*"):  # left by a process killed while removing them
        ours = _FOLDER_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        if ours and not (path / manifests.NAME).exists():
            shutil.rmtree(path, ignore_errors=True)


def superseded(
    stored: Sequence[tuple[int, int, _Item]],
    newest: _Item,
    retention: Retention,
    figure: Callable[[_Item], float | None],
) -> list[_Item]:
    """Return those of the stored checkpoints (step, attempt, item; oldest first) that are not to be kept."""
    step = next(number for number, _, item in stored if item == newest)
    again = [item for number, _, item in stored if number == step and item != newest]
    others = [item for _, _, item in stored if item not in again]
    kept = {newest, *others[-retention.keep :], *_best(others, retention, figure)}
    return [*again, *(item for item in others if item not in kept)]


def _best(items: Sequence[_Item], retention: Retention, figure: Callable[[_Item], float | None]) -> list[_Item]:
    if not retention.keep_best:
        return []
    known = [(found, item) for item in items if (found := figure(item)) is not None]
    known.sort(key=lambda pair: pair[0], reverse=retention.highest)
    return [item for _, item in known[: retention.keep_best]]


def figure_of(path: Path, metric: str) -> float | None:
    """Metric of the epoch that ended with a checkpoint; None for a checkpoint from the middle of an epoch."""
    try:
        return figure_in(read_text(path / manifests.NAME, manifests.MOST_BYTES), metric)
    except (OSError, ValueError):
        return None


def figure_in(manifest: str, metric: str) -> float | None:
    """Like `figure_of`, from the text of the manifest."""
    try:
        progress = json.loads(manifest)["content"]["shared"]["progress"]
        if progress["step_in_epoch"] or not progress["epochs"]:
            return None
        last = progress["epochs"][-1]
        value = last[metric] if metric in last else last["metrics"][metric]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _wait_for_files(draft: Path, manifest: Manifest, visible_s: float) -> None:
    """Remove foreign files, then wait until everything that the ranks wrote is visible here.

    Raises:
        CheckpointError: If files are still missing after `visible_s`.
    """
    for path in draft.iterdir():
        if path.name not in manifest.files:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    deadline = time.monotonic() + visible_s
    for name, file in manifest.files.items():
        while True:
            try:
                size = (draft / name).lstat().st_size
                problem = None if size == file.size_bytes else f"{size} of {file.size_bytes} bytes of {name}"
            except FileNotFoundError:
                problem = f"no {name}"
            if problem is None:
                break
            if time.monotonic() > deadline:
                hint = "the run folder must be on storage that all machines share"
                raise CheckpointError(f"rank 0 does not find what the ranks wrote ({problem}): {hint}")
            time.sleep(0.1)
