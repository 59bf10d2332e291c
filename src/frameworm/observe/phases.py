"""Where the time of a step goes, measured without making anybody wait.

On CPU a clock is read at each border between two phases. On a GPU an event is put into the stream there and read some
steps later, when it is long done; the gap before the first event of a step is the wait for data that the device really
felt, however far ahead the host is. Putting an event there is not free: where steps are short, every step's time is
measured, but only one step in a few is divided into phases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from time import perf_counter
from typing import Any, Protocol

import torch

DATA_WAIT = "data_wait"
TRANSFER = "transfer"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
CHECKPOINT = "checkpoint"
VALIDATION = "validation"
OTHER = "other"

GROUP_STEPS = 8
GROUPS_IN_FLIGHT = 2
# How many steps the host can be ahead of the device: groups in flight, one group being filled, the current step.
MAX_STEPS_AHEAD = GROUP_STEPS * (GROUPS_IN_FLIGHT + 1) + 1
# Longer steps do not feel four events; shorter ones did in the overhead benchmark. A choice, not a measurement.
SHORT_STEP_S = 0.02
DIVIDE_EVERY = 8


class Timed:
    """What one step measured: `payload` as given, the scalars as floats, and the times."""

    __slots__ = ("payload", "phases", "step_s", "values")

    def __init__(self, payload: Any, values: list[float | None], step_s: float, phases: dict[str, float]) -> None:
        self.payload = payload
        self.values = values
        self.step_s = step_s
        self.phases = phases


class StepClock(Protocol):
    """Measures steps; `mark(name)` says that the time since the last mark belonged to that phase."""

    max_steps_ahead: int

    @property
    def note(self) -> str | None:
        """What the summary has to say about how phases were measured, if anything."""

    def divide(self) -> None:
        """Divide the coming step into phases for certain."""

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
        self._last = self._begin = perf_counter()

    def divide(self) -> None:
        """Nothing: every step is divided."""

    def start(self) -> None:
        self._phases = {}
        self._last = self._begin = perf_counter()

    def mark(self, name: str) -> None:
        now = perf_counter()
        phases = self._phases
        phases[name] = phases.get(name, 0.0) + now - self._last
        self._last = now

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
        timed = Timed(payload, values, now - self._begin, phases)
        self._phases = {}
        self._last = self._begin = now
        return [timed]

    def drain(self) -> list[Timed]:
        return []


class _Pending:
    """A step whose events are still on the device; the last mark is its end and the next step's beginning."""

    __slots__ = ("begin", "divided", "host_other_s", "host_wait_s", "marks", "payload", "scalars")

    def __init__(self, begin: torch.cuda.Event) -> None:
        self.begin = begin
        self.divided = True
        self.marks: list[tuple[str | Mapping[str, float], torch.cuda.Event]] = []
        self.host_other_s = 0.0
        self.host_wait_s = 0.0
        self.payload: Any = None
        self.scalars: tuple[torch.Tensor | None, ...] = ()


class _Group:
    """Several finished steps whose scalars travel to the host in one copy."""

    __slots__ = ("host", "ready", "steps")

    def __init__(self, steps: list[_Pending]) -> None:
        self.steps = steps
        present = [scalar for step in steps for scalar in step.scalars if scalar is not None]
        self.host: torch.Tensor | None = None
        if present:
            stacked = torch.stack([_plain(scalar) for scalar in present])
            self.host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            self.host.copy_(stacked, non_blocking=True)
        self.ready = torch.cuda.Event()
        self.ready.record()


def _plain(scalar: torch.Tensor) -> torch.Tensor:
    """The scalar as stacking wants it; a loss already is."""
    return scalar if scalar.dtype == torch.float32 and scalar.dim() == 0 else scalar.reshape(()).float()


