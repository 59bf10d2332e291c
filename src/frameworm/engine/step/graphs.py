"""CUDA graphs: a function is recorded once and replayed as one launch, with its phases timed inside the graph."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from frameworm.observe.clocks.communication import Backward, BucketRecorder, StepCommunication, seconds_between
from frameworm.observe.clocks.phases import BACKWARD, COMMUNICATION_EXPOSED

Mark = Callable[[str], None]

KEPT_STEPS = 64  # more than a host can be ahead of its device; see observe/clocks/device_clock.py


class CaptureError(Exception):
    """A step could not be recorded; training continues eagerly."""


class ReplaySample(NamedTuple):
    """How the time of one replay was spent.

    Attributes:
        shares: Fraction of each phase; they add up to 1.
        communication: What was sent, with times since the start of the replay; None if nothing was.
    """

    shares: dict[str, float]
    communication: StepCommunication | None = None


class Recorded(Protocol):
    """A recorded function."""

    output: torch.Tensor

    def replay(self) -> None:
        """Run everything again on the current values of the recorded tensors."""

    def sample(self) -> ReplaySample:
        """Time the phases of the last replay; waits for it to finish."""

    def close(self) -> None:
        """Free the recording; call before destroying the process group of its collectives."""


class Recorder(Protocol):
    """Records functions.

    Attributes:
        stream: The stream on which to warm up; None for any.
        buckets: Records what a recorded backward sends; None if not needed.
    """

    stream: torch.cuda.Stream | None
    buckets: BucketRecorder | None

    def record(self, function: Callable[[Mark], torch.Tensor]) -> Recorded:
        """Record a function that marks the ends of its phases and returns one tensor.

        Raises:
            CaptureError: If it does something that cannot be recorded.
        """


class CudaGraph:
    """One recorded function; every replay records the events inside the graph again.

    Args:
        graph: The recorded graph.
        borders: The end of each phase; the first is the start of the recording.
        output: What the function returned.
        sent: Backward passes that sent gradients, by the index of the border that ends them.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        borders: list[tuple[str, torch.cuda.Event]],
        output: torch.Tensor,
        sent: dict[int, Backward],
    ) -> None:
        self.output = output
        self.replay = graph.replay
        self.pool: Any = graph.pool()
        self._graph = graph
        self._borders = borders
        self._sent = sent

    def close(self) -> None:
        self._graph.reset()
        self.pool = None

    def sample(self) -> ReplaySample:
        (_, last), *following = self._borders
        following[-1][1].synchronize()
        times: dict[str, float] = {}
        communication = StepCommunication(captured=True)
        begun_s = 0.0
        for number, (name, event) in enumerate(following, 1):
            elapsed_s = max(seconds_between(last, event), 0.0)
            own_s = elapsed_s
            if name == COMMUNICATION_EXPOSED:
                communication.met(begun_s, begun_s + elapsed_s)
            elif number in self._sent:
                since = functools.partial(seconds_between, last)
                exposed_s = self._sent[number].add_to(communication, since, begun_s, elapsed_s)
                times[COMMUNICATION_EXPOSED] = times.get(COMMUNICATION_EXPOSED, 0.0) + exposed_s
                own_s -= exposed_s
            times[name] = times.get(name, 0.0) + own_s
            begun_s += elapsed_s
            last = event
        shares = {name: time / begun_s for name, time in times.items()} if begun_s else {}
        return ReplaySample(shares, communication if communication.buckets else None)


class KeptFigures:
    """Copies of a graph's outputs for as many steps as a clock may hold them; allocated once, used in turn."""

    def __init__(self) -> None:
        self._rows: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []
        self._turn = 0

    def keep(self, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copy the outputs and return one tensor each; the tensors are reused after `KEPT_STEPS` calls."""
        if not self._rows:
            rows = output.new_empty(KEPT_STEPS, *output.shape).unbind(0)
            self._rows = [(row, row.unbind(0)) for row in rows]
        row, figures = self._rows[self._turn]
        self._turn = (self._turn + 1) % KEPT_STEPS
        row.copy_(output)
        return figures


class GraphRecorder:
    """Records on a separate stream; all graphs share one memory pool, since no two run at the same time.

    The caller must run its warm-up on that stream too.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = torch.cuda.Stream(device)
        self.buckets: BucketRecorder | None = None
        self._graphs: weakref.WeakSet[CudaGraph] = weakref.WeakSet()

    def record(self, function: Callable[[Mark], torch.Tensor]) -> CudaGraph:
        graph = torch.cuda.CUDAGraph()
        borders: list[tuple[str, torch.cuda.Event]] = []
        sent: dict[int, Backward] = {}
        if self.buckets is not None:
            self.buckets.take()  # of steps that no clock divided into phases

        def mark(name: str) -> None:
            backward = self.buckets.take() if self.buckets is not None and name == BACKWARD else None
            if backward is not None:
                sent[len(borders)] = backward
            event = torch.cuda.Event(enable_timing=True, external=True)
            event.record()
            borders.append((name, event))

        # A pool is freed with the last graph that uses it.
        pool = next((made.pool for made in self._graphs if made.pool is not None), None)
        random_state = torch.cuda.get_rng_state(self.device)
        reason: BaseException | None = None
        try:
            # Other threads (which pin and copy batches) may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                try:
                    mark("begin")
                    output = function(mark)
                except Exception as error:
                    reason = error  # ending a broken capture raises too, with a less useful error
                    raise
        except Exception as error:
            if self.buckets is not None:
                self.buckets.take()
            self._recover(random_state)
            raise CaptureError(in_words(reason or error)) from None
        made = CudaGraph(graph, borders, output, sent)
        self._graphs.add(made)
        return made

    def _recover(self, random_state: torch.Tensor) -> None:
        """Reset torch's generator, which a broken capture leaves in capture mode, by a successful capture."""
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(self.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self.stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=self.device)
        torch.cuda.set_rng_state(random_state, self.device)


class Rehearsed:
    """A stand-in for a graph that calls the function at each replay."""

    def __init__(self, function: Callable[[Mark], torch.Tensor], device: torch.device) -> None:
        self.output = torch.zeros(0, device=device)
        self._function: Callable[[Mark], torch.Tensor] | None = function

    def replay(self) -> None:
        assert self._function is not None
        self.output = self._function(lambda name: None)

    def sample(self) -> ReplaySample:
        return ReplaySample({})

    def close(self) -> None:
        self._function = None


class RehearsalRecorder:
    """Records nothing; if its steps differ from those of a `GraphRecorder`, the recording is the cause."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.buckets: BucketRecorder | None = None
        self._device = device

    def record(self, function: Callable[[Mark], torch.Tensor]) -> Rehearsed:
        return Rehearsed(function, self._device)


def in_words(error: BaseException) -> str:
    """Describe an error by its type and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"
