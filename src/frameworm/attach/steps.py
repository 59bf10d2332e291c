"""Assign stretches of time to the steps of an observed training loop.

The hooks report what begins and ends: a batch is fetched, a model called, a backward pass run, an optimizer stepped. A
step ends where the next one fetches its first batch after an optimizer has stepped, so accumulation and several
optimizers count as one step. A loop without visible fetches is cut where an optimizer steps again. Both are known only
afterwards: the place is remembered, and the sequence of stretches is cut there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from frameworm.attach.timeline import Stretches, Timeline
from frameworm.observe.clocks.phases import (
    BACKWARD,
    CHECKPOINT,
    DATA_WAIT,
    FORWARD,
    OPTIMIZER,
    OTHER,
    TRANSFER,
    VALIDATION,
)

COMMUNICATION = "communication_exposed"
# A model that only infers: part of the step (a teacher, a frozen encoder) or of a validation; the next call decides.
INFERENCE = "inference"
# Replay of a CUDA graph that the script captured: one stretch, whatever it contains.
GRAPH = "graph_replay"

# Phases that may claim time inside a phase; everything else belongs to the outer phase.
INSIDE: dict[str | None, frozenset[str]] = {
    FORWARD: frozenset({BACKWARD, OPTIMIZER, CHECKPOINT, TRANSFER, COMMUNICATION}),
    OPTIMIZER: frozenset({FORWARD, BACKWARD, CHECKPOINT, TRANSFER, COMMUNICATION}),
    BACKWARD: frozenset({COMMUNICATION}),
    DATA_WAIT: frozenset(),
    TRANSFER: frozenset(),
    CHECKPOINT: frozenset(),
    VALIDATION: frozenset(),
    INFERENCE: frozenset(),
    COMMUNICATION: frozenset(),
    GRAPH: frozenset(),
}
# A loop that never steps an optimizer must not fill the memory.
MOST_MARKS = 20_000
MOST_FETCHES = 512


class Payload(NamedTuple):
    """What accompanies a finished step besides its times."""

    tally: dict[str, float]
    extra: dict[str, float]  # filled in later


class _Place(NamedTuple):
    """A place where the next step might begin."""

    position: int
    tally: dict[str, float]
    by_fetch: bool


class StepFinder:
    """Turns the hooks' reports into steps.

    Args:
        finished: Called with each step, whose events may still be pending on the device.

    Attributes:
        tally: Counts and seconds of the current step.
        extra: Facts about the current step that are filled in later.
        begun: Whether a step is in progress.
        phases: The active phases, innermost last.
        fetches_seen: Whether any loader has returned a batch.
        epoch: How often training has started to read a loader; at least 1.
    """

    def __init__(self, finished: Callable[[Stretches], None]) -> None:
        self.timeline = Timeline()
        self.tally: dict[str, float] = {}
        self.extra: dict[str, float] = {}
        self.begun = False
        self.steps = 0
        self.epoch = 1
        self._finished = finished
        self.phases: list[str] = []
        self._trained = False  # whether part of a training step has been seen in this step
        self._forwards = 0
        self._stepped: set[int] = set()
        self._place: _Place | None = None
        self._fetch: _Place | None = None
        self._batch: int | None = None  # position since which only fetching has happened
        self._fetches = 0
        self._unused: dict[str, float] = {}  # counts of batches fetched and not used yet
        self.fetches_seen = False
        self._source = self._trained_source = 0
        self._inferred = False  # whether a stretch is still labelled inference
        self._may_be_loss = False  # whether between forward and backward
        self._optimizer_at = _Place(0, {}, False)
        self._forwards_before = 0
        self._evaluations = 0  # of the closure that an optimizer was given
        self._before = {
            "samples": 0.0,
            "rows": 0.0,
            "batches": 0.0,
        }  # used by the optimizers so far in this step
        self._batch_counted = False  # since the last backward pass

    @property
    def phase(self) -> str | None:
        """The innermost active phase."""
        return self.phases[-1] if self.phases else None

    def add(self, name: str, amount: float) -> None:
        """Add to a count of the current step."""
        self.tally[name] = self.tally.get(name, 0.0) + amount

    def open(self, phase: str, counts: Mapping[str, float] | None = None, *, starts: bool = False) -> bool:
        """Begin a phase; return False if it is part of the current one and must not be closed.

        Args:
            phase: The phase.
            counts: Counts of the batch that a model is called with, for loops without visible fetches.
            starts: Whether the first step may begin with it; for a graph, whether it trains.
        """
        stack, timeline = self.phases, self.timeline
        parent = stack[-1] if stack else None
        if parent is not None and phase not in INSIDE[parent]:
            return False
        if not self.begun:
            if not starts and phase not in (DATA_WAIT, FORWARD, INFERENCE, VALIDATION, BACKWARD):
                return False
            self._start()
        elif len(timeline.marks) > MOST_MARKS:
            self._start()
        if parent is None and phase in (INFERENCE, COMMUNICATION) and timeline.last_label == VALIDATION:
            phase = VALIDATION  # its loss, or its metrics over all ranks
        border = parent is None and bool(self._stepped)
        if timeline.gap(border=border):
            timeline.mark(parent or self._gap_label(phase), border=border)
        if phase == OPTIMIZER:
            pass
        elif phase == DATA_WAIT:
            self._before_fetch()
        elif phase in (FORWARD, BACKWARD) or (phase == GRAPH and starts):
            self._before_training(phase, counts or {})
        elif phase in (INFERENCE, VALIDATION):
            if self._batch is None:
                self._batch = timeline.position
            self._inferred = self._inferred or phase == INFERENCE
        stack.append(phase)
        return True

    def close(self, label: str | None = None) -> str:
        """End the phase opened last and return it.

        Args:
            label: Label of its time, if different from the phase.
        """
        phase = self.phases.pop()
        self.timeline.mark(label or phase)
        if phase in (OPTIMIZER, FORWARD, BACKWARD):
            self._may_be_loss = phase == FORWARD
        elif phase == VALIDATION:
            self._was_validation()
        return phase

    def fetched(self, counts: Mapping[str, float], source: int) -> None:
        """Note that the fetch just closed has returned a batch.

        Args:
            counts: Counts of the batch, such as samples, for the step that trains on it.
            source: Number of the pass over a loader that it comes from.
        """
        self._source = source
        for name, amount in counts.items():
            self._unused[name] = self._unused.get(name, 0.0) + amount
        self.add("fetches", 1)
        self.fetches_seen = True
        if not self._stepped or self._fetch is None or (self._place is not None and self._place.by_fetch):
            return
        # A loop may fetch ahead during a step: that step began where the model was called.
        backwards = self.tally.get("backwards", 0.0)
        ahead = self._place is not None and backwards > self._place.tally.get("backwards", 0.0)
        place = self._place if ahead and self._place is not None else self._fetch
        self._place = place._replace(by_fetch=True)

    def optimizer_begins(self) -> None:
        """Note that an optimizer is about to step; call within its phase."""
        self._optimizer_at = _Place(self.timeline.position, dict(self.tally), False)
        self._forwards_before = self._forwards
        self._evaluations = 0

    def closure_begins(self) -> None:
        """Note that the stepping optimizer evaluates its closure, perhaps repeatedly on the same batch."""
        self._evaluations += 1

    def optimizer_stepped(self, identity: int) -> None:
        """Note that an optimizer has stepped; call after closing its phase."""
        self._evaluations = 0
        if self._place is not None and self._place.by_fetch:
            self._commit()
        elif identity in self._stepped:
            if self._place is not None:
                self._commit()
            elif self._forwards > self._forwards_before:  # its closure has run the model
                self._place = self._optimizer_at
                self._commit()
        if not self.fetches_seen:
            for name, before in self._before.items():
                if self._stepped and name in self.tally:  # another optimizer of this step reuses the batch
                    self.tally[name] = max(before, self.tally[name] - before)
                self._before[name] = self.tally.get(name, 0.0)
        self._stepped.add(identity)
        self._trained = True
        self._place = None
        self._batch = None
        self.timeline.near_end = True
        self.add("optimizer_steps", 1)

    def finish(self) -> None:
        """Finish at the end of the script: the current step ends with the last thing seen in it."""
        if self.begun and self._inferred:
            self._was_validation()
        if self.begun and self._stepped:
            if self._place is not None:  # another step had begun but never stepped an optimizer
                self._commit()
            else:
                self._cut(self.timeline.position, dict(self.tally))
        self.begun = False

    def _start(self) -> None:
        self.timeline.start()
        self.begun = True
        self.tally = {}
        self.extra = {}
        self._trained = self._may_be_loss = self._inferred = False
        self._stepped = set()
        self._place = self._fetch = self._batch = None
        self._fetches = 0

    def _gap_label(self, phase: str) -> str:
        """Label the time that the script spent on its own before a known phase begins."""
        if self.timeline.last_label == VALIDATION:
            return VALIDATION
        # The loss is computed between the model's call and the backward pass or another model's call.
        return FORWARD if self._may_be_loss and phase in (FORWARD, BACKWARD) else OTHER

    def _before_fetch(self) -> None:
        self._may_be_loss = False
        if self._inferred:
            self._was_validation()
        if self._batch is None:
            self._batch, self._fetches = self.timeline.position, 0
        self._fetches += 1
        if self._fetches > MOST_FETCHES:  # a loop that only reads
            if self._trained or self._stepped:
                self.timeline.relabel(self._batch, DATA_WAIT)
            else:
                self._start()
            self._batch, self._fetches = self.timeline.position, 0
        if self._place is None or not self._place.by_fetch:
            self._fetch = _Place(self.timeline.position, dict(self.tally), True)

    def _before_training(self, phase: str, counts: Mapping[str, float]) -> None:
        if self._inferred:
            self.timeline.rename(INFERENCE, FORWARD)
            self._inferred = False
        if self._place is not None and self._place.by_fetch:
            self._commit()
        elif self._stepped and self._place is None and not self.phases:
            self._place = _Place(self.timeline.position, dict(self.tally), False)
        self._trained = True
        self._batch = None
        if self._source != self._trained_source:
            self.epoch += self._trained_source > 0
            self._trained_source = self._source
        self.extra["epoch"] = self.epoch
        if self._unused:
            for name, amount in self._unused.items():
                self.add(name, amount)
            self._unused = {}
        elif not self.fetches_seen and phase == FORWARD and not self._batch_counted and self._evaluations <= 1:
            # Models called in succession before a backward pass share a batch.
            self._batch_counted = True
            self.add("batches", 1)
            for name, amount in counts.items():
                self.add(name, amount)
        if phase == FORWARD:
            self._forwards += 1
        else:
            self._batch_counted = False
        if self._evaluations <= 1:
            self.add("forwards" if phase == FORWARD else "backwards", 1)

    def _was_validation(self) -> None:
        """Relabel everything since the fetch as validation, which is part of the preceding step."""
        self._unused = {}
        self._place = None
        self._inferred = False
        if not self._trained and not self._stepped:
            self._start()  # a check of data or model before training begins
            return
        self.timeline.relabel(self.timeline.position if self._batch is None else self._batch, VALIDATION)
        self._batch = None

    def _commit(self) -> None:
        """End the step at the remembered place."""
        place, self._place = self._place, None
        assert place is not None
        self._cut(place.position, place.tally)

    def _cut(self, position: int, tally: dict[str, float]) -> None:
        extra = self.extra
        finished = self.timeline.split(position, Payload(tally, extra))
        if finished is None:
            return
        self.tally = {
            name: amount - tally.get(name, 0.0) for name, amount in self.tally.items() if amount != tally.get(name, 0.0)
        }
        self.extra = {}
        self._stepped = set()
        self._trained = False
        self.timeline.near_end = False
        self.steps += 1
        self._finished(finished)