class CudaClock:
    """Phases by CUDA events, read late."""

    max_steps_ahead = MAX_STEPS_AHEAD

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []
        self._filling: list[_Pending] = []
        self._groups: deque[_Group] = deque()
        self._divides = True
        self._short = False
        self._undivided = 0
        self._steps = 0
        self.start()

    @property
    def note(self) -> str | None:
        """Said when some steps were measured as a whole only."""
        if not self._undivided:
            return None
        return f"steps are short: phases were measured in one of {DIVIDE_EVERY} steps, the time of a step in all"

    def divide(self) -> None:
        if not self._divides:
            self._divides = True
            self._last_host = perf_counter()

    def _event(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def start(self) -> None:
        # Asking for the stream at every mark would cost as much as the mark.
        self._stream = torch.cuda.current_stream(self._device)
        self._current = _Pending(self._event())
        self._last_host = perf_counter()

    def mark(self, name: str) -> None:
        if not self._divides:
            if name != CHECKPOINT:
                return
            self._divides = True  # rare and long, and the first thing in its step
        current = self._current
        now = perf_counter()
        if name == OTHER and not current.marks:
            # What the host does between two steps; the device has nothing to say about it.
            current.host_other_s = now - self._last_host
            self._last_host = now
            return
        if name == DATA_WAIT:
            current.host_wait_s = now - self._last_host
        current.marks.append((name, self._event()))
        self._last_host = now

    def split(self, shares: Mapping[str, float]) -> None:
        if self._divides:
            self._current.marks.append((shares, self._event()))
            self._last_host = perf_counter()

    def end_step(self, payload: Any, scalars: tuple[torch.Tensor | None, ...]) -> list[Timed]:
        current = self._current
        if not current.marks:
            current.marks.append((OTHER, self._event()))
        current.divided = self._divides
        self._undivided += not self._divides
        self._steps += 1
        self._divides = not self._short or self._steps % DIVIDE_EVERY == 0
        if self._divides and not current.divided:
            self._last_host = perf_counter()  # no mark has read the clock since the step before
        current.payload = payload
        current.scalars = scalars
        self._filling.append(current)
        self._current = _Pending(current.marks[-1][1])
        if len(self._filling) >= GROUP_STEPS:
            self._groups.append(_Group(self._filling))
            self._filling = []
        done: list[Timed] = []
        while self._groups and (len(self._groups) > GROUPS_IN_FLIGHT or self._groups[0].ready.query()):
            done += self._read(self._groups.popleft())
        return done

    def drain(self) -> list[Timed]:
        if self._filling:
            self._groups.append(_Group(self._filling))
            self._filling = []
        done: list[Timed] = []
        while self._groups:
            done += self._read(self._groups.popleft())
        return done

    def _read(self, group: _Group) -> list[Timed]:
        group.ready.synchronize()
        values = iter(group.host.tolist() if group.host is not None else [])
        timed = []
        for step in group.steps:
            scalars = [None if scalar is None else next(values) for scalar in step.scalars]
            step_s, phases = _device_phases(step)
            timed.append(Timed(step.payload, scalars, step_s, phases))
            # The last event is the next step's beginning, which that step gives back.
            self._free.append(step.begin)
            self._free.extend(event for _, event in step.marks[:-1])
        self._short = min(item.step_s for item in timed) < SHORT_STEP_S
        return timed


def _device_phases(step: _Pending) -> tuple[float, dict[str, float]]:
    """Times between the events of one step.

    The gap before the data mark is a gap on the device: it is told apart by what the host did meanwhile, and what the
    host does not explain is the transfer.
    """
    phases: dict[str, float] = {}
    step_s = 0.0
    last = step.begin
    for name, event in step.marks:
        elapsed_s = last.elapsed_time(event) * 1e-3
        step_s += elapsed_s
        last = event
        if not isinstance(name, str):
            for part, share in name.items():
                phases[part] = phases.get(part, 0.0) + elapsed_s * share
            continue
        if name == DATA_WAIT:
            wait_s = min(elapsed_s, step.host_wait_s)
            other_s = min(elapsed_s - wait_s, step.host_other_s)
            phases[OTHER] = phases.get(OTHER, 0.0) + other_s
            phases[TRANSFER] = phases.get(TRANSFER, 0.0) + elapsed_s - wait_s - other_s
            elapsed_s = wait_s
        phases[name] = phases.get(name, 0.0) + elapsed_s
    return step_s, phases if step.divided else {}


def make_clock(device: torch.device) -> StepClock:
    """The clock that suits the device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
