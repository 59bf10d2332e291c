"""Where the time of a step goes: the names of the phases, and the clock for training on CPU.

A clock is read at each border between two phases. What a step spent on communication that backward did not hide is cut
out of backward. `device_clock` does the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any, Protocol

import torch

from frameworm.observe.communication import BucketRecorder, StepCommunication

DATA_WAIT = "data_wait"
TRANSFER = "transfer"
FORWARD = "forward"
BACKWARD = "backward"
COMMUNICATION_EXPOSED = "communication_exposed"
OPTIMIZER = "optimizer"
CHECKPOINT = "checkpoint"
VALIDATION = "validation"
OTHER = "other"


class Timed:
    """What one step measured: `payload` as given, the scalars as floats, and the times."""

    __slots__ = ("communication", "payload", "phases", "step_s", "values")

    def __init__(
        self,
        payload: Any,
        values: list[float | None],
        step_s: float,
        phases: dict[str, float],
        communication: StepCommunication | None = None,
    ) -> None:
        self.payload = payload
        self.values = values
        self.step_s = step_s
        self.phases = phases
        self.communication = communication  # None where nothing was sent, or nobody looked


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

    def split(self, shares: Mapping[str, float]) -> None:
        """Attribute the time since the last mark to several phases, by their shares (they add up to 1)."""

    def end_step(self, payload: Any, scalars: tuple[torch.Tensor | None, ...]) -> list[Timed]:
        """Close the step; returns the steps whose times and scalars (detached) are known by now, in order."""

    def drain(self) -> list[Timed]:
        """Wait for everything outstanding and return it."""


class HostClock:
    """Phases by the host's clock, for training on CPU."""

    max_steps_ahead = 1
    note = None

    def __init__(self) -> None:
        self._phases: dict[str, float] = {}
        self._recorder: BucketRecorder | None = None
        self._communication: StepCommunication | None = None
        self._last = self._begin = perf_counter()

    def divide(self) -> None:
        """Nothing: every step is divided."""

    def record_buckets(self) -> BucketRecorder:
        self._recorder = BucketRecorder(perf_counter)
        return self._recorder

    def start(self) -> None:
        self._phases = {}
        self._communication = None
        self._last = self._begin = perf_counter()

    def mark(self, name: str) -> None:
        now = perf_counter()
        phases = self._phases
        elapsed_s = now - self._last
        if self._recorder is None:
            pass
        elif name == COMMUNICATION_EXPOSED:
            self._seen().met(self._last, now)
        elif name == BACKWARD:
            backward = self._recorder.take()
            if backward is not None:
                begin = self._last
                exposed_s = backward.add_to(self._seen(), lambda moment: moment - begin, begin, elapsed_s)
                phases[COMMUNICATION_EXPOSED] = phases.get(COMMUNICATION_EXPOSED, 0.0) + exposed_s
                elapsed_s -= exposed_s
        phases[name] = phases.get(name, 0.0) + elapsed_s
        self._last = now

    def _seen(self) -> StepCommunication:
        if self._communication is None:
            self._communication = StepCommunication()
        return self._communication

    def split(self, shares: Mapping[str, float]) -> None:
        now = perf_counter()
        for name, share in shares.items():
            self._phases[name] = self._phases.get(name, 0.0) + (now - self._last) * share
        self._last = now

    def end_step(self, payload: Any, scalars: tuple[torch.Tensor | None, ...]) -> list[Timed]:
        values = [None if scalar is None else float(scalar) for scalar in scalars]
        now = perf_counter()
        phases = self._phases
        phases[OTHER] = phases.get(OTHER, 0.0) + now - self._last
        timed = Timed(payload, values, now - self._begin, phases, self._communication)
        self._phases = {}
        self._communication = None
        self._last = self._begin = now
        return [timed]

    def drain(self) -> list[Timed]:
        return []
