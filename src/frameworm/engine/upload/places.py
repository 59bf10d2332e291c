"""Match local folders with places in storage when a run begins or resumes.

A run trains into a local folder, which is authoritative during training. Storage is marked with the IDs of the run and
of the process that writes to it, so that two machines never mix their checkpoints.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from frameworm.engine.checkpoint.commit import stored_folders
from frameworm.engine.upload.fetch import fetch_newest
from frameworm.engine.upload.uploader import Ownership, claim, read_mark
from frameworm.errors import RunFolderError, StorageError
from frameworm.records.atomic import refuse_link
from frameworm.records.objects.place import Place, check_url, last_part
from frameworm.records.objects.runs import ANSWER_S, copy_records, holds_run, local_root, source_of
from frameworm.records.store import RunFolder, find_runs

log = logging.getLogger("frameworm")
_MOST_EARLIER = 100  # consecutive starts without an answer from storage


def folder_for(url: str, root: Path) -> Path:
    """Return the local folder for the run at a URL, named by its last part unless another run has that name here.

    Raises:
        RunFolderError: If the alternative name is taken too.
    """
    url = check_url(url)
    name = last_part(url)
    choices = [root / name, root / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"]
    for path in choices:
        found = Ownership.read(path)
        if not path.exists() or (found is not None and found.url == url):
            return path
    raise RunFolderError(f"{choices[-1]} is in the way of the local folder for {url}; move it away")


def begin_at(url: str) -> Ownership:
    """Claim a place for a new run. If storage does not answer, it is claimed later, when it does.

    Raises:
        RunFolderError: If there already is a run.
        StorageError: If the place cannot be written to.
        MissingPackageError: If the package for this kind of URL is not installed.
    """
    place = Place(url)
    ownership = Ownership(place.url, run=secrets.token_hex(16), owner=secrets.token_hex(16))
    try:
        place.within(ANSWER_S, lambda: claim(place, ownership))
    except StorageError as error:
        if not error.unreachable:
            raise
        log.warning("%s; training starts all the same, and uploads once it answers", error)
    return ownership


def go_on_in(folder: Path) -> Ownership | None:
    """Take over the uploads of a run that resumes in its local folder; None if it was not uploaded.

    The folder is untrusted: before uploading, the caller must make sure that the user has named the URL.
    """
    noted = Ownership.read(folder)
    if noted is None:
        return None
    earlier = noted.predecessors[:_MOST_EARLIER]
    return replace(noted, owner=secrets.token_hex(16), former=noted.owner, earlier=earlier)


def go_on_at(url: str, root: Path) -> tuple[RunFolder, Ownership]:
    """Copy the run at a URL to this machine, or update the copy that is here.

    Raises:
        RunFolderError: If it cannot be written here.
        StorageError: If there is no run, or it cannot be reached and there is no local copy.
        CheckpointError: If it has checkpoints but none is complete.
        MissingPackageError: If the package for this kind of URL is not installed.
    """
    place = Place(url)
    path = folder_for(place.url, root)
    noted = Ownership.read(path)
    try:
        mark, there = place.within(ANSWER_S, lambda: (read_mark(place), holds_run(place.find())))
    except StorageError as error:
        mine = go_on_in(path)
        if not error.unreachable or mine is None or not RunFolder(path).has_checkpoint():
            raise
        log.warning("%s; continuing with the local copy, in %s", error, path)
        return RunFolder.open(path), mine
    # This machine wrote there last, so the local copy counts.
    is_last = noted is not None and (
        mark is None or (mark[0] == noted.run and mark[1] in (noted.owner, *noted.predecessors))
    )
    if not there and not (is_last and RunFolder(path).holds_run()):
        raise StorageError(f"{place.url} holds no run to resume; omit --resume to begin one", missing=True)
    former = mark[1] if mark else ("" if there else None)  # a run without a mark has no owner
    run = mark[0] if mark else noted.run if noted else secrets.token_hex(16)
    ownership = Ownership(place.url, run, owner=secrets.token_hex(16), former=former)
    if is_last:
        here = [item.name for _, _, item in stored_folders(RunFolder(path).checkpoints)]
        _fetch(place, path, path, here[-1] if here else None)
        ownership.write(path)  # first, so that a process killed in between knows its own mark
        place.within(ANSWER_S, lambda: claim(place, ownership))
        return RunFolder(path), ownership
    draft = path.with_name(f".{path.name}.tmp")
    try:
        refuse_link(draft)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        copy_records(place, draft)
        _fetch(place, draft, path, None)
        place.within(ANSWER_S, lambda: claim(place, ownership))
        ownership.write(draft)
        if path.exists():
            aside = path.with_name(f"{path.name}-before-{datetime.now():%Y%m%d-%H%M%S}")
            path.rename(aside)
            log.warning("the run at %s was continued elsewhere: the local copy is now in %s", place.url, aside)
        draft.rename(path)
    except OSError as error:
        raise RunFolderError(f"cannot copy {place.url} to {path}: {error.strerror or error}") from error
    return RunFolder(path), ownership


def _fetch(place: Place, folder: Path, shown: Path, newer_than: str | None) -> None:
    fetched = fetch_newest(place, folder, log.warning, newer_than)
    if fetched is not None:
        log.info("copied %s of %s to %s", fetched, place.url, shown)


def run_at(url: str, root: Path) -> bool:
    """Whether there is a run at a URL, or a local copy of it.

    Raises:
        StorageError: If the place cannot be read, or does not answer and there is no local copy.
    """
    place = Place(url)
    path = folder_for(place.url, root)
    try:
        if place.within(ANSWER_S, lambda: holds_run(place.find())):
            return True
    except StorageError as error:
        if not error.unreachable:
            raise
        if not RunFolder(path).has_checkpoint():
            raise StorageError(
                f"{error}; whether there is a run to resume is not known: try again, or leave --resume out to "
                "begin afresh",
                unreachable=True,
            ) from error
    return Ownership.read(path) is not None and RunFolder(path).holds_run()


def unfinished_at(url: str, name: str) -> Iterator[str]:
    """Yield the URLs of uncompleted runs of a name under a URL, newest first."""
    for folder in find_runs(local_root(url, few=True)):
        source = source_of(folder.path)
        if source is not None and folder.run_name() == name and folder.status() != "completed":
            yield source
