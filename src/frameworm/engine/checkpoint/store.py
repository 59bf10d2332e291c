"""Write checkpoints atomically while training continues.

A save copies the state (`snapshot`, `staging`) and returns. In the background a separate process (`writer_process`)
writes this rank's part into a temporary folder. The ranks report to rank 0, which has the manifest written, the folder
renamed, `latest` moved and old checkpoints removed. Files and folders are synced along the way, so a folder with a
checkpoint's name is durable. If a rank cannot write, all ranks skip this checkpoint, and training continues.
"""

from __future__ import annotations

import json
import logging
import queue
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch

from frameworm.config.schema import CheckpointConfig
from frameworm.engine.checkpoint.commit import CommitOrder, Retention
from frameworm.engine.checkpoint.rank_writer import WriteOrder
from frameworm.engine.checkpoint.snapshot import ShardPlan, Snapshot
from frameworm.engine.checkpoint.staging import Staging
from frameworm.engine.checkpoint.writer_client import Writer
from frameworm.engine.checkpoint.writer_process import in_words
from frameworm.engine.checkpoint.zstd import zstd_functions
from frameworm.errors import CheckpointError
from frameworm.launch.reports import RankReports
from frameworm.records.schema import CheckpointStatistics

log = logging.getLogger("frameworm")
PATIENCE_S = 60.0  # how long training waits for the previous checkpoint before it skips one
SAVE_FAILED = "could not be written"
_WORTH_SAYING_S = 1.0
_END_S = 600.0  # and at the end of the run
_ABANDON_S = 30.0
_ABANDON_AMONG_S = 15.0  # with other ranks: the launcher ends them 20 s after one has failed
_VISIBLE_S = 60.0

# Takes where copies go (None: nowhere) and a function to call once all is copied on the device; returns the snapshot.
Capture = Callable[[Staging | None, Callable[[], None]], Snapshot]


def _nothing() -> None:
    """Do nothing."""


@dataclass
class _Job:
    number: int
    step: int
    taken_at: float
    snapshot: Snapshot


