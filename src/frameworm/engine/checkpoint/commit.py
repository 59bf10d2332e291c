"""From what the ranks wrote to a checkpoint: manifest, rename, `latest`, then pruning. No torch here."""

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

if TYPE_CHECKING:  # the process that writes needs no config
    from frameworm.config.checkpoint_section import CheckpointConfig

_LATEST = "latest"
_Item = TypeVar("_Item")
# The same step may be saved again, after a resume: the old one goes when the new one is durable.
_FOLDER_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay.

    Attributes:
        keep: The newest few.
        keep_best: Beside them those with the best figures, of the ones taken at the end of an epoch.
        metric: Which figure.
        highest: Whether the highest is the best.
    """

    keep: int = 3
    keep_best: int = 0
    metric: str = "val_loss"
    highest: bool = False

    @classmethod
    def of(cls, settings: CheckpointConfig) -> Retention:
        """As a config says."""
        return cls(settings.keep, settings.keep_best, settings.metric, settings.prefers_higher)


@dataclass(frozen=True)
class CommitOrder:
    """What it takes to make the shares of all ranks a checkpoint.

    Attributes:
        folder: Of the checkpoints.
        draft: Where the shares are.
        step: After which step they were taken.
        reports: What the ranks said of their shares.
        retention: What stays beside it.
        visible_s: How long a network file system may take to show what another machine wrote.
    """

    folder: str
    draft: str
    step: int
    reports: list[dict[str, Any]]
    retention: Retention
    visible_s: float = 60.0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "retention": asdict(self.retention)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> CommitOrder:
        """What `to_json` gave."""
        return cls(**{**fields, "retention": Retention(**fields["retention"])})


def stored_folders(folder: Path) -> list[tuple[int, int, Path]]:
    """Step, attempt and path of the checkpoints of a folder that have a manifest, oldest first."""
    found = []
    for path in folder.glob("step-*"):
        match = _FOLDER_NAME.fullmatch(path.name)
        if match and not path.is_symlink() and (path / manifests.NAME).is_file():
            found.append((int(match[1]), int(match[2] or 0), path))
    return sorted(found)


def commit(order: CommitOrder) -> str:
    """Make a checkpoint of what the ranks wrote, durable before `latest` names it; returns its name.

    Raises:
        CheckpointError: The shares do not make up a state, or are not there.
        RunFolderError: A link is in the place of the draft.
        OSError: The disk refuses.
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
    """The checkpoint, where whoever began to make it got as far as its name before it died."""
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
    """Remove what is not to stay, and what earlier runs left half written; the newest always stays."""
    for path in superseded(stored_folders(folder), newest, retention, lambda path: figure_of(path, retention.metric)):
        # The manifest goes first: without it the data no longer count.
        with contextlib.suppress(OSError):
            (path / manifests.NAME).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    for left in folder.glob(".step-*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    for path in folder.glob("step-*"):  # whoever removed them was killed in the middle of it
        ours = _FOLDER_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        if ours and not (path / manifests.NAME).exists():
            shutil.rmtree(path, ignore_errors=True)


def superseded(
    stored: Sequence[tuple[int, int, _Item]],
    newest: _Item,
    retention: Retention,
    figure: Callable[[_Item], float | None],
) -> list[_Item]:
    """Of stored checkpoints (step, attempt and what they are known by, oldest first) those that are not to stay."""
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
    """The figure of the epoch at whose end a checkpoint was taken; None for one from the middle of an epoch."""
    try:
        return figure_in(read_text(path / manifests.NAME, manifests.MOST_BYTES), metric)
    except (OSError, ValueError):
        return None


def figure_in(manifest: str, metric: str) -> float | None:
    """The same, from the text of its manifest."""
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
    """Until all that the ranks wrote is seen here; removes what does not belong.

    Raises:
        CheckpointError: It is not there.
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
