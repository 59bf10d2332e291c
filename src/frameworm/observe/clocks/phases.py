"""Where the time of a step goes: the names of the phases, and the clock for training on CPU.

A clock is read at each border between two phases. What a step spent on communication that backward did not hide is cut
out of backward. `device_clock` does the same on a GPU.
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
    """What one step measured: `payload` as given, the scalars as floats, and the times."""

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
        self.communication = communication  # None where nothing was sent, or nobody looked
        self.ended_at = ended_at  # by the host's clock; None: not long ago

    @property
    def training_s(self) -> float:
        """What the step took beside validation and checkpoints."""
        return self.step_s - self.phases.get(VALIDATION, 0.0) - self.phases.get(CHECKPOINT, 0.0)


class StepClock(Protocol):
    """Measures steps; `mark(name)` says that the time since the last mark belonged to that phase."""

    max_steps_ahead: int

    @property
    def note(self) -> str | None:
        """What the summary has to say about how phases were measured, if anything."""

    def divide(self) -> None:
        """Divide the coming step into phases for certain."""

    def record_buckets(self) -> BucketRecorder:
        """From now on cut exposed communication out of backward; the recorder must be told of the buckets."""

    def start(self) -> None:
        """Begin measuring now: what came before belongs to no step."""

    def mark(self, name: str) -> None:
        """Attribute the time since the last mark to a phase."""

    def copied(self, seconds: float) -> None:
        """Say that so much of the time since the last mark went into copying the batch; a mark follows."""

    def split(self, shares: Mapping[str, float]) -> None:
        """Attribute the time since the last mark to several phases, by their shares (they add up to 1)."""

    def end_step(self, payload: Any, scalars: tuple[torch.Tensor | None, ...]) -> list[Timed]:
        """Close the step; returns the steps whose times and scalars (detached) are known by now, in order."""

    def drain(self) -> list[Timed]:
        """Wait for everything outstanding and return it."""

    def abandon(self) -> list[Timed]:
        """What is known without waiting, when the run has failed."""


class HostClock:
    """Phases by the host's clock, for training on CPU.

    Args:
        at_once: Hand each step out when it ends. Otherwise short steps are handed out several at a time, while the code
            that takes them in is in the processor's caches; after every step it would cost a multiple.
    """

    max_steps_ahead = 1
    note = None

    def __init__(self, at_once: bool = True) -> None:
        self._at_once = at_once
        self._marks: list[_Mark] = []
        self._waiting: list[_Ended] = []
        self._recorder: BucketRecorder | None = None
        self._communication: StepCommunication | None = None
        self._begin = self._handed_out = perf_counter()

    def divide(self) -> None:
        """Nothing: every step is divided."""

    def record_buckets(self) -> BucketRecorder:
        self._recorder = BucketRecorder(perf_counter)
        self._at_once = True  # the ranks tell each other of a step by its number, and so must know it at the same one
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
        """Notice the ranks' meetings; what backward did not hide of its own becomes a stretch before it."""
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

    def split(self, shares: Mapping[str, float]) -> None:
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


_Mark = tuple[str | Mapping[str, float], float]  # a phase, or several by their shares, and when it ended
# Payload, scalars, begin, marks, end and communication of a step.
_Ended = tuple[Any, list[float | None], float, list[_Mark], float, StepCommunication | None]
_NOTHING: list[Timed] = []  # made once; nobody changes it


def _timed(
    payload: Any,
    values: list[float | None],
    begin: float,
    marks: list[_Mark],
    end: float,
    communication: StepCommunication | None,
) -> Timed:
    """Add up the stretches of time between the marks of a step."""
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
