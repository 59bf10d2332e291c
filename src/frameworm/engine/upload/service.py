"""Uploads as a service: it takes orders, tries again when storage does not answer, and tells what came of it.

It runs in a process of its own beside training (`main`), or in a thread where the storage lives in this process. The
process is started as the one that writes checkpoints is: afresh, without torch, and it ends when its parent does.
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

_LOOK_S = 0.5  # between two looks at the folder
_NICENESS = 10  # training goes first, and writing checkpoints to the disk
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_SILENT_S = 60.0  # without any progress storage counts as lost, whatever its library is still trying
_SHARE = 0.05  # of the time may go into uploading records that have grown

Tell = Callable[[dict[str, Any]], None]
Orders = queue.Queue[bytes]


@dataclass(frozen=True)
class Task:
    """What to upload where.

    Attributes:
        folder: The run.
        ownership: The place, and whose it is.
        retention: Which checkpoints stay there.
        records_every_s: Seconds between uploads of records, at least.
    """

    folder: str
    ownership: Ownership
    retention: Retention
    records_every_s: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Task:
        """What `to_json` gave."""
        owns, keeps = Ownership(**fields["ownership"]), Retention(**fields["retention"])
        return cls(**{**fields, "ownership": owns, "retention": keeps})


class Service:
    """Uploads what is new in the folder; orders are `{"finish": n, "without": [...]}`, upload all, and `{"end": 1}`.

    It tells `uploaded` (a checkpoint), `lost`, `back`, `refused` (it has stopped for good), and `finished` with the
    number of its order, once nothing is left.
    """

    def __init__(self, task: Task, tell: Tell) -> None:
        self._task = task
        self._tell = tell
        self._lost_since: float | None = None
        self._failures = 0
        self._watch = threading.Lock()
        self._ended = threading.Event()
        self._moved_at: float | None = None  # when something last arrived, while an upload is under way

    def serve(self, orders: Orders) -> None:
        """Until told to end, or refused."""
        try:
            self._serve(orders)
        except Exception as error:  # whatever it is, training goes on and must hear of it
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
    """Serve orders from a pipe until told to end, or until the pipe is closed."""
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever prints must not get in between the answers
    orders: Orders = queue.Queue()
    threading.Thread(target=listen, args=(orders, parent), daemon=True).start()
    Service(Task.from_json(json.loads(task)), lambda content: answer(answers, content)).serve(orders)
    os._exit(0)  # neither the listening thread nor storage's own are waited for
