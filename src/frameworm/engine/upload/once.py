"""Upload a run outside training: one pass over its folder, in the foreground."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from frameworm.config.load import load_config_from_text, show_path
from frameworm.engine.checkpoint.commit import Retention
from frameworm.engine.upload.places import go_on_in
from frameworm.engine.upload.run_uploads import NOT_UPLOADED
from frameworm.engine.upload.uploader import Ownership, Uploader, claim
from frameworm.errors import ConfigError, RunFolderError
from frameworm.records.objects.place import Place
from frameworm.records.objects.runs import whole_checkpoints
from frameworm.records.schema import StorageCopy
from frameworm.records.store import RunFolder
from frameworm.report.run.text import render_text


def upload_run(path: str | Path, url: str, tell: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Upload a whole run folder, skipping what is already there.

    Args:
        path: The run folder. Do not upload a run in training: the training would then upload nothing more.
        url: Where to upload it.
        tell: Receives progress messages.

    Returns:
        The `url`, and the names of the `checkpoints` there.

    Raises:
        RunFolderError: If there is no such run, or the place holds another.
        StorageError: If storage refuses or does not answer.
    """
    folder = RunFolder.open(path)
    ownership = go_on_in(folder.path)
    place = Place(url)
    if ownership is None or ownership.url != place.url:
        ownership = Ownership(place.url, run=secrets.token_hex(16), owner=secrets.token_hex(16))
    uploader = Uploader(
        folder.path,
        place,
        ownership,
        _retention_of(folder),
        uploaded=lambda name: tell(f"{name} is uploaded") if tell is not None else None,
    )
    if ownership.former is None:
        claim(place, ownership)  # before the folder's note of its previous place is overwritten
    ownership.write(folder.path)
    uploader.work(records=True)
    _say_uploaded(folder, place)
    uploader.work(records=True, without=())
    return {"url": place.url, "checkpoints": whole_checkpoints(place)}


def _retention_of(folder: RunFolder) -> Retention:
    """Return the retention of the run's config; if that cannot be read, keep everything in the folder."""
    with contextlib.suppress(ConfigError, RunFolderError):
        return Retention.of(load_config_from_text(folder.read_config(), show_path(folder.config)).checkpoint)
    return Retention(keep=max(1, sum(1 for _ in folder.checkpoints.glob("step-*"))))


def _say_uploaded(folder: RunFolder, place: Place) -> None:
    """Correct the summary's statement about uploads."""
    try:
        record = folder.read_summary()
    except RunFolderError:
        return  # the run has no summary yet
    whole = whole_checkpoints(place)
    record.storage = StorageCopy(place.url, uploaded=True, checkpoint=whole[-1] if whole else None)
    record.notes = [note for note in record.notes if not note.startswith(NOT_UPLOADED)]
    folder.write_summary(record, render_text(record))
