"""All runs below one folder: their status, and one row of values for each."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from frameworm.errors import RunFolderError
from frameworm.records.schema import RunRecord, json_ready
from frameworm.records.statistics import summarise_steps
from frameworm.records.store import RunFolder
from frameworm.records.writer import parse_step
from frameworm.watch.files import Inside
from frameworm.watch.judging import Judge
from frameworm.watch.run import WatchedRun

RUNNING, UNFINISHED = "running", "unfinished"
MOST_RUNS = 2_000
MOST_DEPTH = 4
MOST_INDEXED = 16  # runs whose curves are kept in memory
MOST_FOLLOWED = 8  # running ones that are indexed only for the table
LIVE_S = 60.0  # a run that has not written anything for this long has ended in some way
LIVE_STEPS = 5.0  # if its steps take long and the machine is not sampled: this many of them
SCAN_S = 2.0
_SUMMARY_LAG_S = 2.0  # a sampler may write once more after the summary
_TAIL_BYTES = 2**17
_SUMMARY_BYTES = 16 * 2**20
_GROWING_NAME = re.compile(r"(steps|system)-rank\d+\.jsonl")


@dataclass(frozen=True, slots=True)
class Row:
    """One run in the table; None: unknown."""

    id: str
    name: str  # path of the folder relative to the root
    status: str
    model: str | None
    started: float | None
    steps: int | None
    loss: float | None
    samples_per_s: float | None
    verdict: str | None

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON-ready data."""
        found: dict[str, Any] = json_ready(asdict(self))
        return found


@dataclass(slots=True)
class _Signs:
    """What the names in a run folder tell."""

    written: float  # when the newest file of steps or samples was written, by the file system's clock
    began: float
    summary: tuple[int, int] | None  # modification time and size of the summary
    begun: tuple[int, int] | None  # the same for begun.json
    sampled: bool  # whether there are samples of the machine, which come every second however long a step takes


class _Brief(NamedTuple):
    """The parts of a run's record shown in the table."""

    status: str
    model: str | None
    steps: int | None
    loss: float | None
    samples_per_s: float | None
    verdict: str | None


@dataclass(slots=True)
class _Known:
    """What is remembered about a run between two scans."""

    folder: RunFolder
    name: str
    written: float | None = None
    changed_at: float | None = None  # when `written` was last seen to change, on this process's clock
    summary_key: tuple[int, int] | None = None
    begun_key: tuple[int, int] | None = None
    summary: _Brief | None = None
    tail_key: float | None = None
    tail: tuple[int | None, float | None, float | None] = (None, None, None)  # last step, its loss, samples/s
    step_s: float | None = None  # the longest of the last steps in the file
    model: str | None = None


