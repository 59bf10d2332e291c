"""Where the time of a step goes on a GPU, measured without making the host wait.

At each border between two phases an event is recorded in the stream and read some steps later, when the device has
passed it; the gap before the first event of a step is the data wait as the device saw it, however far ahead the host
is. Recording events is not free: if steps are short, the time of every step is measured, but only one step in a few is
divided into phases.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch

from frameworm.observe.clocks.communication import Backward, BucketRecorder, StepCommunication, seconds_between
from frameworm.observe.clocks.phases import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION_EXPOSED,
    DATA_WAIT,
    OTHER,
    TRANSFER,
    HostClock,
    StepClock,
    Timed,
)

GROUP_STEPS = 8
GROUPS_IN_FLIGHT = 2
# How many steps the host can be ahead of the device: the groups in flight, the group being filled, the current step.
MAX_STEPS_AHEAD = GROUP_STEPS * (GROUPS_IN_FLIGHT + 1) + 1
# Longer steps are not slowed by four events; shorter ones were in the overhead benchmark. A choice, not a measurement.
SHORT_STEP_S = 0.02
# Two events in a row are slightly apart: a gap up to this is the clock itself. A choice, not a measurement.
BETWEEN_EVENTS_S = 2e-6
# Coprime to what recurs every 8, 10 or 32 steps, such as the groups here, so that each is sampled at its true rate.
DIVIDE_EVERY = 7


class _Pending:
    """A step whose events the device has not passed yet; the last mark is its end and the start of the next."""

    __slots__ = (
        "begin",
        "begun_at",
        "divided",
        "host_copy_s",
        "host_other_s",
        "host_wait_s",
        "marks",
        "payload",
        "replayed",
        "scalars",
        "sent",
    )

    def __init__(self, begin: torch.cuda.Event, begun_at: float | None = None) -> None:
        self.begin = begin
        self.begun_at = begun_at  # on the host's clock; None: when the previous step ended
        self.divided = True
        self.sent: dict[int, Backward] = {}  # by the number of the mark that ends that backward
        self.replayed: dict[int, StepCommunication] = {}  # by the number of the mark that ends that replay
        self.marks: list[tuple[str | Mapping[str, float], torch.cuda.Event]] = []
        self.host_other_s = 0.0
        self.host_wait_s = 0.0
        self.host_copy_s = 0.0  # the part of the wait in which the host copied the batch
        self.payload: Any = None
        self.scalars: tuple[torch.Tensor | None, ...] = ()


class _Group:
    """Several finished steps whose scalars are copied to the host together."""

    __slots__ = ("host", "ready", "steps")

    def __init__(self, steps: list[_Pending]) -> None:
        self.steps = steps
        # Scalars of an update on the host are there already, and cannot be stacked with those of the device.
        present = [scalar for step in steps for scalar in step.scalars if scalar is not None and scalar.is_cuda]
        self.host: torch.Tensor | None = None
        if present:
            stacked = torch.stack([_plain(scalar) for scalar in present])
            self.host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            self.host.copy_(stacked, non_blocking=True)
        self.ready = torch.cuda.Event()
        self.ready.record()


def _plain(scalar: torch.Tensor) -> torch.Tensor:
    """The scalar in the form that stacking needs; a loss already has it."""
    return scalar if scalar.dtype == torch.float32 and scalar.dim() == 0 else scalar.reshape(()).float()


class CudaClock:
    """Phases measured by CUDA events that are read late.

    Args:
        device: The device to measure.
        in_step: Return each step a fixed number of steps later, the same on all ranks, not as soon as it can be read.
    """

    max_steps_ahead = MAX_STEPS_AHEAD

    def __init__(self, device: torch.device, in_step: bool = False) -> None:
        self._device = device
        self._in_step = in_step
        self._free: list[torch.cuda.Event] = []
        self._filling: list[_Pending] = []
        self._groups: deque[_Group] = deque()
        self._divides = True
        self._short = False
        self._undivided = 0
        self._steps = 0
        self._recorder: BucketRecorder | None = None
        self._read_until_s = 0.0  # end of the last step that was read, on the host's clock
        self.start()

    @property
    def note(self) -> str | None:
        """A remark for the summary if some steps were not divided into phases."""
        if not self._undivided:
            return None
        return f"steps are short: phases were measured in one of {DIVIDE_EVERY} steps, the time of a step in all"

    @property
    def divides(self) -> bool:
        return self._divides

    def divide(self) -> None:
        if not self._divides:
            self._divides = True
            self._last_host = perf_counter()

    def record_buckets(self) -> BucketRecorder:
        self._recorder = BucketRecorder(self._event_of_this_thread, self._wants_buckets)
        return self._recorder

    def _wants_buckets(self) -> bool:
        return self._divides or torch.cuda.is_current_stream_capturing()

    def _event_of_this_thread(self) -> torch.cuda.Event:
        """An event on the stream of autograd or a finished collective, which may run in another thread."""
        if torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True, external=True)  # recorded again by every replay
            event.record(torch.cuda.current_stream(self._device))
            return event
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _event(self) -> torch.cuda.Event:
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def start(self) -> None:
        # Looking up the stream at every mark would cost as much as the mark.
        self._stream = torch.cuda.current_stream(self._device)
        self._last_host = perf_counter()
        self._current = _Pending(self._event(), self._last_host)

    def mark(self, name: str) -> None:
        if not self._divides:
            if name != CHECKPOINT:
                return
            self._divides = True  # checkpoints are rare and long, and come first in their step
        current = self._current
        now = perf_counter()
        if name == OTHER and not current.marks:
            # Host work between two steps; the device sees nothing of it.
            current.host_other_s = now - self._last_host
            self._last_host = now
            return
        if name == DATA_WAIT:
            current.host_wait_s = now - self._last_host
        elif name == BACKWARD and self._recorder is not None:
            backward = self._recorder.take()
            if backward is not None:
                current.sent[len(current.marks)] = backward
        current.marks.append((name, self._event()))
        self._last_host = now

    def copied(self, seconds: float) -> None:
        self._current.host_copy_s = seconds

    def split(self, shares: Mapping[str, float], communication: StepCommunication | None = None) -> None:
        if self._divides:
            if communication is not None:
                self._current.replayed[len(self._current.marks)] = communication
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
            self._last_host = perf_counter()  # no mark has read the clock since the previous step
        current.payload = payload
        current.scalars = scalars
        self._filling.append(current)
        self._current = _Pending(current.marks[-1][1])
        if len(self._filling) >= GROUP_STEPS:
            self._groups.append(_Group(self._filling))
            self._filling = []
            if self._divides:  # copying the scalars to the host is not a data wait
                self._current.marks.append((OTHER, self._event()))
        done: list[Timed] = []
        while self._groups and (
            len(self._groups) > GROUPS_IN_FLIGHT or (not self._in_step and self._groups[0].ready.query())
        ):
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

    def abandon(self) -> list[Timed]:
        return []  # reading would wait for a device that may never respond

    def _read(self, group: _Group) -> list[Timed]:
        group.ready.synchronize()
        values = iter(group.host.tolist() if group.host is not None else [])
        timed = []
        for step in group.steps:
            scalars = [
                None if scalar is None else next(values) if scalar.is_cuda else float(scalar) for scalar in step.scalars
            ]
            if step.begun_at is None:
                step.begun_at = self._read_until_s
            step_s, phases, communication = _device_phases(step)
            self._read_until_s = step.begun_at + step_s
            timed.append(Timed(step.payload, scalars, step_s, phases, communication))
            # The last event also begins the next step, which returns it later.
            self._free.append(step.begin)
            self._free.extend(event for _, event in step.marks[:-1])
            for backward in step.sent.values():
                self._free.extend(backward.moments())
        self._short = min(item.training_s for item in timed) < SHORT_STEP_S
        return timed


def _device_phases(step: _Pending) -> tuple[float, dict[str, float], StepCommunication | None]:
    """Seconds between the events of one step.

    The gap before the data mark is split by what the host did meanwhile. The transfer is the time in which the host
    copied the batch, plus whatever the host's times do not explain.
    """
    phases: dict[str, float] = {}
    step_s = 0.0
    communication = StepCommunication()
    assert step.begun_at is not None
    event = step.begin
    for number, (name, following) in enumerate(step.marks):
        last, event = event, following
        elapsed_s = last.elapsed_time(event) * 1e-3
        begun_at = step.begun_at + step_s
        step_s += elapsed_s
        if not isinstance(name, str):
            for part, share in name.items():
                phases[part] = phases.get(part, 0.0) + elapsed_s * share
            if number in step.replayed:
                communication = step.replayed[number].begun_at(begun_at)
            continue
        if name == DATA_WAIT:
            if elapsed_s <= BETWEEN_EVENTS_S:
                phases[OTHER] = phases.get(OTHER, 0.0) + elapsed_s
                elapsed_s = 0.0
            wait_s = min(elapsed_s, step.host_wait_s)
            other_s = min(elapsed_s - wait_s, step.host_other_s)
            phases[OTHER] = phases.get(OTHER, 0.0) + other_s
            # If the gap is shorter than the host's wait, the copy's fraction of it is the same as of the wait.
            copying = min(step.host_copy_s / step.host_wait_s, 1.0) if step.host_wait_s > 0 else 0.0
            transfer_s = elapsed_s - wait_s - other_s + wait_s * copying
            phases[TRANSFER] = phases.get(TRANSFER, 0.0) + transfer_s
            elapsed_s = wait_s * (1.0 - copying)
        elif name == COMMUNICATION_EXPOSED:
            communication.met(begun_at, begun_at + elapsed_s)
        elif number in step.sent:
            since = functools.partial(seconds_between, last)
            exposed_s = step.sent[number].add_to(communication, since, begun_at, elapsed_s)
            phases[COMMUNICATION_EXPOSED] = phases.get(COMMUNICATION_EXPOSED, 0.0) + exposed_s
            elapsed_s -= exposed_s
        phases[name] = phases.get(name, 0.0) + elapsed_s
    return step_s, phases if step.divided else {}, communication if communication.buckets else None


def make_clock(device: torch.device, at_once: bool = True, in_step: bool = False) -> StepClock:
    """The clock that suits the device; `at_once` is for `HostClock`, `in_step` for `CudaClock`."""
    return CudaClock(device, in_step) if device.type == "cuda" else HostClock(at_once)
