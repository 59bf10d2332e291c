"""Cheap statistics on every step, from your own loop or from a `Trainer`."""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import ClassVar, TextIO

import torch
import torch.distributed as dist

from frameworm.diagnose.rules.judge import apply_judgement, judge
from frameworm.hardware.fingerprint import environment_fingerprint
from frameworm.observe.clocks.device_timer import DeviceTimer, PendingStep, choose_observed
from frameworm.records.events import Listener
from frameworm.records.outliers import MOST_KEPT
from frameworm.records.schema import PHASES, Batch, RunRecord, StepRecord
from frameworm.records.statistics import Spread, StepAggregate
from frameworm.records.writer import JsonLinesWriter
from frameworm.report.run.measurements import render_metrics

TOTAL = "total_time"
METRIC_OF_PHASE = {phase: f"{phase}_time" for phase in PHASES} | {
    "data_wait": "data_loading_time",
    "communication_exposed": "communication_time",
}
PHASE_OF_METRIC = {metric: phase for phase, metric in METRIC_OF_PHASE.items()} | {phase: phase for phase in PHASES}


def join_metrics(step: StepRecord) -> dict[str, float]:
    """All times of a step under the names of metrics."""
    phases = {METRIC_OF_PHASE.get(phase, phase): seconds for phase, seconds in step.phases.items()}
    return {**phases, **step.metrics, TOTAL: step.step_s}


