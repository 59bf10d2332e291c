"""The record of a run in progress, with verdict and findings by the usual rules."""

from __future__ import annotations

import contextlib
import time

from frameworm.attach.record import RankSums, Surroundings, facts_of, record_of_sums
from frameworm.config.load import load_config_from_text, show_path
from frameworm.config.schema import Config
from frameworm.diagnose.rules.judge import apply_judgement, judge, sample_note
from frameworm.errors import FramewormError, RunFolderError
from frameworm.records.schema import Memory, Quality, RunRecord
from frameworm.watch.run import WatchedRun

SHORTEST_S = 3.0
COST_SHARE = 0.1  # fraction of the time that judging may take


class Judge:
    """Keeps the record of one run up to date, as often as its cost allows."""

    def __init__(self, run: WatchedRun) -> None:
        self._run = run
        self._record: RunRecord | None = None
        self._version = -1
        self._due = 0.0
        self._config: Config | None = None
        self._config_read = False
        self._name: str | None = None

    def record(self, status: str, before: RunRecord | None) -> RunRecord:
        """The record of the run so far.

        Args:
            status: Its status.
            before: What was known when the run began or was resumed, or the summary of an earlier part of it.
        """
        run = self._run
        with run.lock:
            fresh = self._version == run.version or time.monotonic() < self._due
            if self._record is None or (not fresh and not (run.behind and self._record.steps)):
                began = time.monotonic()
                self._record = self._judged(status, before)
                self._version = run.version
                took_s = time.monotonic() - began
                self._due = time.monotonic() + max(SHORTEST_S, took_s / COST_SHARE)
            self._record.status = status
            return self._record

    def _judged(self, status: str, before: RunRecord | None) -> RunRecord:
        run = self._run
        config = self._read_config()
        sums: dict[int, RankSums] = {rank: index.sums for rank, index in run.ranks.items()}
        first = next((index for _, index in sorted(run.system.items())), None)
        if self._name is None:
            self._name = run.folder.run_name() or run.folder.path.name
        around = Surroundings(
            name=self._name,
            status=status,
            world_size=max(1, len(sums)),
            facts=facts_of(before),
            environment={} if before is None else before.environment,
            memory=_memory(run),
            system=None if first is None else first.figures.summary(),
        )
        record, _ = record_of_sums(run.folder, around, sums)
        record.notes.clear()  # they apply to runs that have ended
        if run.folder.config.exists():
            record.source = "engine"
        if config is not None:
            record.workload = config.workload
            # Settings that a config leaves to the machine are known only when the run has ended.
            if config.parallel.strategy != "auto":
                record.strategy = config.parallel.strategy
            if config.gpu.mixed_precision != "auto":
                precision = config.gpu.mixed_precision
                record.precision = record.precision or ("fp32" if precision == "off" else precision)
        if before is not None:
            record.workload = before.workload or record.workload
            record.started, record.source = before.started, before.source
        index = run.first()
        if index is not None and index.latest is not None:
            # Step counts of a sample are estimates; the number of the latest step is exact.
            record.steps = index.latest.step if index.sums.share < 1 else max(record.steps, index.latest.step)
            latest = index.sums.aggregate.series()[-1:]
            record.quality = Quality(train_loss=latest[0].loss if latest else None)
        with contextlib.suppress(RunFolderError):
            record.epochs = run.folder.read_epochs() if run.folder.epochs_csv.exists() else []
            if record.epochs:
                record.quality.val_loss = record.epochs[-1].val_loss
                record.quality.val_accuracy = record.epochs[-1].val_accuracy
        record.slow_steps = [] if index is None else index.sums.aggregate.slow_steps()
        if sums:
            steps = {rank: found.account for rank, found in run.ranks.items()}
            apply_judgement(record, judge(record, steps=steps, system=record.system, config=config))
            share = min(found.sums.share for found in run.ranks.values())
            if share < 1:
                record.notes.append(sample_note(share, "curves and figures are by them too; zoom in to see each step"))
        return record

    def _read_config(self) -> Config | None:
        folder = self._run.folder
        if not self._config_read and folder.config.exists():
            self._config_read = True
            # The environment variables of the watching process are not those of the run.
            with contextlib.suppress(FramewormError):
                self._config = load_config_from_text(folder.read_config(), show_path(folder.config), environ={})
        return self._config


def _memory(run: WatchedRun) -> Memory:
    """Peak memory of the first rank: of its device if it has one."""
    for _, index in sorted(run.system.items()):
        summary = index.figures.summary()
        if summary is None:
            continue
        host = None if summary.rss_bytes is None else int(summary.rss_bytes.max)
        if summary.gpu_memory_bytes is not None:
            peak = int(summary.gpu_memory_bytes.max)
            return Memory(peak, None, summary.gpu_memory_total_bytes, host)
        return Memory(host, None, None, host)
    return Memory()
