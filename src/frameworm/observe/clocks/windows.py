"""Windows of torch.profiler over a few steps of a run, and the clock that opens and closes them."""

from __future__ import annotations

import gzip
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from frameworm.config.schema import ObserveConfig
from frameworm.errors import FramewormError
from frameworm.observe.clocks.communication import BucketRecorder, StepCommunication
from frameworm.observe.clocks.nvtx import EPOCH, REPLAY, STEP, PhaseRanges, nvtx_functions
from frameworm.observe.clocks.phases import StepClock, Timed
from frameworm.observe.trace.host import TOP
from frameworm.observe.trace.read import read_trace
from frameworm.records.atomic import replacing, write_atomic
from frameworm.torch_private.execution import profiler_enabled

log = logging.getLogger("frameworm")

_COMPRESSION = 3
PREFIX = "frameworm:"
TRACE_SUFFIX = ".pt.trace.json.gz"  # TensorBoard's profiler plugin looks for this suffix


class Schedule(NamedTuple):
    """How many steps to skip, to warm up the profiler and to record; and how often to repeat that."""

    wait: int = 10  # skips compilation, capture, autotuning and the first allocations
    warmup: int = 2
    active: int = 5
    repeat: int = 1

    @property
    def steps(self) -> int:
        """Steps of one window including the wait before it."""
        return self.wait + self.warmup + self.active


