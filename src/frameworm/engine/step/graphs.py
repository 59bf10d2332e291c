"""CUDA graphs: a function recorded once and replayed as one launch, with the borders of its phases timed inside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

Mark = Callable[[str], None]

KEPT_STEPS = 64  # more than a host is ever ahead of its device; see observe/clocks/device_clock.py


class CaptureError(Exception):
    """A step could not be recorded; training goes on without."""


class Recorded(Protocol):
    """What a recorder gives back."""

    output: torch.Tensor

    def replay(self) -> None:
        """Run everything again, on whatever the recorded tensors hold now."""

    def shares(self) -> dict[str, float]:
        """Which part of the last replay each phase took; waits for it."""


class Recorder(Protocol):
    """Records functions."""

    def record(self, function: Callable[[Mark], torch.Tensor]) -> Recorded:
        """Record a function that tells the ends of its phases and returns one tensor.

        Raises:
            CaptureError: It does something that cannot be recorded.
        """


class CudaGraph:
    """One recorded function; the events inside the graph are recorded anew by every replay."""

    def __init__(self, graph: torch.cuda.CUDAGraph, borders: list[tuple[str, torch.cuda.Event]], output: torch.Tensor):
        self.output = output
        self.replay = graph.replay
        self._borders = borders

    def shares(self) -> dict[str, float]:
        (_, last), *following = self._borders
        following[-1][1].synchronize()
        times: dict[str, float] = {}
        for name, event in following:
            times[name] = times.get(name, 0.0) + max(last.elapsed_time(event), 0.0)
            last = event
        total = sum(times.values())
        return {name: time / total for name, time in times.items()} if total else {}


class KeptFigures:
    """Copies of a graph's figures for as many steps as a clock may hold them; made once, and filled in turn."""

    def __init__(self) -> None:
        self._rows: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []
        self._turn = 0

    def keep(self, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The figures by themselves; the same tensors come again after `KEPT_STEPS` calls."""
        if not self._rows:
            rows = output.new_empty(KEPT_STEPS, *output.shape).unbind(0)
            self._rows = [(row, row.unbind(0)) for row in rows]
        row, figures = self._rows[self._turn]
        self._turn = (self._turn + 1) % KEPT_STEPS
        row.copy_(output)
        return figures


class GraphRecorder:
    """Records on a stream of its own; all graphs share one pool of memory, since no two run at the same time.

    Whoever uses it must run its warm-up on that stream too.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._pool: Any = None

    def record(self, function: Callable[[Mark], torch.Tensor]) -> CudaGraph:
        graph = torch.cuda.CUDAGraph()
        borders: list[tuple[str, torch.cuda.Event]] = []

        def mark(name: str) -> None:
            event = torch.cuda.Event(enable_timing=True, external=True)
            event.record()
            borders.append((name, event))

        random_state = torch.cuda.get_rng_state(self.device)
        reason: BaseException | None = None
        try:
            # Other threads (those that pin and copy batches) may go on calling CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
                try:
                    mark("begin")
                    output = function(mark)
                except Exception as error:
                    reason = error  # the end of a broken capture raises too, and says less
                    raise
        except Exception as error:
            self._recover(random_state)
            raise CaptureError(in_words(reason or error)) from None
        if self._pool is None:
            self._pool = graph.pool()
        return CudaGraph(graph, borders, output)

    def _recover(self, random_state: torch.Tensor) -> None:
        """A broken capture leaves torch's generator in the middle of it; one that succeeds takes it out."""
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self.stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=self.device)
        torch.cuda.set_rng_state(random_state, self.device)


def in_words(error: BaseException) -> str:
    """The first line that says something."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"
