"""One run, indexed as its files grow: curves, sums and events, in memory that does not grow with the steps."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frameworm.attach.record import RankSums
from frameworm.records.account import StepAccount
from frameworm.records.observations import SystemSample
from frameworm.records.samples import parse_sample
from frameworm.records.schema import StepRecord
from frameworm.records.store import RunFolder
from frameworm.records.system_metrics import SystemMetrics
from frameworm.records.writer import StepSeeker, parse_step
from frameworm.watch.bins import Bin, Bins, joined, table
from frameworm.watch.files import Follower, Inside

PORTION_BYTES = 2**18  # of one file at a time
REFRESH_S = 0.25  # reading time per refresh, so that a long run or one of many ranks does not block the others
SHORTEST_REFRESH_S = 0.8
SHORTEST_BUSY_S = 0.02  # while there is more to read
DETAIL_STEPS = 40_000  # most steps that are re-read to show a part of a long run step by step
MOST_READ_AGAIN = 2 * DETAIL_STEPS  # because the number of steps in a sampled bin is an estimate
# If files are larger than this when a run is first shown, only a sample is read, which takes a few seconds.
STEPS_BACKLOG_BYTES = 16 * 2**20
SAMPLES_BACKLOG_BYTES = 4 * 2**20
_SMALLEST_BACKLOG_BYTES = 2**14
_COUNTED_BYTES = 2**16  # of steps added after a sample, only some blocks of this size are summed up
MOST_EVENTS = 200
MOST_EPOCHS = 10_000
MOST_RANKS = 1_024
SYSTEM_RANKS = 8
_RANK_BINS = 400
_ALL_RANKS_BINS = 50_000  # of all ranks but the first together
_SYSTEM_BINS = 1_000
_PAUSE_S = 60.0
_PAUSE_STEPS = 20.0
_SYSTEM_NAME = re.compile(r"system-rank(\d{1,6})\.jsonl")
_PLAIN = (
    "gpu_busy",
    "gpu_memory_bytes",
    "gpu_memory_total_bytes",
    "gpu_power_w",
    "gpu_temperature_c",
    "gpu_clock_mhz",
    "cpu_process",
    "io_wait",
    "host_memory",
    "rss_bytes",
)
_BANDS = frozenset({"loss", "step_s", "grad_norm"})
_RATES = ("disk_read_bytes", "disk_write_bytes", "network_sent_bytes", "network_received_bytes")


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a run."""

    time: float | None
    step: int | None
    kind: str  # epoch, skipped, loss, pause, clock, throttled
    text: str


class RankIndex:
    """The steps of one rank: their curves, their sums, and for the first rank its events.

    Args:
        limit: Most bins of its curves.
        events: Receives the events; None: they are not recorded.
        share: Fraction of the steps that are summed up, if they are a sample.
    """

    def __init__(self, limit: int, events: deque[Event] | None, share: float = 1.0) -> None:
        self.bins = Bins(limit)
        self.sums = RankSums()
        self.sums.share = share
        self.account = StepAccount(share=share)
        self.latest: StepRecord | None = None
        self.epoch_ends: dict[int, int] = {}  # the last step so far of each epoch
        self._events = events
        self._typical_s = 0.0
        self._bad_loss = False

    def add(self, step: StepRecord, weight: float = 1.0, *, follows: bool = True, counts: bool = True) -> None:
        """Add one step.

        Args:
            step: The step.
            weight: How many steps it stands for in the curves.
            follows: False: steps before it were left out.
            counts: Whether it is included in the sums.
        """
        if not math.isfinite(step.step_s) or step.step_s < 0:
            return
        if not math.isfinite(step.time):
            step.time = 0.0 if self.latest is None else self.latest.time
        if self._events is not None:
            self._notice(step, self._events, follows)
        self.bins.add(step.step, step.time, step_values(step), weight)
        if counts:
            self.sums.add(step)
            self.account.add(step)
        self.latest = step
        if step.epoch in self.epoch_ends or len(self.epoch_ends) < MOST_EPOCHS:
            self.epoch_ends[step.epoch] = step.step
        self._typical_s = step.step_s if not self._typical_s else 0.95 * self._typical_s + 0.05 * step.step_s

    def _notice(self, step: StepRecord, events: deque[Event], follows: bool) -> None:
        before = self.latest
        if step.skipped:
            events.append(Event(step.time, step.step, "skipped", "update left out: gradients were not finite"))
        bad = step.loss is not None and not math.isfinite(step.loss)
        if bad and not self._bad_loss:
            events.append(Event(step.time, step.step, "loss", f"the loss is {step.loss}"))
        self._bad_loss = bad
        if before is None:
            return
        if step.epoch > before.epoch:
            text = f"epoch {step.epoch} began" if follows else f"epoch {step.epoch} began, in this step or before it"
            events.append(Event(step.time, step.step, "epoch", text))
        if not follows:
            return
        gap_s = step.time - before.time - step.step_s
        if gap_s > max(_PAUSE_S, _PAUSE_STEPS * self._typical_s):
            events.append(Event(step.time, step.step, "pause", f"no step for {gap_s:,.0f} s: the run stood still"))
        elif step.time < before.time - 1.0:
            events.append(
                Event(step.time, step.step, "clock", f"the clock went back by {before.time - step.time:,.0f} s")
            )


