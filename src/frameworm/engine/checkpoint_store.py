"""Writing checkpoints that are whole or not there.

Every rank writes its share of the state as a safetensors file into a temporary folder and reports it to rank 0. When
all have, rank 0 writes the manifest, renames the folder, moves `latest` and removes old ones. Files and folders are
synced on the way: whatever has the name of a checkpoint is durable. A rank that cannot write makes all ranks do
without this one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from frameworm.config.schema import CheckpointConfig
from frameworm.engine import manifest as manifests
from frameworm.engine.checkpoint import list_checkpoints
from frameworm.engine.manifest import Manifest, assemble, shard_name
from frameworm.engine.shard_files import check_file, type_name, write_shard
from frameworm.engine.snapshot import Snapshot
from frameworm.errors import CheckpointError
from frameworm.launch.reports import RankReports
from frameworm.records.atomic import replacing, sync_folder

log = logging.getLogger("frameworm")
_LATEST = "latest"
_VISIBLE_S = 60.0  # how long a network file system may take to show rank 0 what another machine wrote


class CheckpointStore:
    """Writes checkpoints into a folder, beside training (`async`) or not (`sync`), and keeps the newest few.

    Args:
        folder: Where they go; all ranks must see the same.
        keep: How many stay.
        asynchronous: Write in a thread.
        reports: How the ranks hear of each other.
    """

    def __init__(self, folder: Path, *, keep: int, asynchronous: bool, reports: RankReports | None = None) -> None:
        self.folder = folder
        self.count = 0
        self.stall_s = 0.0
        self.problem: str | None = None
        self._keep = keep
        self._asynchronous = asynchronous
        self._reports = reports or RankReports(None)
        self._writer: threading.Thread | None = None
        self._rounds = 0

    def save(self, step: int, capture: Callable[[], Snapshot]) -> None:
        """Save what `capture` copies; all ranks must call it. A disk that refuses does not stop training."""
        begin = perf_counter()
        self.wait()
        arguments = (self._rounds, step, capture())
        self._rounds += 1
        if self._asynchronous:
            self._writer = threading.Thread(target=self._write, args=arguments, name="checkpoint-writer")
            self._writer.start()
        else:
            self._write(*arguments)
        self.stall_s += perf_counter() - begin

    def wait(self) -> None:
        """Until the checkpoint being written is durable, or has failed, on all ranks."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def abandon(self) -> None:
        """The training ends by an error: wait for the checkpoint being written, but not long for other ranks."""
        self._reports.give_up()
        self.wait()

    def _write(self, number: int, step: int, snapshot: Snapshot) -> None:
        """Write this rank's share; the ranks then agree on what came of it."""
        reports = self._reports
        draft = self.folder / f".step-{step:08d}.tmp"
        try:
            report = _write_share(draft, reports.rank, snapshot)
        except Exception as error:  # whatever it is, training goes on and the other ranks must hear of it
            report = {"problem": _in_words(error)}
        try:
            reports.report(number, json.dumps(report))
            if reports.rank == 0:
                problem = self._commit(step, draft, reports, number)
                reports.decide(number, problem or "")
            else:
                problem = reports.verdict(number) or None
        except (TimeoutError, RuntimeError) as error:
            problem = _in_words(error)
        if problem is None:
            self.count += 1
            return
        self.problem = f"checkpoint of step {step} could not be written: {problem}"
        if reports.rank == 0:
            log.warning("%s; the one before it stays the latest, and training goes on", self.problem)

    def _commit(self, step: int, draft: Path, reports: RankReports, number: int) -> str | None:
        """Make the shares of all ranks a checkpoint; returns why that failed."""
        try:
            found = [json.loads(text) for text in reports.collect(number)]
            for rank, report in enumerate(found):
                if "problem" in report:
                    return f"rank {rank}: {report['problem']}" if reports.world_size > 1 else str(report["problem"])
            manifest = assemble(step, found)
            _wait_for_files(draft, manifest)
            with replacing(draft / manifests.NAME) as file:
                file.write(manifest.dump().encode())
            target = self._free_name(step)
            draft.rename(target)
            sync_folder(self.folder)
            sync_folder(self.folder.parent)
            with replacing(self.folder / _LATEST) as file:
                file.write(f"{target.name}\n".encode())
            self._prune(target)
            return None
        except Exception as error:  # as above
            return _in_words(error)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _free_name(self, step: int) -> Path:
        path = self.folder / f"step-{step:08d}"
        attempt = 1
        while path.exists():
            path = self.folder / f"step-{step:08d}.{attempt}"
            attempt += 1
        return path

    def _prune(self, newest: Path) -> None:
        """Remove all but the newest few, and what earlier runs left half written."""
        stored = list_checkpoints(self.folder)
        step = next(item.step for item in stored if item.path == newest)
        again = [item for item in stored if item.step == step and item.path != newest]
        others = [item for item in stored if item not in again]
        for old in (*again, *others[: -self._keep]):
            # The manifest goes first: without it the data no longer count.
            with contextlib.suppress(OSError):
                (old.path / manifests.NAME).unlink(missing_ok=True)
            shutil.rmtree(old.path, ignore_errors=True)
        for left in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)


def _write_share(draft: Path, rank: int, snapshot: Snapshot) -> dict[str, Any]:
    """Write one rank's file and say what is in it."""
    if snapshot.problem is not None:
        raise CheckpointError(snapshot.problem)
    draft.mkdir(parents=True, exist_ok=True)
    path = draft / shard_name(rank)
    try:
        file = write_shard(path, {name: piece.rows for name, piece in snapshot.pieces.items()})
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    sync_folder(draft)
    pieces = {
        name: (type_name(piece.rows.dtype, name), piece.shape, piece.first_row, len(piece.rows) if piece.shape else 1)
        for name, piece in snapshot.pieces.items()
    }
    return {
        "bytes": file.size_bytes,
        "sha256": file.sha256,
        "pieces": pieces,
        "shared": snapshot.shared,
        "own": snapshot.own,
    }


def _wait_for_files(draft: Path, manifest: Manifest) -> None:
    """Until rank 0 sees what the others wrote; removes what does not belong.

    Raises:
        CheckpointError: It does not.
    """
    for path in draft.iterdir():
        if path.name not in manifest.files:
            path.unlink()
    deadline = time.monotonic() + _VISIBLE_S
    for name, file in manifest.files.items():
        while True:
            try:
                check_file(draft / name, file, content=False)
                break
            except CheckpointError as error:
                if time.monotonic() > deadline:
                    hint = "the run folder must be on storage that all machines share"
                    raise CheckpointError(f"rank 0 does not find what the ranks wrote ({error}): {hint}") from None
            time.sleep(0.1)


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    known = isinstance(error, (CheckpointError, TimeoutError))
    return str(error) if known else f"{type(error).__name__}: {error}"


def make_store(folder: Path, settings: CheckpointConfig, reports: RankReports) -> CheckpointStore:
    """The store that a config asks for."""
    return CheckpointStore(folder, keep=settings.keep, asynchronous=settings.mode == "async", reports=reports)
