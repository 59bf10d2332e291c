"""Fetch checkpoints from object storage into a run folder, verified and atomically."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from frameworm.engine.checkpoint import manifest as manifests
from frameworm.engine.checkpoint.commit import figure_in
from frameworm.engine.checkpoint.manifest import Manifest
from frameworm.engine.checkpoint.shard_reader import check_file
from frameworm.errors import CheckpointError, RunFolderError, StorageError
from frameworm.records.atomic import refuse_link, sync_folder, write_atomic
from frameworm.records.objects.place import Place, is_url
from frameworm.records.objects.runs import CHECKPOINTS, MANIFEST, age_of, local_run, source_of, whole_checkpoints
from frameworm.records.reading import read_text


def fetch_newest(place: Place, folder: Path, say: Callable[[str], None], newer_than: str | None = None) -> str | None:
    """Copy the newest complete checkpoint into a run folder; return None if there is none to copy.

    Args:
        place: The run in storage.
        folder: The run folder.
        say: Called with a message about each checkpoint that was skipped.
        newer_than: A checkpoint that the folder has; only newer ones are fetched.

    Raises:
        StorageError: If storage does not answer.
        CheckpointError: If there are checkpoints but none is complete.
    """
    names = whole_checkpoints(place)
    if newer_than is not None:
        names = [name for name in names if age_of(name) > age_of(newer_than)]
    for name in reversed(names):
        try:
            fetch_checkpoint(place, name, folder)
            return name
        except CheckpointError as error:
            say(f"{place.url}: {error}; trying the checkpoint before it")
    if names and newer_than is None:
        raise CheckpointError(f"no checkpoint at {place.url} can be read; start afresh at another URL (--out)")
    return None


def fetch_checkpoint(place: Place, name: str, folder: Path) -> Path:
    """Copy one checkpoint into a run folder, unless an identical one is there already.

    Raises:
        StorageError: If storage does not answer.
        CheckpointError: If it is not complete.
        RunFolderError: If it cannot be written here.
    """
    within = f"{CHECKPOINTS}/{name}"
    try:
        text = place.read(f"{within}/{MANIFEST}", manifests.MOST_BYTES).decode("utf-8")
        try:
            manifest = Manifest.parse(text)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None
        if manifest.step != age_of(name)[0]:
            raise CheckpointError(f"{name} holds the checkpoint of step {manifest.step}")
        target = folder / CHECKPOINTS / name
        if _is_here(target, text, manifest):
            return target
        draft = target.with_name(f".{name}.tmp")
        for path in (target, draft):
            refuse_link(path)
            shutil.rmtree(path, ignore_errors=True)
        draft.mkdir(parents=True)
        found = place.find(within)
        for file, expected in manifest.files.items():
            facts = found.get(f"{within}/{file}")
            if facts is None or facts.size_bytes != expected.size_bytes:
                raise CheckpointError(f"{name}/{file} is missing or has another size than its manifest says")
            place.get(f"{within}/{file}", draft / file)
            check_file(draft / file, expected, content=True)
        write_atomic(draft / MANIFEST, text)
        draft.rename(target)
        sync_folder(target.parent)
        return target
    except StorageError as error:
        if not error.missing:
            raise
        raise CheckpointError(f"{name} is not whole: {error}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{name}: its manifest is not text") from None
    except OSError as error:
        raise RunFolderError(f"cannot copy {name} to {folder}: {error.strerror or error}") from error


def _is_here(target: Path, text: str, manifest: Manifest) -> bool:
    try:
        if read_text(target / MANIFEST, manifests.MOST_BYTES) != text:
            return False
        for file, expected in manifest.files.items():
            check_file(target / file, expected, content=False)
    except (OSError, ValueError, CheckpointError):
        return False
    return True


# Chooses a checkpoint from their names, oldest first, and a function that returns the metric of each.
Choose = Callable[[Sequence[str], Callable[[str], float | None]], str]


def run_with_checkpoint(path: str | Path, say: Callable[[str], None], metric: str, choose: Choose | None) -> Path:
    """Return a run folder to read a checkpoint from; for a URL, a local copy of its records and that checkpoint.

    Args:
        path: A run folder or a URL.
        say: Called with a message about each checkpoint that was skipped.
        metric: The metric that `choose` uses.
        choose: Chooses one by name; None for the newest complete one.

    Raises:
        StorageError: If the URL holds no run, or cannot be reached.
        CheckpointError: If there is no such complete checkpoint.
    """
    folder = local_run(path)
    url = source_of(folder) if is_url(path) else None
    if url is None:
        return folder
    place = Place(url)
    if choose is None:
        kept = fetch_newest(place, folder, say)
    else:
        kept = choose(
            whole_checkpoints(place),
            lambda name: figure_in(
                place.read(f"{CHECKPOINTS}/{name}/{MANIFEST}", manifests.MOST_BYTES).decode("utf-8", errors="replace"),
                metric,
            ),
        )
        fetch_checkpoint(place, kept, folder)
    for other in (folder / CHECKPOINTS).glob("step-*"):
        if other.name != kept:  # from earlier calls; the copy is a cache
            shutil.rmtree(other, ignore_errors=True)
    return folder
