"""Receives the hooks' reports and turns them into step records.

No error in here may reach the script: it ends the observation with a note, and the script continues.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from frameworm.attach.framework import Loops, strategy_of
from frameworm.attach.graphs import Graphs
from frameworm.attach.padding import rows_of, tokens_of
from frameworm.attach.parameters import Parameters, short_name
from frameworm.attach.samples import StackSamples
from frameworm.attach.steps import COMMUNICATION, INFERENCE, INSIDE, StepFinder
from frameworm.attach.timeline import OWN, START, Stretches
from frameworm.attach.training_thread import TrainingThread
from frameworm.observe.clocks.nvtx import LiveRanges
from frameworm.observe.clocks.phases import BACKWARD, CHECKPOINT, DATA_WAIT, FORWARD, OTHER, VALIDATION
from frameworm.records.schema import StepRecord
from frameworm.records.statistics import DEFAULT_WARMUP
from frameworm.torch_private.execution import in_backward

# Below this, events at every boundary slow a GPU step down: only one step in a few is divided.
SHORT_STEP_S = 0.01
DIVIDE_EVERY = 7  # coprime with 8, 10 and 32, so that work recurring at these intervals is sampled fairly
# Some facts about a step are known only when the next one runs the model.
STEPS_HELD_BACK = 1
# Short steps are made into records several at a time, which keeps the code in the processor's caches.
PASS_ON_EVERY_S = 0.02
CURIOUS_STEPS = 3
METRICS = ("sync_s", "syncs", "logging_s", "pageable_s")
COUNTS = (
    *("fetches", "batches", "backwards", "optimizer_steps", "checkpoints"),
    *("rows", "padding_tokens", "padding_beyond_longest"),
)
# Batches are checked for padding in the first steps, and then at this interval, for two consecutive step numbers, since
# a step's first batch is fetched before the previous step is over.
READ_FIRST, READ_EVERY = 32, 64
_DEEPEST = 4
# Per phase, whether a model called in it starts a phase of its own.
_RUNS_MODELS: dict[str | None, bool] = {None: True, **{phase: FORWARD in inside for phase, inside in INSIDE.items()}}


class Watch:
    """Observes the thread of a process that trains, whichever it is.

    Args:
        write: Receives each step record.
        most_steps: Stop observing after this many steps.
        nvtx: Whether to emit NVTX ranges for the phases.
        after_step: Called with the number of steps so far.

    Attributes:
        busy: Whether a model called now belongs to the current phase; also True once observation has ended.
        curious: Whether precision is still unknown.
        facts: What was learned besides the steps.
        notes: What went wrong, or was limited.
        stack_samples: Samples what the script does in no phase.
        loops: Recognises the loops of libraries.
        graphs: The script's CUDA graphs.
    """

    def __init__(
        self,
        write: Callable[[StepRecord], None],
        most_steps: int | None = None,
        nvtx: bool = False,
        after_step: Callable[[int], None] | None = None,
    ) -> None:
        self.active = True
        self.busy = False
        self.curious = True
        self.facts: dict[str, Any] = {}
        self.notes: list[str] = []
        self.steps = 0
        self.left_out: set[int] = set()
        self.stack_samples: StackSamples | None = None
        self.loops: Loops | None = None
        self._updates = 0
        self._reads_tokens = True
        self._write = write
        self._most_steps = most_steps
        self._ranges: LiveRanges | None = None
        if nvtx:
            self._ranges = LiveRanges(torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop, torch.cuda.is_initialized)
        self._after_step = after_step
        self._finder = StepFinder(self._step_ended)
        self._waiting: deque[tuple[int, Stretches]] = deque()
        self._short = False
        self._passed_on_s = 0.0
        self._thread = TrainingThread()
        self.graphs = Graphs()
        self._wall_s = time.time() - time.perf_counter()
        self._trained: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._last_trained: Callable[[], torch.nn.Module | None] = lambda: None
        self._passes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._last_pass = 0
        self._started: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders with workers
        self._restarts = False
        self._start_s = 0.0
        self._starting: weakref.WeakSet[Any] = weakref.WeakSet()  # passes whose workers have not returned a batch yet
        self._parameters = Parameters()
        self._backward_of: dict[str, float] = {}
        self._exposed: dict[str, float] = {}
        self._exposed_samples = 0
        # A forked child inherits the hooks but has nothing to report to.
        os.register_at_fork(after_in_child=self.stop)

    def is_between(self) -> bool:
        """Whether a step is in progress and in no phase; callable from any thread."""
        return self._finder.begun and not self._finder.phases

    @property
    def is_loading(self) -> bool:
        """Whether a loader is working, for instance starting its workers."""
        return self._finder.phase == DATA_WAIT

    def stop(self) -> None:
        """Stop observing."""
        self.active = False
        self.busy = True
        self.curious = False

    def fail(self, error: Exception) -> None:
        """End the observation after an internal error."""
        self.stop()
        self.notes.append(f"observation ended after {self.steps} steps: {type(error).__name__}: {error}")

    def enter(self, phase: str, counts: Mapping[str, float] | None = None, *, starts: bool = False) -> bool:
        """Begin a phase; return False if it is part of the current one, in which case `leave` must not be called."""
        if not self.active:
            return False
        try:
            if self.graphs.capturing is not None:  # calls are recorded, not run
                self.graphs.capturing.trains |= starts or phase == BACKWARD
                return False
            if not (self._is_watched() or self._takes_over(phase, starts)):
                return False
            if not self._finder.open(phase, counts, starts=starts):
                return False
            self._thread.gave_sign(phase, starts)
            self.busy = not _RUNS_MODELS[self._finder.phase]
            if self._ranges is not None and self.active:
                self._ranges.enter(phase)
        except Exception as error:
            self.fail(error)
            return False
        return True

    def leave(self, label: str | None = None) -> None:
        """End the phase entered last; its time may get a separate label."""
        if not self.active or not self._is_watched() or not self._finder.phases:
            return
        try:
            phase = self._finder.close(label)
            self.busy = not _RUNS_MODELS[self._finder.phase]
            if phase == BACKWARD:
                self._backward_of = self._finder.extra
            elif phase == CHECKPOINT:
                self._finder.add("checkpoints", 1)
            if self._ranges is not None:
                self._ranges.leave()
        except Exception as error:
            self.fail(error)

    def _is_watched(self) -> bool:
        """Whether this is the watched thread, or an autograd thread running its backward pass."""
        watched = threading.get_ident() == self._thread.ident
        return watched or (BACKWARD in self._finder.phases and in_backward())

    def _takes_over(self, phase: str, starts: bool) -> bool:
        """Whether this unwatched thread is to be watched from now on; if so, switch to it."""
        finder, moves = self._finder, self._thread.moves
        if not self._thread.gives_way(phase, starts, None if finder.phases else finder.timeline.position):
            return False
        if self._thread.moves > moves:
            finder.finish()
            self.notes.append(f"after {self.steps} steps training moved to another thread, which was then observed")
        self._finder = StepFinder(self._step_ended)
        self.busy = False
        if self.stack_samples is not None:
            self.stack_samples.watched = self._thread.ident
        return self.active

    def enter_module(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Begin the phase of a call of an outermost module; return False if there is none."""
        if not self.active or (self._thread.sure and not self._is_watched()):
            return False
        try:
            training = module.training
            if torch.is_grad_enabled():
                trains = training or module not in self._trained
                phase = FORWARD if trains else INFERENCE
                if training and self._last_trained() is not module:
                    self._trained.add(module)
                    self._last_trained = weakref.ref(module)
            else:
                phase = VALIDATION if not training and module in self._trained else INFERENCE
            counts = None if self._finder.fetches_seen else sizes_of((*args, *kwargs.values()))
        except Exception as error:
            self.fail(error)
            return False
        return self.enter(phase, counts)

    def passes_over(self, loader: Any, iterator: Any) -> None:
        """Note that a pass over a loader begins, which ends the phase; persistent workers are not restarted."""
        if not self.active:
            return
        try:
            workers = int(loader.num_workers)
            starts = workers > 0 and iterator is not None and iterator not in self._passes
            self.leave(START if starts else None)
            if iterator is None:  # iteration failed to start
                return
            self._last_pass += 1
            self._passes[iterator] = self._last_pass
            if starts:
                self._starting.add(iterator)
                self._restarts = self._restarts or loader in self._started
                self._started.add(loader)
            self.facts["num_workers"] = max(workers, self.facts.get("num_workers", 0))
        except Exception as error:
            self.fail(error)

    def leave_fetch(self, iterator: Any) -> None:
        """End a fetch; the first one from new workers counts as their start-up."""
        if iterator in self._starting:
            self._starting.discard(iterator)
            self.leave(START)
        else:
            self.leave()

    def fetched(self, iterator: Any, batch: Any) -> None:
        """Note that a loader has returned a batch."""
        if not self.active or not self._is_watched():
            return
        try:
            counts = {**sizes_of(batch), "used_batches": 1.0}
            if self._reads_tokens and (self.steps < READ_FIRST or self.steps % READ_EVERY < 2):
                counts.update(self._read_tokens(batch))
            self._finder.fetched(counts, self._passes.get(iterator, 0))
        except Exception as error:
            self.fail(error)

    def _read_tokens(self, batch: Any) -> dict[str, float]:
        """Count padding in a batch, if it can be identified; the time this takes belongs to no step."""
        try:
            found = tokens_of(batch)
        except Exception as error:
            self._reads_tokens = False
            self.notes.append(f"padding is not measured: {type(error).__name__}: {error}")
            found = None
        if self._finder.begun:
            self.skip_time()
        return {} if found is None else found.counts()

    def optimizer_begins(self) -> None:
        """Note that an optimizer begins its step; called within the phase."""
        if not self.active:
            return
        try:
            self._finder.optimizer_begins()
        except Exception as error:
            self.fail(error)

    def closure_begins(self) -> None:
        """Note that an optimizer evaluates its closure; called within its phase."""
        if self.active and threading.get_ident() == self._thread.ident:
            self._finder.closure_begins()

    def optimizer_stepped(self, optimizer: Any) -> None:
        """Note that an optimizer has stepped; called after the phase."""
        if not self.active:
            return
        try:
            self._parameters.look_at(optimizer, self.facts)
            self._updates += 1
            if self.loops is not None and self._updates & (self._updates - 1) == 0:
                self._recognise(self.loops, optimizer)
            if self._ranges is not None:
                self._ranges.stepped()
            self._finder.optimizer_stepped(id(optimizer))
            rate = optimizer.param_groups[0].get("lr")
            if isinstance(rate, (int, float)):
                self._finder.extra.setdefault("lr", float(rate))
        except Exception as error:
            self.fail(error)

    def update_captured(self, optimizer: Any) -> None:
        """Note an optimizer step whose phase was not entered: a graph being captured will execute it."""
        captured = self.graphs.capturing
        if not self.active or captured is None:
            return
        try:
            self._parameters.look_at(optimizer, self.facts)
            captured.updates = True
            captured.optimizer = weakref.ref(optimizer)
        except Exception as error:
            self.fail(error)

    def replayed(self, graph: Any) -> None:
        """Note that a graph was replayed, after its phase; this counts as a step if the graph steps an optimizer."""
        captured = self.graphs.find(graph)
        if not self.active or not captured.updates:
            return
        self.facts["captured_steps"] = self.facts.get("captured_steps", 0) + 1
        if (optimizer := captured.optimizer()) is not None:
            self.optimizer_stepped(optimizer)
        else:
            self._finder.optimizer_stepped(id(captured))

    def waited(self) -> None:
        """Note that the step has waited for communication that began earlier and took an unknown time."""
        if self.active and self._finder.begun:
            self._finder.add("overlapping", 1)

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream in which the step is timed; None if no GPU is in use."""
        return self._finder.timeline.stream

    def spent(self, metric: str, seconds: float, count: str | None = None) -> None:
        """Add host time spent within the phases."""
        if self.active and self._finder.begun and threading.get_ident() == self._thread.ident:
            self._finder.add(metric, seconds)
            if count is not None:
                self._finder.add(count, 1)

    def communicated(self, total_s: float, exposed_s: float) -> None:
        """Note what DDP measured in the last backward pass that reduced gradients."""
        if self.active:
            self._exposed = {"communication_s": total_s, "exposed_s": exposed_s}
            self._exposed_samples += 1
            self._backward_of.update(self._exposed)

    def look(self) -> None:
        """Find out the precision in which the model computes."""
        try:
            if self._finder.phase == FORWARD:
                for kind in ("cuda", "cpu"):
                    if torch.is_autocast_enabled(kind):
                        self.facts["precision"] = short_name(torch.get_autocast_dtype(kind))
                        self.curious = False
        except Exception as error:
            self.fail(error)

    def skip_time(self) -> None:
        """Attribute the time since the last mark to the observation, not to the script."""
        self._finder.timeline.mark(OWN)

    def finish(self) -> None:
        """Write the remaining records, waiting for the events of the last steps."""
        if self.active:
            try:
                self._finder.finish()
            except Exception as error:
                self.fail(error)
        self.stop()
        self._close_ranges()
        try:
            self._pass_on(0, wait=True)
        except Exception as error:
            self.notes.append(f"the last steps were lost: {type(error).__name__}: {error}")
        if self._start_s:
            advice = "; persistent_workers=True would keep them between epochs" if self._restarts else ""
            self.notes.append(
                f"loader workers took {self._start_s:.2g} s in all to start and give their first batch, which no step "
                f"counts{advice}"
            )
        if self._thread.others_train:
            self.notes.append("optimizers were stepped in another thread too; the figures leave it out")
        if self._exposed_samples and self._exposed_samples < self.steps - STEPS_HELD_BACK:
            self.notes.append(
                f"exposed communication was measured by DDP in {self._exposed_samples} of {self.steps} steps "
                "and assumed alike in the others"
            )

    def _close_ranges(self) -> None:
        if self._ranges is not None:
            self._ranges.close()

    def _recognise(self, loops: Loops, optimizer: Any) -> None:
        """Find out whose loop this is; called after 1, 2, 4, 8, ... updates, so the one that trains most counts."""
        try:
            self.facts["framework"] = dataclasses.asdict(loops.framework(sys._getframe(), optimizer))
            trained = self._last_trained()
            strategy = None if trained is None else strategy_of(trained)
            if strategy is not None:
                self.facts["strategy"] = strategy
        except Exception as error:
            self.loops = None
            self.notes.append(f"the framework is not known: {type(error).__name__}: {error}")

    def _step_ended(self, step: Stretches) -> None:
        self.steps += 1
        self._waiting.append((self.steps, step))
        if self.steps >= CURIOUS_STEPS:
            self.curious = False
        end_s = step.marks[-1].host_s
        if end_s - self._passed_on_s >= PASS_ON_EVERY_S:
            self._passed_on_s = end_s
            self._pass_on(STEPS_HELD_BACK)
        self._finder.timeline.divides = not self._short or self.steps % DIVIDE_EVERY == 0
        if self._after_step is not None:
            self._after_step(self.steps)
        if self._most_steps is not None and self.steps >= self._most_steps:
            self.stop()
            self._close_ranges()
            self.notes.append(f"observed the first {self.steps} steps, as asked")

    def _pass_on(self, keep: int, *, wait: bool = False) -> None:
        while len(self._waiting) > keep and (wait or self._waiting[0][1].known()):
            number, step = self._waiting.popleft()
            if wait and step.marks[-1].event is not None:
                step.marks[-1].event.synchronize()
            record = self._record(number, step)
            if number not in self.left_out:
                self._write(record)
            if self.stack_samples is not None:
                other_s = record.phases.get(OTHER, 0.0) if record.phases else None
                counts = number > DEFAULT_WARMUP and number not in self.left_out
                self.stack_samples.credit(step, record.step_s, other_s, counts=counts)

    def _record(self, number: int, step: Stretches) -> StepRecord:
        tally, extra = step.payload
        step_s, phases = step.times()
        if START in phases:
            start_s = phases.pop(START)
            step_s = max(0.0, step_s - start_s)
            phases.setdefault(DATA_WAIT, 0.0)
            self._start_s += start_s
        on_device = step.marks[-1].event is not None
        self._short = on_device and step_s < SHORT_STEP_S
        if INFERENCE in phases:
            phases[FORWARD] = phases.get(FORWARD, 0.0) + phases.pop(INFERENCE)
        if on_device and "exposed_s" not in extra:
            extra = {**extra, **self._exposed}
        seen_s = phases.get(COMMUNICATION)
        exposed_s = extra.get("exposed_s")
        if exposed_s is not None and BACKWARD in phases:
            exposed_s = min(exposed_s, phases[BACKWARD])
            phases[BACKWARD] -= exposed_s
            phases[COMMUNICATION] = phases.get(COMMUNICATION, 0.0) + exposed_s
        total_s = extra.get("communication_s")
        known = (seen_s is not None or total_s is not None) and "overlapping" not in tally
        samples = int(tally.get("samples", 0))
        if "fetches" not in tally and tally.get("backwards", 0) > tally.get("optimizer_steps", 0) > 1:
            # Several losses of one batch, or several batches: unknown.
            samples, tally = 0, {**tally, "batches": 1}
        metrics = {name: tally[name] for name in METRICS if name in tally}
        for name in COUNTS:
            if name in tally:
                metrics[name] = tally[name]
        # Only for a step whose batches were all read.
        positions = tally.get("positions") if tally.get("read_batches") == tally.get("used_batches") else None
        return StepRecord(
            step=number,
            epoch=int(extra.get("epoch", 1)),
            time=self._wall_s + step.marks[-1].host_s,
            step_s=step_s,
            loss=None,
            lr=extra.get("lr"),
            samples=samples,
            count=float(samples),
            tokens=None if positions is None else int(positions - tally.get("padding_tokens", 0.0)),
            padded_tokens=None if positions is None else int(positions),
            phases=phases,
            communication_s=(seen_s or 0.0) + (total_s or 0.0) if known else None,
            metrics=metrics,
        )


def sizes_of(batch: Any) -> dict[str, float]:
    """Return samples and rows of a batch, as far as its shapes show them."""
    sizes = {"samples": leading_size(batch), "rows": rows_of(batch)}
    return {name: float(size) for name, size in sizes.items() if size is not None}


def leading_size(batch: Any, depth: int = 0) -> int | None:
    """Return the size of the first dimension of the first tensor in a batch."""
    if isinstance(batch, torch.Tensor):
        size = batch.shape[0] if batch.dim() else None
        return size if type(size) is int else None  # a symbolic size; reading it would specialise a trace or export
    if depth < _DEEPEST and isinstance(batch, (tuple, list, Mapping)):
        for item in batch.values() if isinstance(batch, Mapping) else batch[:8]:
            found = leading_size(item, depth + 1)
            if found is not None:
                return found
    return None
