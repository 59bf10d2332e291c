"""What the hooks report to, and what becomes of it: step records on their way to a file.

Nothing in here may reach the script: an error ends the observation with a note, and the script goes on.
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
from frameworm.attach.samples import Looks
from frameworm.attach.steps import COMMUNICATION, INFERENCE, INSIDE, StepFinder
from frameworm.attach.timeline import OWN, START, Stretches
from frameworm.attach.training_thread import TrainingThread
from frameworm.observe.clocks.nvtx import LiveRanges
from frameworm.observe.clocks.phases import BACKWARD, CHECKPOINT, DATA_WAIT, FORWARD, OTHER, VALIDATION
from frameworm.records.schema import StepRecord
from frameworm.records.statistics import DEFAULT_WARMUP

# Below this a GPU step feels the events at every border: only one step in a few is divided.
SHORT_STEP_S = 0.01
DIVIDE_EVERY = 7  # what recurs every 8, 10 or 32 steps then shows by its true share
# What is known about a step only when the next one runs the model.
STEPS_HELD_BACK = 1
# Short steps are made into records several at a time, while the code for that is in the processor's caches.
PASS_ON_EVERY_S = 0.02
CURIOUS_STEPS = 3
METRICS = ("sync_s", "syncs", "logging_s", "pageable_s")
COUNTS = (
    *("fetches", "batches", "backwards", "optimizer_steps", "checkpoints"),
    *("rows", "padding_tokens", "padding_beyond_longest"),
)
# Batches are read for padding in the first steps, and then in one of so many: two of them by number, since the first
# batch of a step is fetched before the step before it is over.
READ_FIRST, READ_EVERY = 32, 64
_DEEPEST = 4
# Whether a model called in a phase is one of its own there.
_RUNS_MODELS: dict[str | None, bool] = {None: True, **{phase: FORWARD in inside for phase, inside in INSIDE.items()}}


class Watch:
    """Observes the thread of a process that trains, whichever it is.

    Args:
        write: Takes each step record.
        most_steps: Stop observing after so many steps.
        nvtx: Name the phases for Nsight.
        after_step: Called with the number of steps so far.

    Attributes:
        busy: A model called now is part of what goes on already; also when nobody watches any more.
        curious: Precision is not known yet.
        facts: What was learned beside the steps.
        notes: What went wrong, or was limited.
        looks: Who looks at what the script does in no phase.
        loops: Who knows the loops of libraries.
        graphs: The CUDA graphs of the script.
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
        self.looks: Looks | None = None
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
        self._starting: weakref.WeakSet[Any] = weakref.WeakSet()  # passes whose workers have given nothing yet
        self._parameters = Parameters()
        self._backward_of: dict[str, float] = {}
        self._exposed: dict[str, float] = {}
        self._exposed_samples = 0
        # A child that a loader or the script forks has the hooks but nobody to report to.
        os.register_at_fork(after_in_child=self.stop)

    def is_between(self) -> bool:
        """Whether a step is going on, in no phase; may be asked by any thread."""
        return self._finder.begun and not self._finder.phases

    @property
    def is_loading(self) -> bool:
        """Whether a loader is at work, such as one that starts its workers."""
        return self._finder.phase == DATA_WAIT

    def stop(self) -> None:
        """See nothing from now on."""
        self.active = False
        self.busy = True
        self.curious = False

    def fail(self, error: Exception) -> None:
        """An error of ours ends the observation."""
        self.stop()
        self.notes.append(f"observation ended after {self.steps} steps: {type(error).__name__}: {error}")

    def enter(self, phase: str, counts: Mapping[str, float] | None = None, *, starts: bool = False) -> bool:
        """A phase begins; False when it is not one of its own, and `leave` must not be called."""
        if not self.active:
            return False
        try:
            if self.graphs.capturing is not None:  # nothing runs now
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
        """The phase that was entered last is over; its time may have a label of its own."""
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
        """Whether this is the watched thread, or one in which autograd runs a backward pass for it."""
        if threading.get_ident() == self._thread.ident:
            return True
        return BACKWARD in self._finder.phases and torch._C._current_graph_task_id() != -1

    def _takes_over(self, phase: str, starts: bool) -> bool:
        """Whether this thread, which was not watched, is watched from now on."""
        finder, moves = self._finder, self._thread.moves
        if not self._thread.gives_way(phase, starts, None if finder.phases else finder.timeline.position):
            return False
        if self._thread.moves > moves:
            finder.finish()
            self.notes.append(f"after {self.steps} steps training moved to another thread, which was then observed")
        self._finder = StepFinder(self._step_ended)
        self.busy = False
        if self.looks is not None:
            self.looks.watched = self._thread.ident
        return self.active

    def enter_module(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """A module is called that no other module called."""
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
        """Note that a pass over a loader begins, which ends the phase; persistent workers are not started again."""
        if not self.active:
            return
        try:
            workers = int(loader.num_workers)
            starts = workers > 0 and iterator is not None and iterator not in self._passes
            self.leave(START if starts else None)
            if iterator is None:  # it has failed
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
        """The fetch that was entered is over; the first one from new workers belongs to their start."""
        if iterator in self._starting:
            self._starting.discard(iterator)
            self.leave(START)
        else:
            self.leave()

    def fetched(self, iterator: Any, batch: Any) -> None:
        """A loader has given a batch."""
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
        """What is padding in a batch, if that can be told; the time it takes belongs to no step."""
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
        """An optimizer begins its step; called within the phase."""
        if not self.active:
            return
        try:
            self._finder.optimizer_begins()
        except Exception as error:
            self.fail(error)

    def closure_begins(self) -> None:
        """An optimizer evaluates the closure that it was given; called within its phase."""
        if self.active and threading.get_ident() == self._thread.ident:
            self._finder.closure_begins()

    def optimizer_stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped; called after the phase."""
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
        """An optimizer has stepped whose phase was not entered: a graph that is being captured will step it."""
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
        """A graph was replayed, and its phase is over; that is a step if the graph steps an optimizer."""
        captured = self.graphs.find(graph)
        if not self.active or not captured.updates:
            return
        self.facts["captured_steps"] = self.facts.get("captured_steps", 0) + 1
        if (optimizer := captured.optimizer()) is not None:
            self.optimizer_stepped(optimizer)
        else:
            self._finder.optimizer_stepped(id(captured))

    def waited(self) -> None:
        """The step has waited for communication that began earlier, of which nobody knows how long it took."""
        if self.active and self._finder.begun:
            self._finder.add("overlapping", 1)

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream in which the step is timed; None where there is no GPU in use."""
        return self._finder.timeline.stream

    def spent(self, metric: str, seconds: float, count: str | None = None) -> None:
        """Time of the host within the phases."""
        if self.active and self._finder.begun and threading.get_ident() == self._thread.ident:
            self._finder.add(metric, seconds)
            if count is not None:
                self._finder.add(count, 1)

    def communicated(self, total_s: float, exposed_s: float) -> None:
        """What DDP measured in the last backward pass that reduced gradients."""
        if self.active:
            self._exposed = {"communication_s": total_s, "exposed_s": exposed_s}
            self._exposed_samples += 1
            self._backward_of.update(self._exposed)

    def look(self) -> None:
        """Find out in which precision the model computes."""
        try:
            if self._finder.phase == FORWARD:
                for kind in ("cuda", "cpu"):
                    if torch.is_autocast_enabled(kind):
                        self.facts["precision"] = short_name(torch.get_autocast_dtype(kind))
                        self.curious = False
        except Exception as error:
            self.fail(error)

    def skip_time(self) -> None:
        """What has happened since the last mark was ours, not the script's."""
        self._finder.timeline.mark(OWN)

    def finish(self) -> None:
        """Write what is still waiting; events of the last steps are waited for."""
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
                "and taken to be alike in the others"
            )

    def _close_ranges(self) -> None:
        if self._ranges is not None:
            self._ranges.close()

    def _recognise(self, loops: Loops, optimizer: Any) -> None:
        """Find out whose loop this is; asked after 1, 2, 4, 8 ... updates, so that the one that trains most counts."""
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
            if self.looks is not None:
                other_s = record.phases.get(OTHER, 0.0) if record.phases else None
                counts = number > DEFAULT_WARMUP and number not in self.left_out
                self.looks.credit(step, record.step_s, other_s, counts=counts)

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
            # Several losses of one batch, or several batches: nobody can tell.
            samples, tally = 0, {**tally, "batches": 1}
        metrics = {name: tally[name] for name in METRICS if name in tally}
        for name in COUNTS:
            if name in tally:
                metrics[name] = tally[name]
        # Of a step all of whose batches were read.
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
    """Samples and rows of a batch, as far as its shapes tell."""
    sizes = {"samples": leading_size(batch), "rows": rows_of(batch)}
    return {name: float(size) for name, size in sizes.items() if size is not None}


def leading_size(batch: Any, depth: int = 0) -> int | None:
    """Size of the first dimension of the first tensor in a batch."""
    if isinstance(batch, torch.Tensor):
        size = batch.shape[0] if batch.dim() else None
        return size if type(size) is int else None  # what traces or exports a model must not learn a size from us
    if depth < _DEEPEST and isinstance(batch, (tuple, list, Mapping)):
        for item in batch.values() if isinstance(batch, Mapping) else batch[:8]:
            found = leading_size(item, depth + 1)
            if found is not None:
                return found
    return None