def choose_schedule(total_steps: int | None, wanted: Schedule | None = None) -> Schedule | None:
    """As many of the wanted windows as fit; a shorter one in a short run; None for fewer than two steps."""
    wanted = wanted or Schedule()
    if total_steps is None:
        return wanted
    if total_steps >= wanted.steps:
        return wanted._replace(repeat=min(wanted.repeat, total_steps // wanted.steps))
    if total_steps < 2:
        return None
    warmup = min(wanted.warmup, total_steps - 1)
    active = min(wanted.active, total_steps - warmup)
    return Schedule(total_steps - warmup - active, warmup, active)


class TraceWindow:
    """Records a few steps, once or several times, and writes traces and their summaries to the run folder.

    The first is `trace-rank{r}.pt.trace.json.gz` with `trace-rank{r}-summary.json`, the next `trace-rank{r}.2.pt...`:
    names that TensorBoard's profiler plugin recognises. If a window fails, training continues, and `note` says why.

    Args:
        device: Where the steps run.
        rank: This process.
        total_steps: Steps of the run, if known.
        schedule: When to record; default: the usual window.
        operators: Operators, kernels and ranges in each list of a summary.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        total_steps: int | None,
        schedule: Schedule | None = None,
        operators: int = TOP,
    ) -> None:
        self.folder: Path | None = None  # the run folder, once known
        self._device = device
        self._rank = rank
        self._operators = operators
        self._schedule = choose_schedule(total_steps, schedule)
        self._profiler: profile | None = None
        self._steps = 0
        self._began = 0  # steps before the current window's wait
        self._windows = 0
        self._recorded: list[str] = []  # steps of each window written so far
        self._problems: list[str] = []
        self._over = self._schedule is None
        if self._over:
            self.give_up("a window needs at least two steps")

    @property
    def note(self) -> str | None:
        """What has been recorded so far; None before the first window has closed."""
        texts = list(self._problems)
        if self._recorded:
            assert self._schedule is not None
            which = "those after the warm-up" if self._schedule.warmup else "them"
            texts.insert(
                0,
                f"torch.profiler ran in steps {' and '.join(self._recorded)}, which made them slower: "
                f"trace-rank*{TRACE_SUFFIX} holds {which}",
            )
        return "; ".join(texts) or None

    @property
    def running(self) -> bool:
        """Whether the profiler is on, warming up or recording."""
        return self._profiler is not None

    @property
    def recording(self) -> bool:
        """Whether the current step is being recorded."""
        return self._profiler is not None and self._profiler.current_action in (
            ProfilerAction.RECORD,
            ProfilerAction.RECORD_AND_SAVE,
        )

    def give_up(self, reason: str) -> None:
        """Record nothing from now on, and note why."""
        self._over = True
        self._problems.append(f"no trace: {reason}")

    def begin(self) -> None:
        """Call before the first step of the run or of an epoch."""
        if self._schedule is not None and self._steps - self._began == self._schedule.wait:
            self._open()

    def after_step(self) -> bool:
        """Call after a step; returns True if the window spent time between steps, which belongs to none of them."""
        if self._over:
            return False
        assert self._schedule is not None
        self._steps += 1
        passed = self._steps - self._began
        if self._profiler is None:
            if passed == self._schedule.wait:
                self._open()
                return True
            return False
        if passed < self._schedule.steps:
            self._profiler.step()
            return True
        self._write()
        self._over = self._windows == self._schedule.repeat
        self._began = self._steps
        self.begin()
        return True

    def close(self) -> None:
        """Stop recording and write what there is; later calls do nothing."""
        if self._over:
            return
        if self._profiler is not None:
            self._write()
        elif not self._windows:
            self.give_up(f"the run ended after {self._steps} steps, before the window opened")
        self._over = True

    def _write(self) -> None:
        """End the open window."""
        assert self._schedule is not None
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        self._windows += 1
        first = self._began + self._schedule.wait + 1
        try:
            profiler.stop()
            if self._steps < first + self._schedule.warmup:
                self._problems.append("no trace: the run ended while the profiler warmed up")
                return
            self._export(profiler)
            self._recorded.append(f"{first} to {self._steps}")
        except (OSError, RuntimeError, FramewormError) as error:
            self._problems.append(f"the trace of rank {self._rank} was lost: {error}")
            log.warning("%s; training continues", self._problems[-1])

    def _open(self) -> None:
        schedule = self._schedule
        assert schedule is not None
        if self._over or self._profiler is not None:
            return
        if profiler_enabled():  # starting a second one would silently stop the first
            self.give_up("another torch.profiler is running")
            return
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)

        def action(step: int) -> ProfilerAction:
            # Never RECORD_AND_SAVE: the window is closed explicitly, so that a run may end within it.
            return ProfilerAction.WARMUP if step < schedule.warmup else ProfilerAction.RECORD

        try:
            # acc_events: without it torch warns, although there is only one cycle.
            self._profiler = profile(activities=activities, schedule=action, profile_memory=True, acc_events=True)
            self._profiler.start()
        except RuntimeError as error:
            self._profiler = None
            self.give_up(f"torch.profiler did not start: {error}")
            log.warning("%s", self.note)

    def _export(self, profiler: profile) -> None:
        """Write the trace atomically, and its summary next to it."""
        assert self.folder is not None, "write_to comes before the first step"
        name = f"trace-rank{self._rank}" + ("" if self._windows == 1 else f".{self._windows}")
        final = self.folder / f"{name}{TRACE_SUFFIX}"
        with tempfile.TemporaryDirectory(prefix=".trace-", dir=self.folder) as temporary:
            plain = Path(temporary) / "trace.json"
            profiler.export_chrome_trace(str(plain))
            if not plain.exists():
                raise OSError(f"torch.profiler could not write to {self.folder}")
            summary = read_trace(plain, self._operators)
            with (
                plain.open("rb") as source,
                replacing(final) as target,
                gzip.GzipFile("", "wb", _COMPRESSION, target, mtime=0) as packed,
            ):
                shutil.copyfileobj(source, packed, 1 << 20)
        summary.source = final.name
        summary.rank = self._rank
        write_atomic(self.folder / f"{name}-summary.json", json.dumps(summary.to_dict(), indent=1))


class _RecordedRanges:
    """`record_function` as a pair of push and pop functions."""

    def __init__(self) -> None:
        self._open: list[record_function] = []

    def push(self, name: str) -> None:
        self._open.append(record_function(name))
        self._open[-1].__enter__()

    def pop(self) -> None:
        self._open.pop().__exit__(None, None, None)


class RangedClock:
    """A step clock that also opens named ranges and advances the trace window; delegates the rest to the clock."""

    def __init__(self, clock: StepClock, window: TraceWindow | None, ranges: PhaseRanges | None) -> None:
        self._clock = clock
        self._window = window
        self._ranges = ranges
        recorded = _RecordedRanges()
        self._recorded = PhaseRanges(recorded.push, recorded.pop, PREFIX)
        self.max_steps_ahead = clock.max_steps_ahead
        self.divide = clock.divide
        self.copied = clock.copied

    @property
    def note(self) -> str | None:
        return self._clock.note

    @property
    def divides(self) -> bool:
        return self._clock.divides

    def record_buckets(self) -> BucketRecorder:
        return self._clock.record_buckets()

    def start(self) -> None:
        """Begin an epoch."""
        if self._window is not None:
            self._window.begin()
        self._clock.start()
        if self._ranges is not None:
            self._ranges.begin_epoch()
        self._begin()

    def mark(self, name: str) -> None:
        self._clock.mark(name)
        self._marked(name)

    def split(self, shares: Mapping[str, float], communication: StepCommunication | None = None) -> None:
        self._clock.split(shares, communication)
        self._marked(REPLAY)

    def end_step(self, payload: Any, scalars: tuple[torch.Tensor | None, ...]) -> list[Timed]:
        timed = self._clock.end_step(payload, scalars)
        self._recorded.end_step()
        if self._ranges is not None:
            self._ranges.end_step()
        if self._window is not None and self._window.after_step():
            self._clock.start()
        self._begin()
        return timed

    def drain(self) -> list[Timed]:
        # A checkpoint or the end of the epoch follows, which the predicted phases do not include.
        self._recorded.pause()
        if self._ranges is not None:
            self._ranges.pause()
        return self._clock.drain()

    def abandon(self) -> list[Timed]:
        return self._clock.abandon()

    def close(self) -> None:
        """End the run: close ranges and window."""
        self._recorded.end()
        if self._ranges is not None:
            self._ranges.end_epoch()
        if self._window is not None:
            self._window.close()

    def _begin(self) -> None:
        if self._window is not None and self._window.recording:
            self._recorded.begin()
        if self._ranges is not None:
            self._ranges.begin()

    def _marked(self, name: str) -> None:
        self._recorded.mark(name)
        if self._ranges is not None:
            self._ranges.mark(name)


class Windows:
    """What `observe.trace` and `observe.nvtx` request for one run."""

    def __init__(self, config: ObserveConfig, device: torch.device, rank: int, total_steps: int | None) -> None:
        self._window = None
        if config.trace == "window":
            schedule = Schedule(config.trace_wait, config.trace_warmup, config.trace_active, config.trace_repeat)
            self._window = TraceWindow(device, rank, total_steps, schedule, config.trace_operators)
        functions = nvtx_functions() if config.nvtx else None
        self._ranges = None if functions is None else PhaseRanges(*functions, around=STEP, epoch=EPOCH)
        self._clock: RangedClock | None = None
        self._missing = "no NVTX ranges: there is no CUDA device" if config.nvtx and functions is None else None

    def around(self, clock: StepClock) -> StepClock:
        """The clock that the loop should use: the given one if nothing was requested."""
        if self._window is None and self._ranges is None:
            return clock
        self._clock = RangedClock(clock, self._window, self._ranges)
        return self._clock

    def write_to(self, folder: Path | None) -> None:
        """Set the folder for traces; without a folder none is recorded."""
        if self._window is None:
            return
        self._window.folder = folder
        if folder is None:
            self._window.give_up("the run has no folder to put it into")

    def close(self) -> list[str | None]:
        """Close open ranges, write the trace, and return the notes of the run."""
        if self._clock is not None:
            self._clock.close()
        return [self._missing, None if self._window is None else self._window.note]