class Catalogue:
    """The runs below a folder, or the folder itself if it is a run.

    Args:
        root: The folder. It may be empty, and runs may come and go.
    """

    def __init__(self, root: Path) -> None:
        self.inside = Inside(root)
        self.root = self.inside.root
        self._known: dict[str, _Known] = {}
        self._indexed: OrderedDict[str, tuple[WatchedRun, Judge]] = OrderedDict()
        self._records: OrderedDict[Path, tuple[tuple[int, int], RunRecord | None]] = OrderedDict()
        self._lock = threading.RLock()
        self._scanned_at: float | None = None
        self._rows: list[Row] = []

    def rows(self) -> list[Row]:
        """One row per run, newest first; the folder is rescanned every few seconds."""
        with self._lock:
            now = time.monotonic()
            if self._scanned_at is None or now - self._scanned_at >= SCAN_S:
                self._scan()
                self._rows = self._make_rows()
                self._scanned_at = time.monotonic()
            return self._rows

    def find(self, run_id: str) -> WatchedRun | None:
        """The index of a run by its id, after reading another portion of its files; None if it does not exist."""
        with self._lock:
            if self._scanned_at is None:
                self.rows()
            known = self._known.get(run_id)
            if known is None:
                return None
            run, _ = self._index(run_id, known)
        run.refresh()
        return run

    def record(self, run_id: str) -> tuple[str, RunRecord] | None:
        """Status and record of a run: its summary if that is final, else a record from its steps so far."""
        with self._lock:
            known = self._known.get(run_id)
            signs = None if known is None else _look(known.folder)
            if known is None or signs is None:
                return None
            status = self._status(known, signs)
            run, judge = self._index(run_id, known)
            summary, begun = self._read_summary(known), self._read_begun(known)
        if summary is not None and status not in (RUNNING, UNFINISHED):
            return status, summary
        run.refresh()
        return status, judge.record(status, begun or summary)

    @property
    def is_run(self) -> bool:
        """Whether the folder is a run itself."""
        return any(known.folder.path == self.root for known in self._known.values())

    def name_of(self, run_id: str) -> str:
        """The name of a run in the table."""
        known = self._known.get(run_id)
        return run_id if known is None else known.name

    def _index(self, run_id: str, known: _Known) -> tuple[WatchedRun, Judge]:
        found = self._indexed.get(run_id)
        if found is None:
            run = WatchedRun(known.folder, self.inside)
            found = self._indexed[run_id] = run, Judge(run)
            while len(self._indexed) > MOST_INDEXED:
                self._indexed.popitem(last=False)
        self._indexed.move_to_end(run_id)
        return found

    def _read_summary(self, known: _Known) -> RunRecord | None:
        return self._read(known.folder.summary_json, known.summary_key, known.folder.read_summary)

    def _read_begun(self, known: _Known) -> RunRecord | None:
        return self._read(known.folder.begun_json, known.begun_key, known.folder.read_begun)

    def _read(self, path: Path, key: tuple[int, int] | None, read: Callable[[], RunRecord]) -> RunRecord | None:
        """A run's record, with a cache of recently used ones."""
        if key is None or key[1] > _SUMMARY_BYTES:
            return None
        found = self._records.get(path)
        if found is None or found[0] != key:
            record = None
            with contextlib.suppress(RunFolderError):
                record = read()
            found = self._records[path] = key, record
            while len(self._records) > 2 * MOST_INDEXED:
                self._records.popitem(last=False)
        self._records.move_to_end(path)
        return found[1]

    def _scan(self) -> None:
        found: dict[str, _Known] = {}
        for path in _run_folders(self.root):
            name = path.name if path == self.root else path.relative_to(self.root).as_posix()
            run_id = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
            shown = name.encode("utf-8", errors="replace").decode("utf-8")
            found[run_id] = self._known.get(run_id) or _Known(RunFolder(path, self.inside.read_text), shown)
        for run_id in self._known.keys() - found.keys():
            self._indexed.pop(run_id, None)
        self._known = found

    def _make_rows(self) -> list[Row]:
        rows = []
        followed = 0
        for run_id, known in self._known.items():
            signs = _look(known.folder)
            if signs is None:
                continue  # deleted in the meantime
            status = self._status(known, signs)
            if known.summary is not None and status not in (RUNNING, UNFINISHED):
                rows.append(_row_of(run_id, known, known.summary, signs))
                continue
            if status == RUNNING and followed < MOST_FOLLOWED:
                followed += 1
                run, judge = self._index(run_id, known)
                run.refresh()
                if run.first() is not None and not run.behind:
                    record = judge.record(status, self._read_begun(known) or self._read_summary(known))
                    rows.append(_row_of(run_id, known, _brief(status, record), signs))
                    continue
            rows.append(self._row_of_tail(run_id, known, status, signs))
        return sorted(rows, key=lambda row: (row.started or 0.0, row.name), reverse=True)

    def _status(self, known: _Known, signs: _Signs) -> str:
        """The status from the summary, unless the run continued after it; then whether it is still running."""
        known.begun_key = signs.begun
        if signs.summary != known.summary_key:
            known.summary_key = signs.summary
            record = self._read_summary(known)
            known.summary = None if record is None else _brief(record.status, record)
        now = time.monotonic()
        if known.written is not None and signs.written != known.written:
            known.changed_at = now
        known.written = signs.written
        silent_s = LIVE_S
        if not signs.sampled and signs.summary is None:  # only its steps show that it is alive
            self._tail(known, signs)
            silent_s = max(LIVE_S, LIVE_STEPS * (known.step_s or 0.0))
        is_changing = known.changed_at is not None and now - known.changed_at < silent_s
        # The file system's clock may be wrong, so an observed change counts too; a time in the future counts as recent.
        is_live = is_changing or signs.written > time.time() - silent_s
        brief = known.summary
        if brief is None or signs.summary is None:
            return RUNNING if is_live else UNFINISHED
        if signs.written <= signs.summary[0] / 1e9 + _SUMMARY_LAG_S:
            return brief.status
        # A copied folder has times in any order: only growth, or more steps than in the summary, prove a resume.
        if (self._tail(known, signs)[0] or 0) > (brief.steps or 0):
            return RUNNING if is_live else UNFINISHED
        return RUNNING if is_changing else brief.status

    def _row_of_tail(self, run_id: str, known: _Known, status: str, signs: _Signs) -> Row:
        """The row of a run without a summary, from the end of its first step file."""
        if known.model is None:
            known.model = _workload_of(known.folder)
        steps, loss, speed = self._tail(known, signs)
        return Row(run_id, known.name, status, known.model or None, signs.began, steps, loss, speed, None)

    def _tail(self, known: _Known, signs: _Signs) -> tuple[int | None, float | None, float | None]:
        if known.tail_key != signs.written:
            known.tail_key = signs.written
            known.tail, known.step_s = self._read_tail(known.folder)
        return known.tail

    def _read_tail(self, folder: RunFolder) -> tuple[tuple[int | None, float | None, float | None], float | None]:
        files = folder.step_files()
        steps = []
        if files:
            with contextlib.suppress(OSError):
                text = self.inside.tail(files[min(files)], _TAIL_BYTES)
                steps = [step for line in text.splitlines() if (step := parse_step(line.encode())) is not None]
        if not steps:
            return (None, None, None), None
        speed = summarise_steps(steps, world_size=len(files)).throughput.samples_per_s
        return (steps[-1].step, steps[-1].loss, speed), max(step.step_s for step in steps[-10:])