def divide_metrics(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Split metrics into phases and others, without the total."""
    phases: dict[str, float] = {}
    others: dict[str, float] = {}
    for name, seconds in metrics.items():
        phase = PHASE_OF_METRIC.get(name)
        if phase is not None:
            phases[phase] = phases.get(phase, 0.0) + seconds
        elif name != TOTAL:
            others[name] = seconds
    return phases, others


def judged(record: RunRecord) -> RunRecord:
    """Add verdict and findings to a record, and return it."""
    apply_judgement(record, judge(record))
    return record


# No host is this far ahead of its device, so waiting for the oldest of this many steps takes no time.
MOST_IN_FLIGHT = 256
# Processing many steps at a time keeps code and data in the processor's caches.
GROUP_STEPS = 64
# Values per metric returned by `metrics`; statistics cover all of them.
RECENT_VALUES = 10_000
STANDARD_METRICS = (
    "data_loading_time",
    "forward_time",
    "backward_time",
    "optimizer_time",
    "communication_time",
    TOTAL,
)

_Event = torch.cuda.Event


class _Measure:
    """One use of `PerformanceMonitor.measure`."""

    __slots__ = ("_begin", "_begin_s", "_monitor", "_name")

    def __init__(self, monitor: PerformanceMonitor, name: str) -> None:
        self._monitor = monitor
        self._name = name

    def __enter__(self) -> None:
        self._begin = self._monitor._timer.mark()
        self._begin_s = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._begin_s
        if self._begin is None:
            self._monitor.record_metric(self._name, seconds)
        else:
            self._monitor._record_timed(self._name, self._begin, seconds)


class MetricValues(list[float]):
    """The recent values of one metric; `append` also records the value, as `record_metric` does."""

    def __init__(self, values: Iterable[float], record: Callable[[float], None]) -> None:
        super().__init__(values)
        self._record = record

    def append(self, seconds: float) -> None:
        """Record a value."""
        self._record(seconds)
        super().append(float(seconds))


class PerformanceMonitor(Listener):
    """Keeps statistics of named times, one value per step and name, in bounded memory at a few microseconds each.

    In your own loop::

        monitor = PerformanceMonitor()
        for batch in loader:
            monitor.start_step()
            with monitor.measure("forward_time"):
                loss = model(batch)
            monitor.record_metric("backward_time", seconds)
        monitor.print_summary()

    With a `Trainer` it is a callback, `Trainer(..., callbacks=[monitor])`, and no calls are needed. The standard names
    (`data_loading_time`, `forward_time`, `backward_time`, `optimizer_time`, `communication_time`, `total_time`) become
    phases of the step and are diagnosed; any other name is kept as it is.

    Args:
        path: Also write steps as JSON lines to this file, or to one file per rank in this folder. Writing never waits;
            records that the disk refuses are counted in `lost`.
        device: With `cuda`, `measure` and whole steps are timed by events in the device's stream, which are read some
            steps later. `auto`: the GPU if there is one.
        rank: This process among several; default: ask torch.distributed.
        outliers: Number of outlier steps to keep; the first few steps are always slow and not considered.
    """

    must_not_break_training: ClassVar[bool] = True

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        device: torch.device | str = "cpu",
        rank: int | None = None,
        outliers: int = MOST_KEPT,
    ) -> None:
        self._device = choose_observed(device)
        self._timer = DeviceTimer(self._device)
        self._path = None if path is None else Path(path)
        self._rank = rank
        self._lock = threading.RLock()
        self._spreads: dict[str, Spread] = {}
        self._recent: dict[str, deque[float]] = {}
        self._aggregate = StepAggregate(slow_limit=outliers)
        self._waiting: list[tuple[StepRecord, dict[str, float]]] = []
        self._open: PendingStep | None = None
        self._in_flight: deque[PendingStep] = deque()
        self._steps = 0
        self._knows_samples = False
        self._writer: JsonLinesWriter | None = None
        self._lost = 0
        self._problem: str | None = None
        self._run: RunRecord | None = None
        self._step_start_time: float | None = None

    def start_step(self) -> None:
        """Begin a step, ending one that is still open."""
        with self._lock:
            self._step_start_time = time.time()
            mark = self._timer.mark()
            if self._open is not None:
                # Both share one event; a second one would be superfluous.
                self._close(mark)
            self._steps += 1
            self._open = PendingStep(self._steps, mark)

    def end_step(self, samples: int | None = None, *, tokens: int | None = None, loss: float | None = None) -> None:
        """End the step; the time until `start_step` belongs to no step.

        Args:
            samples: Samples that this rank trained on in the step, for samples per second.
            tokens: Tokens without padding, for tokens per second.
            loss: A number that the host already has; a tensor on a GPU would make it wait.
        """
        with self._lock:
            if self._open is not None:
                self._open.samples, self._open.tokens, self._open.loss = samples, tokens, loss
                self._close(self._timer.mark())

    def record_metric(self, name: str, seconds: float) -> None:
        """Record a time. Within a step, times of one name add up; outside of steps each counts by itself."""
        with self._lock:
            if self._open is None:
                self._keep(name, float(seconds))
            else:
                metrics = self._open.metrics
                metrics[name] = metrics.get(name, 0.0) + float(seconds)

    def measure(self, name: str) -> _Measure:
        """Time a block: `with monitor.measure("forward_time"):`."""
        return _Measure(self, name)

    @property
    def step_start_time(self) -> float | None:
        """When the last step began, on the clock of `time.time()`; None before the first."""
        return self._step_start_time

    @property
    def metrics(self) -> dict[str, MetricValues]:
        """The last 10,000 values of each metric in seconds, oldest first; standard metrics exist before any value.

        Metrics of a step that is still open are included. On a GPU this waits for pending steps.
        """
        with self._lock:
            self._read(wait=True)
            values: dict[str, list[float]] = {name: [] for name in STANDARD_METRICS}
            values |= {name: list(recent) for name, recent in self._recent.items()}
            for name, seconds in ({} if self._open is None else self._open.metrics).items():
                values.setdefault(name, []).append(seconds)
            return {name: MetricValues(kept, partial(self.record_metric, name)) for name, kept in values.items()}

    def get_statistics(self) -> dict[str, dict[str, float]]:
        """Mean, std, min, max, p50, p95 and p99 of each metric, in seconds per step.

        Metrics of a step that is still open are included. On a GPU this waits for pending steps.
        """
        with self._lock:
            self._read(wait=True)
            open_metrics = {} if self._open is None else self._open.metrics
            found = {}
            for name in (*self._spreads, *(name for name in open_metrics if name not in self._spreads)):
                spread = self._spreads.get(name) or Spread()
                if name in open_metrics:
                    spread = copy.deepcopy(spread)
                    spread.add(open_metrics[name])
                figures = spread.statistics()
                if figures is not None:
                    found[name] = dataclasses.asdict(figures)
            return found

    def outlier_steps(self) -> list[StepRecord]:
        """The steps that took far longer than their neighbours, slowest first, with their metrics."""
        with self._lock:
            self._read(wait=True)
            return self._aggregate.slow_steps()

    def record(self) -> RunRecord:
        """The measurements as the record of a run, with verdict and findings; after a `Trainer` run, its own record."""
        with self._lock:
            self._read(wait=True)
            if self._run is not None:
                return self._run
            aggregate = self._aggregate
            record = RunRecord(
                name="monitor",
                status="completed",
                environment=environment_fingerprint(self._device),
                batch=Batch(None, 1, dist.get_world_size() if _is_distributed() else 1, None),
                source="attached",
            )
            record.steps = aggregate.steps
            record.throughput = aggregate.throughput(record.batch.world_size)
            if not self._knows_samples:
                record.throughput.samples_per_s = None
            record.phases = aggregate.phases()
            record.slow_steps = self._aggregate.slow_steps()
            record.unseen = [phase for phase in PHASES if phase not in record.phases]
            return judged(record)

    def print_summary(self, file: TextIO | None = None) -> None:
        """Print each metric with its fraction of the step, the outlier steps, and recommendations."""
        statistics = self.get_statistics()
        with self._lock:
            counts = {name: spread.count for name, spread in self._spreads.items()}
        record = self.record()
        text = render_metrics(statistics, counts, self.outlier_steps(), record, self.notes, total=TOTAL)
        print(text, end="", file=sys.stdout if file is None else file)

    @property
    def lost(self) -> int:
        """Steps that were not written to the file."""
        return self._lost + (0 if self._writer is None else self._writer.lost)

    @property
    def notes(self) -> list[str]:
        """Remarks for readers of the statistics."""
        problem = self._problem or (None if self._writer is None else self._writer.problem)
        return [f"{self.lost} step records were lost: {problem or 'queue full'}"] if self.lost else []

    def close(self) -> None:
        """End an open step and finish writing; the monitor can be used again afterwards."""
        self.end_step()
        with self._lock:
            self._read(wait=True)
            writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            self._lost += writer.lost
            self._problem = self._problem or writer.problem

    def on_step(self, step: StepRecord) -> None:
        """Add a step of a `Trainer`."""
        with self._lock:
            self._add(step, join_metrics(step))

    def on_run_end(self, record: RunRecord) -> None:
        """Keep the record of the run, whose findings use more than the steps, and finish writing."""
        self._run = record
        self.close()

    def _record_timed(self, name: str, begin: _Event, host_s: float) -> None:
        with self._lock:
            end = self._timer.mark()
            if end is None:
                self._timer.give_back(begin)
                self.record_metric(name, host_s)
            elif self._open is not None:
                self._open.timed.append((name, begin, end))
            else:
                alone = PendingStep(None, None)
                alone.timed.append((name, begin, end))
                alone.end = end
                self._in_flight.append(alone)
                self._read(wait=False)

    def _close(self, mark: _Event | None) -> None:
        step, self._open = self._open, None
        assert step is not None
        step.end_s = time.perf_counter()
        step.end = mark
        self._in_flight.append(step)
        self._read(wait=False)

    def _read(self, *, wait: bool) -> None:
        """Process the steps that the device has passed, in order; with `wait`, all of them, and sum them up."""
        while self._in_flight:
            step = self._in_flight[0]
            if step.end is not None:
                if wait or len(self._in_flight) > MOST_IN_FLIGHT:
                    step.end.synchronize()
                elif not step.end.query():
                    return
            self._in_flight.popleft()
            self._finish(step)
        if wait:
            self._sum_up()

    def _finish(self, step: PendingStep) -> None:
        metrics = step.metrics
        for name, begin, end in step.timed:
            metrics[name] = metrics.get(name, 0.0) + self._timer.seconds(begin, end)
            # The end mark of a single measurement is also the end of its pending step.
            self._timer.give_back(begin, None if end is step.end else end)
        if step.number is None:
            self._timer.give_back(step.end)
            for name, seconds in metrics.items():
                self._keep(name, seconds)
            return
        if TOTAL not in metrics:
            if step.begin is not None and step.end is not None:
                metrics[TOTAL] = self._timer.seconds(step.begin, step.end)
            else:
                metrics[TOTAL] = step.end_s - step.begin_s
        self._timer.give_back(step.begin)
        phases, others = divide_metrics(metrics)
        self._knows_samples = self._knows_samples or step.samples is not None
        samples = step.samples or 0
        record = StepRecord(
            step=step.number,
            epoch=1,
            time=time.time(),
            step_s=metrics[TOTAL],
            loss=step.loss,
            lr=None,
            samples=samples,
            count=float(samples),
            tokens=step.tokens,
            phases=phases,
            metrics=others,
        )
        self._add(record, metrics)

    def _add(self, record: StepRecord, metrics: dict[str, float]) -> None:
        self._waiting.append((record, metrics))
        if len(self._waiting) >= GROUP_STEPS:
            self._sum_up()
        if self._path is not None:
            if self._writer is None:
                self._writer = self._open_writer(self._path)
            self._writer.write(record)

    def _sum_up(self) -> None:
        for record, metrics in self._waiting:
            for name, seconds in metrics.items():
                self._keep(name, seconds)
            self._aggregate.add(record)
        self._waiting.clear()

    def _keep(self, name: str, seconds: float) -> None:
        spread = self._spreads.get(name)
        if spread is None:
            spread = self._spreads[name] = Spread()
            self._recent[name] = deque(maxlen=RECENT_VALUES)
        spread.add(seconds)
        self._recent[name].append(seconds)

    def _open_writer(self, path: Path) -> JsonLinesWriter:
        if path.is_dir() or not path.suffix:
            rank = self._rank if self._rank is not None else dist.get_rank() if _is_distributed() else 0
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                self._problem = f"{path}: {error.strerror or error}"
            path = path / f"steps-rank{rank}.jsonl"
        writer = JsonLinesWriter(path)
        # Write the last steps even if a script ends without `close`.
        weakref.finalize(self, writer.close)
        return writer


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
