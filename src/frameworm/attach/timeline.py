"""The time of an observed training loop as a sequence of labelled stretches, whose labels may still change.

What a stretch was for is often clear only later: waiting for a batch belongs to validation if the model is then called
for evaluation. So each boundary is kept with its label until the step is over. On a GPU a boundary is also an event in
the stream, read long after it completed; nothing here ever waits for the device.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch

# A boundary this soon after the last one is omitted: the gap is insignificant, and GPU events are not free.
SMALLEST_GAP_S = 10e-6
# Time spent on observing, which belongs to no step.
OWN = "own"
# Start of a loader's workers, up to their first batch; kept separate from the steps.
START = "start"


class Mark:
    """The end of a stretch of time."""

    __slots__ = ("event", "host_s", "label")

    def __init__(self, label: str, host_s: float, event: torch.cuda.Event | None) -> None:
        self.label = label
        self.host_s = host_s
        self.event = event


class Stretches:
    """A finished step: its marks, the last of which is its end, and its payload."""

    __slots__ = ("begin", "divided", "marks", "payload")

    def __init__(self, begin: Mark, marks: list[Mark], divided: bool, payload: Any) -> None:
        self.begin = begin
        self.marks = marks
        self.divided = divided
        self.payload = payload

    def known(self) -> bool:
        """Whether the device has passed the end of the step."""
        event = self.marks[-1].event
        # Querying an event would abort an ongoing graph capture.
        return event is None or (not torch.cuda.is_current_stream_capturing() and bool(event.query()))

    def times(self) -> tuple[float, dict[str, float]]:
        """Return the time of the step and of each label; an undivided step has labels only if it contains rare ones."""
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
        """Return times between events; None if some are missing or belong to another device."""
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
    """The current step. Positions count all marks ever made, so they stay valid when a step is cut off.

    Attributes:
        divides: Whether boundaries inside the step get an event on a GPU; the ends of steps always do.
        near_end: Whether the step may be over; marks may then belong to the next step, so they get events too.
        stream: The stream in which the step's events are recorded, if a GPU is in use.
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
        """Position of the next mark."""
        return self._dropped + len(self.marks)

    @property
    def last_label(self) -> str:
        """Label of the last stretch."""
        return self.marks[-1].label if self.marks else ""

    def start(self) -> None:
        """Start over: earlier time belongs to no step."""
        self._dropped = self.position
        self.marks = []
        self.near_end = False
        self._find_device()
        self.begin = Mark("", perf_counter(), self._event(True) if self._on_device else None)

    def mark(self, label: str, *, border: bool = False) -> None:
        """Label the time since the last mark.

        Args:
            label: What the time was for.
            border: Whether a step may end here.
        """
        self.marks.append(Mark(label, perf_counter(), self._event(border) if self._on_device else None))

    def gap(self, *, border: bool = False) -> bool:
        """Whether the time since the last mark is worth a mark of its own."""
        last = self.marks[-1] if self.marks else self.begin
        return perf_counter() - last.host_s >= SMALLEST_GAP_S or (border and self._on_device and last.event is None)

    def relabel(self, position: int, label: str) -> None:
        """Merge everything since a position, and preceding stretches with the same label, into one stretch."""
        first = max(0, position - self._dropped)
        if first < len(self.marks):
            while first > 0 and self.marks[first - 1].label == label:
                first -= 1
            end = self.marks[-1]
            self.marks[first:] = [Mark(label, end.host_s, end.event)]

    def rename(self, old: str, new: str) -> None:
        """Change a label of all stretches that have it."""
        for mark in self.marks:
            if mark.label == old:
                mark.label = new

    def split(self, position: int, payload: Any) -> Stretches | None:
        """Cut off everything before a position as a finished step; None if there is nothing."""
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
        # Checking is free; creating a CUDA context is left to the script.
        self._on_device = torch.cuda.is_initialized()
        self.stream = torch.cuda.current_stream() if self._on_device else None

    def _event(self, border: bool) -> torch.cuda.Event | None:
        if not (border or self.divides or self.near_end):
            return None
        # During a capture, the event would become part of the graph.
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