class CheckpointStore:
    """Writes checkpoints into a folder, in the background (`async`) or not (`sync`), and keeps some of them.

    Args:
        folder: Where checkpoints go; all ranks must see the same folder.
        retention: Which checkpoints to keep.
        asynchronous: Whether a separate process writes while training continues.
        reports: How the ranks exchange results.
        device: The training device.
        compression: off, zstd or auto.
        fast: A folder on faster storage that files are written to first.
    """

    def __init__(
        self,
        folder: Path,
        *,
        retention: Retention | None = None,
        asynchronous: bool = True,
        reports: RankReports | None = None,
        device: torch.device | None = None,
        compression: str = "off",
        fast: Path | None = None,
    ) -> None:
        self.folder = folder
        self.count = 0
        self.failed = 0
        self.stall_s = 0.0
        self.save_s = 0.0
        self.problem: str | None = None
        self.notes: list[str] = []
        self._retention = retention or Retention()
        self._reports = reports or RankReports(None)
        self._compression = compression
        self._fast = fast
        self._staging = Staging(device or torch.device("cpu"))
        self._writer = Writer(
            self._staging.memory, beside=asynchronous, say=lambda text: self._note_once(text, warn=True)
        )
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._staging_free = threading.Semaphore(1)
        self._outstanding = 0
        self._changed = threading.Condition()
        self._rounds = 0
        self._plan: ShardPlan | None = None
        self._freed = False
        self._stuck = False
        self._waited_s = 0.0
        self._gave_up = False
        self._closed = False
        self._stored: tuple[int, float] | None = None  # the last step that can be resumed from, and when it was taken
        self._gap_steps, self._gap_s = 0, 0.0

    def begin(self, step: int) -> None:
        """Call when training starts after `step`; the gap to the first checkpoint is measured from here."""
        self._stored = step, perf_counter()

    def is_busy(self) -> bool:
        """Whether a save would have to wait for the previous one."""
        if self._staging_free.acquire(blocking=False):  # only the training thread acquires it
            self._staging_free.release()
            return False
        return True

    def save(
        self,
        step: int,
        capture: Capture,
        settle: Callable[[], None] = _nothing,
        flush: Callable[[], None] = _nothing,
        *,
        last: bool = False,
    ) -> None:
        """Save what `capture` copies; all ranks must call it. A failing disk does not stop training.

        Args:
            step: The step after which the state is saved.
            capture: Copies the state to the given staging; without one it only takes part in collectives.
            settle: Waits for earlier steps on all ranks. This does not count as time lost to saving.
            flush: Records what is known about these steps.
            last: Whether training is over, so that no background process is worth starting.
        """
        begin = perf_counter()
        waited_s = 0.0

        def settled() -> None:
            nonlocal waited_s
            before = perf_counter()
            settle()
            waited_s = perf_counter() - before
            flush()

        number = self._rounds
        self._rounds += 1
        if not self._room(last):
            capture(None, settled)
            self._skip(number, step)
        else:
            snapshot = capture(self._staging, settled)
            job = _Job(number, step, begin + waited_s, snapshot)
            if last and self._thread is None:
                self._writer.stay_here()  # starting a process for this save alone would only take time
            if self._writer.beside:
                self._hand_over(job)
            else:
                self.wait()
                self._write(job)
        self.stall_s += perf_counter() - begin - waited_s

    def _room(self, last: bool) -> bool:
        """Whether the memory for copies is free, or becomes free within a limit; the last save waits longer."""
        if self._staging_free.acquire(blocking=False):
            self._stuck = False
            return True
        begin = perf_counter()
        # After one timeout, do not wait again until the memory is free or the training ends.
        limit_s = _END_S if last else 0.0 if self._stuck else PATIENCE_S
        found = self._staging_free.acquire(timeout=limit_s) if limit_s else False
        self._stuck = not found
        self._waited_s += perf_counter() - begin
        if self._waited_s > _WORTH_SAYING_S and not last:
            self._note_slow_storage("training waits for it")
        self._gave_up = last and not found
        return found

    def was_put_off(self, late_s: float) -> None:
        """Call when a save began `late_s` after it was due because storage was busy."""
        if late_s > _WORTH_SAYING_S:
            self._note_slow_storage("the next one starts when the last is durable")

    def _note_slow_storage(self, what: str) -> None:
        self._note_once(
            f"writing a checkpoint takes longer than the time between two: {what} "
            "(save more rarely, or set checkpoint.dir to faster storage)",
            warn=True,
        )

    def _skip(self, number: int, step: int) -> None:
        problem = f"an earlier one has not reached storage after {PATIENCE_S:g} s"
        try:
            self._reports.report(number, json.dumps({"problem": problem}))
            if self._reports.rank == 0:
                self._reports.decide(number, problem)
        except (TimeoutError, RuntimeError):
            pass  # then the other ranks will not finish theirs either
        self._conclude(step, problem)

    def get_ready(self) -> None:
        """Start the writer process now rather than in the middle of training.

        Must run in the training thread: processes that another thread forks meanwhile, such as a loader's, would delay
            the start.
        """
        if self._writer.beside and self._thread is None:
            self._writer.start()
            self._thread = threading.Thread(target=self._serve, name="checkpoints", daemon=True)
            self._thread.start()

    def _hand_over(self, job: _Job) -> None:
        self.get_ready()
        with self._changed:
            self._outstanding += 1
        self._jobs.put(job)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._write(job)
            finally:
                with self._changed:
                    self._outstanding -= 1
                    self._changed.notify_all()

    def wait(self, limit_s: float = _END_S) -> bool:
        """Wait until all pending checkpoints are durable or have failed on all ranks; return False on timeout."""
        deadline = monotonic() + limit_s
        with self._changed:
            while self._outstanding:
                if monotonic() > deadline:
                    return False
                self._changed.wait(min(1.0, limit_s))
        return True

    def abandon(self) -> None:
        """Call when training ends with an error: wait for a pending checkpoint, but not long for other ranks."""
        self._reports.give_up()
        self.close(_ABANDON_S if self._reports.world_size == 1 else _ABANDON_AMONG_S)

    def close(self, limit_s: float = _END_S) -> None:
        """Call when training is over: wait for pending checkpoints and release all resources."""
        if self._closed:
            return
        done = self.wait(0.0 if self._gave_up else limit_s)
        self._closed = True
        if not done:
            self._conclude(None, f"storage has not accepted it in {limit_s:g} s")
        self._jobs.put(None)
        self._writer.close()
        if done:
            if self._thread is not None:
                self._thread.join(_ABANDON_S)
            self._staging.close()

    def _write(self, job: _Job) -> None:
        """Write this rank's part, then agree with the other ranks on the outcome."""
        reports = self._reports
        draft = self.folder / f".step-{job.step:08d}.tmp"
        self._freed = False
        try:
            try:
                report = self._write_share(draft, job.snapshot)
            except Exception as error:  # whatever the error, training continues and the other ranks must learn of it
                report = {"problem": in_words(error)}
            reports.report(job.number, json.dumps(report))
            if reports.rank == 0:
                problem = self._commit(job, draft)
                reports.decide(job.number, problem or "")
            else:
                problem = reports.verdict(job.number) or None
        except (TimeoutError, RuntimeError) as error:
            problem = in_words(error)
        finally:
            self._free()
        self._conclude(job.step, problem)
        if problem is None:
            self.save_s += perf_counter() - job.taken_at
            self._measure_gap(job.step, job.taken_at)

    def _free(self) -> None:
        """Release the memory of the copies for the next snapshot.

        By then this snapshot is durable or has failed, so a crash costs only the checkpoint being written; or it is on
        faster storage and is moved from there.
        """
        if not self._freed:
            self._freed = True
            self._staging_free.release()

    def _write_share(self, draft: Path, snapshot: Snapshot) -> dict[str, Any]:
        """Have this rank's file written and describe its content."""
        if snapshot.problem is not None:
            raise CheckpointError(snapshot.problem)
        self._staging.finish()
        if self._staging.waited_for_device:
            self._note_once("no room on the device for a copy of the state: training waits while it is saved")
        if self._plan is None or self._plan.pieces != snapshot.pieces:
            self._plan = ShardPlan.of(snapshot.pieces)
        fast = None if self._fast is None else str(self._fast.resolve())
        used_bytes, layout = self._staging.used_bytes, self._plan.layout
        order = WriteOrder(self._place(draft), self._reports.rank, layout, used_bytes, self._compression, fast)
        answer = self._writer.perform({"write": order.to_json()}, self._free, lambda: not self._freed)
        for note in answer.get("notes", ()):
            self._note_once(note)
        if "problem" in answer:
            return answer
        return {"file": answer["file"], "pieces": self._plan.described, "shared": snapshot.shared, "own": snapshot.own}

    def _place(self, draft: Path) -> str:
        """Return the draft's absolute path, resolving its folder but not a link in its own name."""
        return str(draft.parent.resolve() / draft.name)

    def _commit(self, job: _Job, draft: Path) -> str | None:
        """Commit the files of all ranks as a checkpoint; return why that failed, if it did."""
        reports = self._reports
        try:
            found = [json.loads(text) for text in reports.collect(job.number)]
            for rank, report in enumerate(found):
                if "problem" in report:
                    shutil.rmtree(draft, ignore_errors=True)
                    return f"rank {rank}: {report['problem']}" if reports.world_size > 1 else str(report["problem"])
            order = CommitOrder(
                str(self.folder.resolve()), self._place(draft), job.step, found, self._retention, _VISIBLE_S
            )
            answer = self._writer.perform({"commit": order.to_json()})
        except Exception as error:  # as above
            answer = {"problem": in_words(error)}
        if "problem" in answer:
            shutil.rmtree(draft, ignore_errors=True)
            return str(answer["problem"])
        return None

    def _conclude(self, step: int | None, problem: str | None) -> None:
        if problem is None:
            self.count += 1
            return
        self.failed += 1
        which = "the last checkpoint" if step is None else f"checkpoint of step {step}"
        self.problem = f"{which} {SAVE_FAILED}: {problem}"
        if self._reports.rank == 0:
            log.warning("%s; the one before it, if any, stays the latest, and training continues", self.problem)

    def _measure_gap(self, step: int, at: float) -> None:
        """Track the longest gap between checkpoints, which is what a crash can cost."""
        if self._stored is not None:
            self._gap_steps = max(self._gap_steps, step - self._stored[0])
            self._gap_s = max(self._gap_s, at - self._stored[1])
        self._stored = step, at

    def _note_once(self, text: str, *, warn: bool = False) -> None:
        # Numbers in a note differ between saves.
        if any(note[:30] == text[:30] for note in self.notes):
            return
        self.notes.append(text)
        if warn:
            log.warning("%s", text)

    def statistics(self, step: int) -> CheckpointStatistics:
        """Statistics for the summary of a training that ended after `step`."""
        if not self.count:
            return CheckpointStatistics()
        if self._stored is not None and step > self._stored[0]:  # the last save failed
            self._measure_gap(step, perf_counter())
        return CheckpointStatistics(self.count, self.stall_s, self.save_s, self._gap_steps, self._gap_s)

    @property
    def failed_wholly(self) -> bool:
        """Whether saves were attempted and all of them failed."""
        return self.failed > 0 and self.count == 0

    def all_notes(self) -> list[str]:
        """What the summary says about checkpoints."""
        several = "" if self.failed < 2 else f" ({self.failed} could not be written)"
        return [*self.notes, *([] if self.problem is None else [self.problem + several])]


