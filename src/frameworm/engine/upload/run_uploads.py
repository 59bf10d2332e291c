"""The uploads of one run, from its first step to the final summary."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable

from frameworm.config.schema import Config
from frameworm.engine.checkpoint.commit import Retention
from frameworm.engine.upload.beside import Uploads
from frameworm.engine.upload.service import Task
from frameworm.engine.upload.uploader import SUMMARY, Ownership
from frameworm.records.objects.place import Place
from frameworm.records.schema import RunRecord, StorageCopy
from frameworm.records.store import RunFolder

log = logging.getLogger("frameworm")
_LAST_S = 30.0  # for the summary alone
_SOON_S = 2.0
NOT_UPLOADED = "not all of this run is at"

Rewrite = Callable[[RunRecord], None]


class NoUploads:
    """A run that is not uploaded."""

    def start(self, config: Config) -> None:
        """Do nothing."""

    def finish(self, record: RunRecord, rewrite: Rewrite, hurried: Callable[[], bool], limit_s: float) -> None:
        """Do nothing."""


class RunUploads(NoUploads):
    """Uploads a run folder.

    Args:
        folder: The run folder.
        ownership: The place and its owner.
    """

    def __init__(self, folder: RunFolder, ownership: Ownership) -> None:
        self._folder = folder
        self._ownership = ownership
        self._uploads: Uploads | None = None

    def start(self, config: Config) -> None:
        """Start uploading."""
        task = Task(
            str(self._folder.path.resolve()),
            self._ownership,
            Retention.of(config.checkpoint),
            config.storage.records_every_s,
        )
        self._ownership.write(self._folder.path)
        self._uploads = Uploads(task, own_process=not Place(self._ownership.url).in_this_process)

    def finish(self, record: RunRecord, rewrite: Rewrite, hurried: Callable[[], bool], limit_s: float) -> None:
        """Wait for uploads after the run, and record the outcome in the summary.

        Args:
            record: The run's record, which is updated.
            rewrite: Writes the record to the folder again.
            hurried: Whether the user has asked to stop waiting.
            limit_s: How long to wait.
        """
        uploads, self._uploads = self._uploads, None
        if uploads is None:
            return
        url, path = self._ownership.url, self._folder.path
        command = shlex.join(["frameworm", "upload", str(path), url])
        try:
            done = uploads.finish(min(_SOON_S, limit_s), SUMMARY, hurried)
            if not done and limit_s > _SOON_S and uploads.alive:
                log.info("uploading what is left of %s to %s; if it is cut short: %s", path, url, command)
                done = uploads.finish(limit_s - _SOON_S, SUMMARY, hurried)
            record.storage = StorageCopy(url, uploaded=done, checkpoint=uploads.newest)
            if done:
                rewrite(record)
                done = uploads.finish(min(_LAST_S, max(limit_s, 1.0)), (), hurried)
            if done:
                return
            why = uploads.problem or f"it has taken longer than {limit_s:.0f} s"
            record.storage = StorageCopy(url, uploaded=False, checkpoint=uploads.newest, problem=why)
            record.notes.append(f"{NOT_UPLOADED} {url} ({why}); it is whole in {path}: {command}")
            log.warning("%s", record.notes[-1])
            rewrite(record)
        finally:
            uploads.close()
