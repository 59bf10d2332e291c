"""The time of somebody else's training loop as a row of labelled stretches, whose labels may still change.

What a stretch was for is often clear only later: the wait for a batch belongs to validation if the model is then
called to be scored. So each border is kept with its label until the step is over. On a GPU a border is also an event in
the stream, read when it is long done; nothing here ever waits for the device.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

# A border this soon after the last one is left out: the gap says nothing, and a border on a GPU is not free.
SMALLEST_GAP_S = 10e-6
# Time that observing took, which belongs to no step.
OWN = "own"
# Start of a loader's workers, up to the first batch they give; told apart from the steps.
START = "start"


class Mark:
    """The end of a stretch of time."""

    __slots__ = ("event", "host_s", "label")

    def __init__(self, label: str, host_s: float, event: torch.cuda.Event | None) -> None:
        self.label = label
        self.host_s = host_s
        self.event = event


class Stretches:
    """A finished step: its marks, the last of which is its end, and whatever goes with it."""

    __slots__ = ("begin", "divided", "marks", "payload")

    def __init__(self, begin: Mark, marks: list[Mark], divided: bool, payload: Any) -> None:
        self.begin = begin
        self.marks = marks
        self.divided = divided
        self.payload = payload

    def known(self) -> bool:
        """Whether the device has come past the end of the step."""
        event = self.marks[-1].event
        # Asking an event while a graph is being captured would end the capture.
        return event is None or (not torch.cuda.is_current_stream_capturing() and bool(event.query()))

    def times(self) -> tuple[float, dict[str, float]]:
        """Time of the step, and of each label in it; a step that was not divided has only what is rare."""
        step_s, phases = self._by_device() or self._by_host()
        step_s -= phases.pop(OWN, 0.0)
        if self.divided:
            return step_s, phases
        rare = any(mark.label in ("checkpoint", "validation", START) for mark in self.marks)
        return step_s, self._by_host()[1] if rare else {}

    def _by_host(self) -> tuple[float, dict[str, float]]:
        phases: dict[str, float] = {}
        last_s = self.begin.host_s
        for mark in self.marks:
            phases[mark.label] = phases.get(mark.label, 0.0) + mark.host_s - last_s
            last_s = mark.host_s
        return last_s - self.begin.host_s, phases

    def _by_device(self) -> tuple[float, dict[str, float]] | None:
        """Times between events; None when some are missing or belong to another device."""
        last, end = self.begin.event, self.marks[-1].event
        if last is None or end is None:
            return None
        phases: dict[str, float] = {}
        step_s = 0.0
        try:
            if not self.divided:
                return last.elapsed_time(end) * 1e-3, {}
            for mark in self.marks:
                if mark.event is None:
                    return None
                # Marks on different streams may come out of order.
                elapsed_s = max(0.0, last.elapsed_time(mark.event) * 1e-3)
                phases[mark.label] = phases.get(mark.label, 0.0) + elapsed_s
                step_s += elapsed_s
                last = mark.event
        except (RuntimeError, ValueError):
            return None
        return step_s, phases


class Timeline:
    """The step that is going on. Positions count all marks ever made, so that cutting a step off keeps them valid.

    Attributes:
        divides: Whether borders inside of the step get an event on a GPU; the ends of steps always do.
        near_end: The step may be over: what comes now may turn out to be the next step, so it gets events too.
        stream: The stream that the events of the step are put into, where a GPU is in use.
    """

    def __init__(self) -> None:
        self.divides = True
        self.near_end = False
        self.begin = Mark("", perf_counter(), None)
        self.marks: list[Mark] = []
        self._dropped = 0
        self._on_device = False
        self.stream: torch.cuda.Stream | None = None

    @property
    def position(self) -> int:
        """Where the next mark will stand."""
        return self._dropped + len(self.marks)

    @property
    def last_label(self) -> str:
        """Label of the last stretch."""
        return self.marks[-1].label if self.marks else ""

    def start(self) -> None:
        """Begin anew: what came before belongs to no step."""
        self._dropped = self.position
        self.marks = []
        self.near_end = False
        self._find_device()
        self.begin = Mark("", perf_counter(), self._event(True) if self._on_device else None)

    def mark(self, label: str, *, border: bool = False) -> None:
        """Say what the time since the last mark was for.

        Args:
            border: A step may end here.
        """
        self.marks.append(Mark(label, perf_counter(), self._event(border) if self._on_device else None))

    def gap(self, *, border: bool = False) -> bool:
        """Whether the time since the last mark is worth one of its own."""
        last = self.marks[-1] if self.marks else self.begin
        return perf_counter() - last.host_s >= SMALLEST_GAP_S or (border and self._on_device and last.event is None)

    def relabel(self, position: int, label: str) -> None:
        """Make one stretch of everything since a position, and of stretches before it with the same label."""
        first = max(0, position - self._dropped)
        if first < len(self.marks):
            while first > 0 and self.marks[first - 1].label == label:
                first -= 1
            end = self.marks[-1]
            self.marks[first:] = [Mark(label, end.host_s, end.event)]

    def rename(self, old: str, new: str) -> None:
        """Give all stretches with a label another one."""
        for mark in self.marks:
            if mark.label == old:
                mark.label = new

    def split(self, position: int, payload: Any) -> Stretches | None:
        """Cut off what came before a position as a finished step; None when that is nothing."""
        first = position - self._dropped
        if first <= 0:
            return None
        finished = Stretches(self.begin, self.marks[:first], self.divides, payload)
        self.begin = finished.marks[-1]
        del self.marks[:first]
        self._dropped += first
        self._find_device()
        return finished

    def _find_device(self) -> None:
        # Asking is free; making a context is the script's business.
        self._on_device = torch.cuda.is_initialized()
        self.stream = torch.cuda.current_stream() if self._on_device else None

    def _event(self, border: bool) -> torch.cuda.Event | None:
        if not (border or self.divides or self.near_end):
            return None
        # An event put into a graph that is being captured would become part of it.
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