_VOLATILE = {"tmpfs", "ramfs", "devtmpfs"}


def file_system_of(path: Path, mounts: str | None = None) -> str | None:
    """Type of the file system that a path is, or would be, on; None if unknown."""
    try:
        lines = (Path("/proc/self/mounts").read_text(encoding="utf-8") if mounts is None else mounts).splitlines()
    except OSError:
        return None
    wanted = path.resolve()
    found: tuple[int, str] | None = None
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        place = Path(fields[1].replace("\\040", " "))
        # Of several mounts at one path, the last one counts.
        if wanted.is_relative_to(place) and (found is None or len(place.parts) >= found[0]):
            found = (len(place.parts), fields[2])
    return None if found is None else found[1]


def make_store(folder: Path, settings: CheckpointConfig, reports: RankReports, device: torch.device) -> CheckpointStore:
    """Create the store that a config asks for.

    Raises:
        MissingPackageError: If checkpoints are to be compressed and no zstd package is installed.
    """
    if settings.compression == "zstd":
        zstd_functions()
    store = CheckpointStore(
        folder,
        retention=Retention.of(settings),
        asynchronous=settings.mode == "async",
        reports=reports,
        device=device,
        compression=settings.compression,
        fast=None if settings.dir is None else Path(settings.dir),
    )
    kind = file_system_of(folder)
    if kind in _VOLATILE:
        text = (
            f"checkpoints go to {folder}, which is in memory ({kind}) and gone when the machine restarts: put the run "
            "folder (--out) on a disk, and set checkpoint.dir to this one if it is to be fast"
        )
        store.notes.append(text)
        if reports.rank == 0:
            log.warning("%s", text)
    return store