class SystemIndex:
    """The machine as sampled by one rank."""

    def __init__(self) -> None:
        self.bins = Bins(_SYSTEM_BINS)
        self.figures = SystemMetrics()
        self.latest: SystemSample | None = None
        self._elapsed_s = 0.0

    def add(self, sample: SystemSample) -> None:
        """Add one sample; if the clock goes back, no time is counted."""
        if not math.isfinite(sample.time):
            return
        before = self.latest
        if before is not None:
            self._elapsed_s += max(0.0, sample.time - before.time)
        try:
            values = _sample_values(sample, before)
            self.figures.add(sample, self._elapsed_s)
        except (TypeError, ValueError, ArithmeticError):  # JSON that a sampler never writes
            return
        self.bins.add(self._elapsed_s, sample.time, values)
        self.latest = sample


class WatchedRun:
    """A run folder and what has been read of it. All methods are thread-safe.

    Args:
        folder: The run.
        inside: Opens its files.
    """

    def __init__(self, folder: RunFolder, inside: Inside) -> None:
        self.folder = folder
        self.version = 0  # increases with every change
        self.behind = 0  # bytes of the step files left to read
        self.lock = threading.RLock()
        self.ranks: dict[int, RankIndex] = {}
        self.system: dict[int, SystemIndex] = {}
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._inside = inside
        self._step_files: dict[int, Follower] = {}
        self._system_files: dict[int, Follower] = {}
        self._left: dict[int, int] = {}  # bytes left of each rank's steps
        self._queue: deque[tuple[str, int]] = deque()  # files to continue with
        self._refreshed_at = -math.inf

    def refresh(self) -> None:
        """Read on in all files for a moment; rate-limited, with a shorter interval while there is more to read."""
        with self.lock:
            began = time.monotonic()
            if began - self._refreshed_at < (SHORTEST_BUSY_S if self.behind else SHORTEST_REFRESH_S):
                return
            if not self._queue:
                self._find_files()
                self._queue.extend(("steps", rank) for rank in sorted(self._step_files))
                self._queue.extend(("system", rank) for rank in sorted(self._system_files))
            # One portion of each in turn, so that ranks stay in step; the rest waits for the next refresh.
            while self._queue:
                kind, rank = self._queue.popleft()
                read = self._read_steps if kind == "steps" else self._read_samples
                if read(rank):
                    self._queue.append((kind, rank))
                if time.monotonic() - began > REFRESH_S:
                    break
            self.behind = sum(self._left.values())
            self._refreshed_at = time.monotonic()

    def progress(self) -> float:
        """The fraction of the step files that has been read, 0 to 1."""
        size = sum(follower.size for follower in self._step_files.values())
        return 1.0 if not size else max(0.0, 1.0 - self.behind / size)

    def first(self) -> RankIndex | None:
        """The lowest rank that has steps."""
        return next((index for _, index in sorted(self.ranks.items()) if index.latest is not None), None)

    def series(self, first: float | None, last: float | None, most: int) -> dict[str, Any]:
        """The curves of the first rank between two steps, in at most `most` bins.

        A part of a long run is re-read from its file if that shows more detail than the bins in memory.
        """
        with self.lock:
            index = self.first()
            if index is None:
                return {**table([]), "samples_factor": 1.0}
            bins = index.bins.between(first, last)
            whole = index.bins.joined(most) if first is None and last is None else None
            stride = index.bins.stride
            factor = self._samples_factor(index)
            rank = min(rank for rank, item in self.ranks.items() if item is index)
            follower = self._step_files[rank]
        steps = sum(item.count for item in bins)
        # No bins in a sample: the range is between two of its blocks.
        is_coarse = (stride > 1 and bins) or follower.thinning > 1
        if is_coarse and len(bins) < most and steps <= DETAIL_STEPS:
            detail = self._detail(follower.path, first, last)
            bins, whole = (detail, None) if detail else (bins, whole)
        return {**table(joined(bins, most) if whole is None else whole, _BANDS), "samples_factor": factor}

    def heat(self, channel: str, columns: int) -> dict[str, Any]:
        """Ranks side by side: the mean of a channel per rank and equally long part of the run."""
        with self.lock:
            present = {rank: index for rank, index in sorted(self.ranks.items()) if len(index.bins)}
            ends = [(index.bins.between(None, None)[0].first, index.bins.last or 0.0) for index in present.values()]
            if not ends:
                return {"ranks": [], "first": 0, "x": [], "rows": [], "channels": []}
            low, high = min(end[0] for end in ends), max(end[1] for end in ends)
            columns = int(max(1, min(columns, high - low + 1)))
            width = (high - low + 1) / columns
            rows = [_row(index.bins.between(None, None), channel, low, width, columns) for index in present.values()]
            names = dict.fromkeys(
                name
                for index in present.values()
                for item in index.bins.between(None, None)[-1:]
                for name in item.channels
            )
        return {
            "ranks": list(present),
            "first": low,
            "x": [low + width * (column + 1) - 1 for column in range(columns)],
            "rows": rows,
            "channels": [name for name in names if name in ("step_s", "work_s") or name.startswith("phase:")],
        }

    def machine(self, most: int) -> dict[str, Any]:
        """Samples of the machine over the run, for the first few ranks, by seconds since the first sample."""
        with self.lock:
            chosen = [(rank, index) for rank, index in sorted(self.system.items()) if len(index.bins)][:SYSTEM_RANKS]
            return {str(rank): table(joined(index.bins.between(None, None), most)) for rank, index in chosen}

    def _find_files(self) -> None:
        files = self.folder.step_files()
        backlog = max(STEPS_BACKLOG_BYTES // max(len(files), 1), _SMALLEST_BACKLOG_BYTES)
        for rank, path in files.items():
            if rank not in self._step_files and len(self._step_files) < MOST_RANKS:
                self._step_files[rank] = Follower(self._inside, path, backlog)
                self._left[rank] = self._step_files[rank].size
        backlog = max(SAMPLES_BACKLOG_BYTES // max(len(files), 1), _SMALLEST_BACKLOG_BYTES)
        with contextlib.suppress(OSError):
            for path in self.folder.path.iterdir():
                match = _SYSTEM_NAME.fullmatch(path.name)
                if match and len(self._system_files) < MOST_RANKS:
                    self._system_files.setdefault(int(match[1]), Follower(self._inside, path, backlog))

    def _read_steps(self, rank: int) -> bool:
        """Read a portion of a rank's steps; returns whether there are more."""
        file = self._step_files[rank]
        portion = file.read(PORTION_BYTES)
        leads = rank == min(self._step_files)
        if portion.restarted:
            self.ranks.pop(rank, None)
            if leads:
                self.events.clear()
        if portion.lines and rank not in self.ranks:
            limit, events = (2_000, self.events) if leads else (self._rank_bins(), None)
            self.ranks[rank] = RankIndex(limit, events, 1 / file.thinning)
        is_sample, follows = portion.weight > 1, portion.weight == 1
        for line in portion.lines:
            step = parse_step(line.text)
            if step is not None:
                counts = is_sample or line.offset // _COUNTED_BYTES % round(file.thinning) == 0
                self.ranks[rank].add(step, portion.weight, follows=follows, counts=counts)
                follows = True
        self._left[rank] = portion.behind
        self.version += bool(portion.lines or portion.restarted)
        return portion.behind > 0

    def _rank_bins(self) -> int:
        return min(_RANK_BINS, max(2, _ALL_RANKS_BINS // len(self._step_files)))

    def _read_samples(self, rank: int) -> bool:
        """Read a portion of a rank's machine samples; returns whether there are more."""
        portion = self._system_files[rank].read(PORTION_BYTES)
        if portion.restarted:
            self.system.pop(rank, None)
        if portion.lines and rank not in self.system:
            self.system[rank] = SystemIndex()
        for line in portion.lines:
            sample = parse_sample(line.text)
            if sample is not None:
                self.system[rank].add(sample)
        self.version += bool(portion.lines or portion.restarted)
        return portion.behind > 0

    def _samples_factor(self, first: RankIndex) -> float:
        """Samples of all ranks per sample of the first rank."""
        own = first.sums.aggregate.measured_samples
        every = sum(index.sums.aggregate.measured_samples for index in self.ranks.values())
        return every / own if own else float(len(self.ranks))

    def _detail(self, path: Path, first: float | None, last: float | None) -> list[Bin]:
        """The steps of a range, re-read from the file."""
        bins = Bins(4_000)
        try:
            with self._inside.open(path) as file:
                steps = StepSeeker(file).onwards(0 if first is None else math.ceil(first))
                for step in itertools.islice(steps, MOST_READ_AGAIN):
                    if last is not None and step.step > last:
                        break
                    if math.isfinite(step.step_s) and math.isfinite(step.time):
                        bins.add(step.step, step.time, step_values(step))
        except OSError:
            return []
        return bins.between(None, None)


def step_values(step: StepRecord) -> dict[str, float]:
    """The values that a step adds to the curves."""
    step_s = step.step_s
    phases = step.phases
    values = {
        "step_s": step_s,
        "work_s": step_s - phases.get("communication_exposed", 0.0),
        "training_s": step_s - phases.get("validation", 0.0),
        "samples": step.samples,
    }
    for name in ("loss", "lr", "grad_norm", "tokens", "communication_s", "rank_wait_s"):
        value = getattr(step, name)
        if value is not None:
            values[name] = value
    seen_s = 0.0
    for name, seconds in phases.items():
        values[f"phase:{name}"] = seconds
        seen_s += seconds
    if phases and "other" not in phases:
        values["phase:other"] = max(0.0, step_s - seen_s)
    for name, value in step.metrics.items():
        values[f"metric:{name}"] = value
    return values


def _sample_values(sample: SystemSample, before: SystemSample | None) -> dict[str, float]:
    values = {name: float(value) for name in _PLAIN if (value := getattr(sample, name)) is not None}
    if sample.cpu_cores:
        values["cpu_busy"] = sum(sample.cpu_cores) / len(sample.cpu_cores)
        values["cpu_busiest_core"] = max(sample.cpu_cores)
    if before is not None and sample.time > before.time:
        for name in _RATES:
            now, then = getattr(sample, name), getattr(before, name)
            if now is not None and then is not None and now >= then:
                values[f"{name}_per_s"] = (now - then) / (sample.time - before.time)
    return values


def _row(bins: list[Bin], channel: str, low: float, width: float, columns: int) -> list[float | None]:
    sums, counts = [0.0] * columns, [0.0] * columns
    for item in bins:
        found = item.channels.get(channel)
        if found is not None:
            # A bin wider than a column counts in all columns that it overlaps.
            start, end = int((item.first - low) / width), int((item.last - low) / width)
            for column in range(max(start, 0), min(end, columns - 1) + 1):
                sums[column] += found[1]
                counts[column] += found[0]
    return [total / count if count else None for total, count in zip(sums, counts)]
