"""Where the time of a step goes: the names of the phases, and the clock for training on a CPU.

A clock is read at each border between two phases. The exposed communication of a step is cut out of backward.
`device_clock` does the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any, Protocol

import torch

from frameworm.observe.clocks.communication import BucketRecorder, StepCommunication

DATA_WAIT = "data_wait"
TRANSFER = "transfer"
FORWARD = "forward"
BACKWARD = "backward"
COMMUNICATION_EXPOSED = "communication_exposed"
OPTIMIZER = "optimizer"
CHECKPOINT = "checkpoint"
VALIDATION = "validation"
OTHER = "other"

HAND_OUT_EVERY_S = 0.02


class Timed:
    """Measurements of one step: `payload` as given, the scalars as floats, and the times."""

    __slots__ = ("communication", "ended_at", "payload", "phases", "step_s", "values")

    def __init__(
        self,
        payload: Any,
        values: list[float | None],
        step_s: float,
        phases: dict[str, float],
        communication: StepCommunication | None = None,
        ended_at: float | None = None,
    ) -> None:
        self.payload = payload
        self.values = values
        self.step_s = step_s
        self.phases = phases
        self.communication = communication  # None if nothing was sent or recorded
        self.ended_at = ended_at  # on the host's clock; None: just now

    @property
    def training_s(self) -> float:
        """The step's time without validation and checkpoints."""
        return self.step_s - self.phases.get(VALIDATION, 0.0) - self.phases.get(CHECKPOINT, 0.0)


class StepClock(Protocol):
    """Measures steps; `mark(name)` attributes the time since the last mark to that phase."""

    max_steps_ahead: int

    @property
    def note(self) -> str | None:
        """A remark for the summary on how phases were measured, if any."""

    @property
    def divides(self) -> bool:
        """Whether the current step is divided into phases."""

    def divide(self) -> None:
        """Make sure that the coming step is divided into phases."""

    def record_buckets(self) -> BucketRecorder:
        """From now on cut exposed communication out of backward; the buckets must be reported to the recorder."""

    def start(self) -> None:
        """Start measuring now; the time before belongs to no step."""

    def mark(self, name: str) -> None:
        """Attribute the time since the last mark to a phase."""

    def copied(self, seconds: float) -> None:
        """Say how much of the time since the last mark was spent on copying the batch; a mark follows."""

    def split(self, shares: Mapping[str, float], communication: StepCommunication | None = None) -> None:
        """Attribute the time since the last mark to several phases, by their fractions, which add up to 1.

        Args:
            shares: The fraction of each phase.
            communication: What was sent meanwhile, with times since that mark; None if not recorded.
        """

    def end_step(self, payload: Any, scalars: tuple[torch.Tensor | None, ...]) -> list[Timed]:
        """Close the step; returns the steps whose times and (detached) scalars are known by now, in order."""

    def drain(self) -> list[Timed]:
        """Wait for all outstanding steps and return them."""

    def abandon(self) -> list[Timed]:
        """The steps that are known without waiting, when the run has failed."""


class HostClock:
    """Phases measured with the host's clock, for training on a CPU.

    Args:
        at_once: Return each step when it ends. Otherwise short steps are returned several at a time, so that the code
            that processes them stays in the processor's caches; after every step it would cost several times as much.
    """

    max_steps_ahead = 1
    note = None
    divides = True

    def __init__(self, at_once: bool = True) -> None:
        self._at_once = at_once
        self._marks: list[_Mark] = []
        self._waiting: list[_Ended] = []
        self._recorder: BucketRecorder | None = None
        self._communication: StepCommunication | None = None
        self._begin = self._handed_out = perf_counter()

    def divide(self) -> None:
        """Do nothing: every step is divided."""

    def record_buckets(self) -> BucketRecorder:
        self._recorder = BucketRecorder(perf_counter)
        self._at_once = True  # ranks exchange steps by number, so all must know a step at the same time
        return self._recorder

    def start(self) -> None:
        self._marks = []
        self._communication = None
        self._begin = perf_counter()

    def mark(self, name: str) -> None:
        now = perf_counter()
        if self._recorder is not None:
            self._mark_communication(self._recorder, name, now)
        self._marks.append((name, now))

    def _mark_communication(self, recorder: BucketRecorder, name: str, now: float) -> None:
        """Record the ranks' collectives; the exposed part of backward is split off as a phase before it."""
        if name not in (COMMUNICATION_EXPOSED, BACKWARD):
            return
        backward = recorder.take() if name == BACKWARD else None
        if name == BACKWARD and backward is None:
            return
        if self._communication is None:
            self._communication = StepCommunication()
        begin = self._marks[-1][1] if self._marks else self._begin
        if backward is None:
            self._communication.met(begin, now)
            return
        exposed_s = backward.add_to(self._communication, lambda moment: moment - begin, begin, now - begin)
        self._marks.append((COMMUNICATION_EXPOSED, begin + exposed_s))

    def copied(self, seconds: float) -> None:
        begin = self._marks[-1][1] if self._marks else self._begin
        self._marks.append((TRANSFER, min(begin + seconds, perf_counter())))

    def split(self, shares: Mapping[str, float], communication: StepCommunication | None = None) -> None:
        if communication is not None:
            self._communication = communication.begun_at(self._marks[-1][1] if self._marks else self._begin)
        self._marks.append((shares, perf_counter()))

    def end_step(self, payload: Any, scalars: tuple[torch.Tensor | None, ...]) -> list[Timed]:
        values = [None if scalar is None else float(scalar) for scalar in scalars]
        now = perf_counter()
        self._waiting.append((payload, values, self._begin, self._marks, now, self._communication))
        self._marks = []
        self._communication = None
        self._begin = now
        if self._at_once or now - self._handed_out >= HAND_OUT_EVERY_S:
            return self.drain()
        return _NOTHING

    def drain(self) -> list[Timed]:
        self._handed_out = self._begin
        waiting, self._waiting = self._waiting, []
        return [_timed(*ended) for ended in waiting]

    def abandon(self) -> list[Timed]:
        return self.drain()


_Mark = tuple[str | Mapping[str, float], float]  # a phase, or fractions of several, and when it ended
# Payload, scalars, begin, marks, end and communication of a step.
_Ended = tuple[Any, list[float | None], float, list[_Mark], float, StepCommunication | None]
_NOTHING: list[Timed] = []  # shared, because nobody changes it


def _timed(
    payload: Any,
    values: list[float | None],
    begin: float,
    marks: list[_Mark],
    end: float,
    communication: StepCommunication | None,
) -> Timed:
    """Add up the times between the marks of a step."""
    phases: dict[str, float] = {}
    last = begin
    for name, moment in marks:
        elapsed_s = moment - last
        last = moment
        if type(name) is str:
            phases[name] = phases[name] + elapsed_s if name in phases else elapsed_s
        else:
            assert not isinstance(name, str)
            for part, share in name.items():
                phases[part] = phases.get(part, 0.0) + elapsed_s * share
    phases[OTHER] = phases.get(OTHER, 0.0) + end - last
    return Timed(payload, values, end - begin, phases, communication, end)