def _row_of(run_id: str, known: _Known, brief: _Brief, signs: _Signs) -> Row:
    status, model, steps, loss, speed, verdict = brief
    return Row(run_id, known.name, status, model, signs.began, steps, loss, speed, verdict)


def _brief(status: str, record: RunRecord) -> _Brief:
    speed, verdict = record.throughput.samples_per_s, record.verdict
    return _Brief(status, model_of(record), record.steps, record.quality.train_loss, speed, verdict)


def model_of(record: RunRecord) -> str | None:
    """What is trained, as far as the record says: the workload of a config, or the loop of a script."""
    if record.workload:
        return record.workload
    found = record.framework
    return None if found is None else found.loop or found.name


def _workload_of(folder: RunFolder) -> str:
    with contextlib.suppress(RunFolderError):
        match = re.search(r"^workload:[ \t]*([^\s#][^\n#]*)", folder.read_config(), re.MULTILINE)
        return match[1].strip().strip("\"'") if match else ""
    return ""


def _run_folders(root: Path) -> list[Path]:
    """Run folders at or below the root; links are not followed, and a run is not searched for more runs."""
    found: list[Path] = []
    waiting = [(root, 0)]
    while waiting and len(found) < MOST_RUNS:
        path, depth = waiting.pop(0)
        try:
            with os.scandir(path) as entries:
                names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except OSError:
            continue
        if "summary.json" in names or any(_GROWING_NAME.fullmatch(name) for name in names):
            found.append(path)
            continue
        below = [name for name, is_dir in sorted(names.items()) if is_dir and name[0] != "." and name != "checkpoints"]
        if depth < MOST_DEPTH:
            waiting += [(path / name, depth + 1) for name in below]
        # A config alone may belong to a sweep; if there are no subfolders, it is a run that has just begun.
        if "config.yaml" in names and not below:
            found.append(path)
    return found


def _look(folder: RunFolder) -> _Signs | None:
    written = began = 0.0
    summary = begun = None
    sampled = False
    try:
        with os.scandir(folder.path) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if _GROWING_NAME.fullmatch(entry.name) or entry.name == "config.yaml":
                        status = entry.stat(follow_symlinks=False)
                        written = max(written, status.st_mtime)
                        sampled |= entry.name.startswith("system")
                        if entry.name == "config.yaml":
                            began = status.st_mtime
                    elif entry.name == "summary.json":
                        status = entry.stat(follow_symlinks=False)
                        summary = status.st_mtime_ns, status.st_size
                    elif entry.name == "begun.json":
                        status = entry.stat(follow_symlinks=False)
                        begun = status.st_mtime_ns, status.st_size
        if not began:
            began = _first_time(folder) or folder.path.stat().st_mtime
    except OSError:
        return None
    return _Signs(written, began, summary, begun, sampled)


def _first_time(folder: RunFolder) -> float | None:
    """When a script's run began, from its folder's name."""
    match = re.search(r"-(\d{8}-\d{6})(-\d+)?$", folder.path.name)
    if match is None:
        return None
    with contextlib.suppress(ValueError, OverflowError):
        return time.mktime(time.strptime(match[1], "%Y%m%d-%H%M%S"))
    return None
