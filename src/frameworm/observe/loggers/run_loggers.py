"""Passes a run's values to its loggers without ever waiting for one of them."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import ClassVar, NamedTuple

from frameworm.errors import RunFolderError
from frameworm.observe.loggers.points import Point, StepPoints, epoch_values, summary_values
from frameworm.observe.loggers.protocol import LoggedRun, Logger
from frameworm.records.atomic import write_atomic
from frameworm.records.events import Listener
from frameworm.records.reading import read_json
from frameworm.records.schema import EpochRecord, RunRecord, StepRecord

log = logging.getLogger("frameworm")
IDS_NAME = "loggers.json"
MOST_PENDING = 1000
HUNG_S = 120.0  # W&B itself gives up on its server after 90 seconds
_MOST_ID_BYTES = 2**16
_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")  # ids become parts of paths and URLs


class NamedLogger(NamedTuple):
    """A logger and its name in messages and `loggers.json`."""

    name: str
    logger: Logger


class RunLoggers(Listener):
    """Listens to a run and passes it on to loggers, each called in its own thread.

    A logger cannot affect training: if a call raises, or has not returned after two minutes, a line is logged and the
    logger is not called any more. A slow logger loses points of steps, never epochs.

    Args:
        loggers: The loggers.
        points: Turns steps into points.
        describe: Describes the run, given the id that a logger had for it.
        ids: Stores the ids of the loggers' runs for a resume; None: they are not stored.
    """

    must_not_break_training: ClassVar[bool] = True

    def __init__(
        self,
        loggers: Sequence[NamedLogger],
        points: StepPoints,
        describe: Callable[[str | None], LoggedRun],
        ids: RunIds | None = None,
    ) -> None:
        self._channels = [Channel(item.name, item.logger) for item in loggers]
        self._points = points
        self._describe = describe
        self._ids = ids
        self._step = 0
        self._close_s = 0.0

    @property
    def notes(self) -> list[str]:
        """One sentence for each logger that has not received everything."""
        return [note for channel in self._channels for note in channel.notes]

    def on_run_start(self, record: RunRecord) -> None:
        """Start the threads, and the loggers in them."""
        for channel in self._channels:
            known = None if self._ids is None else self._ids.get(channel.name)
            run = self._describe(known)
            self._step, self._close_s = run.step, run.close_s
            channel.seen_step = 0 if known is None else run.seen_step
            channel.begin()
            channel.put(functools.partial(self._start, channel, run))

    def on_step(self, step: StepRecord) -> None:
        """Add the step; if it completes a point, log that."""
        point = self._points.add(step)
        if point is not None:
            self._log(point)

    def on_epoch(self, epoch: EpochRecord) -> None:
        """Log the epoch's values, at the step that ended it."""
        self._log(self._points.rest())
        self._log(Point(self._step, epoch_values(epoch)), of_epoch=True)

    def on_run_end(self, record: RunRecord) -> None:
        """Log the summary, and wait for all loggers until one common deadline."""
        self._log(self._points.rest())
        summary = summary_values(record)
        for channel in self._channels:
            channel.put(functools.partial(channel.logger.finish, record.status, summary))
            channel.end()
        deadline = monotonic() + self._close_s
        for channel in self._channels:
            if not channel.wait(deadline - monotonic()):
                channel.leave_out(f"it did not finish within {self._close_s:g} s of the run's end")

    def _start(self, channel: Channel, run: LoggedRun) -> None:
        given = channel.logger.start(run)
        if given is not None and self._ids is not None:
            self._ids.put(channel.name, given)

    def _log(self, point: Point | None, *, of_epoch: bool = False) -> None:
        if point is None or point.step < self._step or not point.values:
            return
        self._step = point.step
        for channel in self._channels:
            # The last step that was logged may have ended an epoch that was not.
            if point.step > channel.seen_step or (of_epoch and point.step == channel.seen_step):
                channel.put(functools.partial(channel.logger.log, point.values, point.step), may_lose=not of_epoch)


class Channel:
    """A thread that makes the calls of one logger, in order.

    Attributes:
        seen_step: The last step that the logger got before the run was resumed.
    """

    def __init__(self, name: str, logger: Logger, most_pending: int = MOST_PENDING, hung_s: float = HUNG_S) -> None:
        self.name = name
        self.logger = logger
        self.seen_step = 0
        self._most_pending = most_pending
        self._hung_s = hung_s
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._busy_since: float | None = None
        self._problem: str | None = None
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name=f"frameworm-logger-{name}", daemon=True)

    @property
    def notes(self) -> list[str]:
        """What this logger did not receive, as sentences."""
        notes = [] if self._problem is None else [f"logger {self.name} was left out: {self._problem}"]
        if self._lost:
            notes.append(f"logger {self.name} was too slow for {self._lost} of its points; raise log_interval_s")
        return notes

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, call: Callable[[], object], *, may_lose: bool = False) -> None:
        """Queue a call, unless the logger was dropped, or the call is optional and the queue is full."""
        if self._problem is not None:
            return
        since = self._busy_since
        if since is not None and monotonic() - since > self._hung_s:
            self.leave_out(f"a call has not returned for {self._hung_s:.0f} s")
        elif may_lose and self._calls.qsize() >= self._most_pending:
            self._lost += 1
        else:
            self._calls.put(call)

    def end(self) -> None:
        """Let the thread end after the calls queued so far."""
        self._calls.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the thread to end; True if it has ended or the logger was dropped before."""
        if self._problem is None and self._thread.ident is not None:
            self._thread.join(max(0.0, timeout_s))
        return self._problem is not None or not self._thread.is_alive()

    def leave_out(self, problem: str) -> None:
        """Drop the logger, and log why once."""
        if self._problem is None:
            self._problem = problem
            self.end()  # in case its call returns after all
            log.warning("logger %s is left out, and training continues without it: %s", self.name, problem)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None and self._problem is None:
            self._busy_since = monotonic()
            try:
                call()
            except BaseException as error:  # a logger may even call sys.exit
                text = " ".join(str(error).split())
                self.leave_out(f"{type(error).__name__}: {text}" if text else type(error).__name__)
            finally:
                self._busy_since = None


class RunIds:
    """The ids that trackers gave a run, kept in its folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / IDS_NAME
        self._lock = threading.Lock()
        self._ids: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError):
            found = read_json(self._path, _MOST_ID_BYTES)
            if isinstance(found, dict):
                self._ids = {name: value for name, value in found.items() if _is_id(value)}

    def get(self, name: str) -> str | None:
        """The id that a logger had for this run before."""
        return self._ids.get(name)

    def put(self, name: str, value: str) -> None:
        """Store an id; called from the loggers' threads."""
        with self._lock:
            if self._ids.get(name) == value or not _is_id(value):
                return
            self._ids[name] = value
            with contextlib.suppress(RunFolderError):  # a resumed run would then start a new run in that tracker
                write_atomic(self._path, json.dumps(self._ids, indent=2) + "\n")


def _is_id(value: object) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None
