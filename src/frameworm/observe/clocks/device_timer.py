"""Pairs of CUDA events that are read late, so that timing never makes the host wait."""

from __future__ import annotations

import time

import torch

from frameworm.errors import DeviceError


class DeviceTimer:
    """Marks moments in a device's current stream, and later tells the time between two marks.

    Args:
        device: A CUDA device; for any other device the timer is off.

    Raises:
        DeviceError: The CUDA device does not exist.
    """

    def __init__(self, device: torch.device) -> None:
        self.on = device.type == "cuda"
        if self.on and not torch.cuda.is_available():
            raise DeviceError(f"device {device} was asked for, but torch sees no CUDA device; use device='cpu'")
        self._device = device
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event | None:
        """Mark this moment in the stream; None if the timer is off or a graph is being captured."""
        if not self.on or torch.cuda.is_current_stream_capturing():
            return None
        try:  # checking first would not be safe: another thread may take the last one
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """Seconds between two marks that the device has passed."""
        return float(first.elapsed_time(last)) * 1e-3

    def give_back(self, *events: torch.cuda.Event | None) -> None:
        """Reuse these marks, which must not be read any more."""
        self._free.extend(event for event in events if event is not None)


class PendingStep:
    """Data of one step, or of times outside of steps, until the device has passed its end."""

    __slots__ = ("begin", "begin_s", "end", "end_s", "loss", "metrics", "number", "samples", "timed", "tokens")

    def __init__(self, number: int | None, begin: torch.cuda.Event | None) -> None:
        self.number = number
        self.begin_s = time.perf_counter()
        self.end_s = self.begin_s
        self.begin = begin
        self.end: torch.cuda.Event | None = None
        self.metrics: dict[str, float] = {}
        self.timed: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.samples: int | None = None
        self.tokens: int | None = None
        self.loss: float | None = None


def choose_observed(device: torch.device | str) -> torch.device:
    """Resolve a device; `auto` is the current GPU if there is one, else the CPU."""
    if str(device) == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return torch.device(device)
