"""The upload service: takes orders, retries when storage does not answer, and reports the outcome.

It runs in a separate process beside training (`main`), or in a thread if the storage lives in this process. Like the
process that writes checkpoints, it is spawned, imports no torch, and ends when its parent does.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from frameworm.engine.checkpoint.commit import Retention
from frameworm.engine.checkpoint.writer_process import answer, listen
from frameworm.engine.upload.uploader import SUMMARY, Ownership, Uploader
from frameworm.errors import FramewormError, StorageError
from frameworm.records.objects.place import Place

_LOOK_S = 0.5  # between two scans of the folder
_NICENESS = 10  # lower priority than training and the checkpoint writer
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_SILENT_S = 60.0  # without progress for this long, storage counts as lost even if its library is still trying
_SHARE = 0.05  # fraction of the time that may be spent on uploading grown records

Tell = Callable[[dict[str, Any]], None]
Orders = queue.Queue[bytes]


@dataclass(frozen=True)
class Task:
    """What to upload and where.

    Attributes:
        folder: The run folder.
        ownership: The place and its owner.
        retention: Which checkpoints to keep there.
        records_every_s: Shortest time between uploads of records.
    """

    folder: str
    ownership: Ownership
    retention: Retention
    records_every_s: float

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Task:
        """Restore from `to_json`."""
        owns, keeps = Ownership(**fields["ownership"]), Retention(**fields["retention"])
        return cls(**{**fields, "ownership": owns, "retention": keeps})


class Service:
    """Uploads what is new in the folder. Orders are `{"finish": n, "without": [...]}` (upload all) and `{"end": 1}`.

    It reports `uploaded` (a checkpoint), `lost`, `back`, `refused` (it has stopped for good), and `finished` with the
    order's number once nothing is left.
    """

    def __init__(self, task: Task, tell: Tell) -> None:
        self._task = task
        self._tell = tell
        self._lost_since: float | None = None
        self._failures = 0
        self._watch = threading.Lock()
        self._ended = threading.Event()
        self._moved_at: float | None = None  # during an upload, the time of its last progress

    def serve(self, orders: Orders) -> None:
        """Serve until ordered to end, or until storage refuses for good."""
        try:
            self._serve(orders)
        except Exception as error:  # whatever the error, report it to training, which continues
            self._tell({"refused": f"{type(error).__name__}: {error}"})
        finally:
            self._ended.set()

    def _serve(self, orders: Orders) -> None:
        threading.Thread(target=self._look_for_silence, name="storage-silence", daemon=True).start()
        task = self._task
        uploader: Uploader | None = None
        finish: dict[str, Any] | None = None
        records_due, pause_s = 0.0, 0.0
        while True:
            try:
                order = json.loads(orders.get(timeout=pause_s))
            except queue.Empty:
                order = {}
            if "end" in order:
                return
            if "finish" in order:
                finish = order
            begin = monotonic()
            self._moved()
            try:
                if uploader is None:
                    place = Place(task.ownership.url)
                    uploader = Uploader(
                        Path(task.folder), place, task.ownership, task.retention, self._is_uploaded, self._moved
                    )
                records = finish is not None or begin >= records_due
                uploader.work(records=records, without=SUMMARY if finish is None else finish.get("without", ()))
            except (StorageError, OSError) as error:
                self._failed(str(error))
                pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._failures, 10))
                continue
            except FramewormError as error:
                self._tell({"refused": str(error)})
                return
            finally:
                with self._watch:
                    self._moved_at = None
            self._arrived()
            now = monotonic()
            if records:
                records_due = now + max(task.records_every_s, (now - begin) / _SHARE)
            if finish is not None and not uploader.left(finish.get("without", ())):
                self._tell({"finished": finish["finish"]})
                finish = None
            pause_s = _LOOK_S

    def _is_uploaded(self, name: str) -> None:
        self._arrived()
        self._tell({"uploaded": name})

    def _moved(self) -> None:
        with self._watch:
            self._moved_at = monotonic()

    def _look_for_silence(self) -> None:
        while not self._ended.wait(_SILENT_S / 10):
            with self._watch:
                silent = self._moved_at is not None and monotonic() - self._moved_at > _SILENT_S
            if silent and self._lost_since is None:
                self._lose(f"{self._task.ownership.url} has not answered for {_SILENT_S:g} s")

    def _failed(self, reason: str) -> None:
        self._failures += 1
        if self._lost_since is None:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        self._lost_since = monotonic()
        self._tell({"lost": reason})

    def _arrived(self) -> None:
        self._failures = 0
        if self._lost_since is not None:
            self._tell({"back": monotonic() - self._lost_since})
            self._lost_since = None


def main(task: str, parent: int) -> None:
    """Serve orders from a pipe until ordered to end, or until the pipe is closed."""
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    answers = os.dup(1)
    os.dup2(2, 1)  # printed output must not mix with the answers
    orders: Orders = queue.Queue()
    threading.Thread(target=listen, args=(orders, parent), daemon=True).start()
    Service(Task.from_json(json.loads(task)), lambda content: answer(answers, content)).serve(orders)
    os._exit(0)  # without waiting for the listening thread or storage's threads
