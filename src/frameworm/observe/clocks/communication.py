"""When gradient buckets were sent, and how much of that backward did not hide.

A DDP hook does the sending; `recorded` wraps any such hook and notes when each bucket was ready, when the hook
returned, and when the reduced gradients were back. The times come from the host's clock, or are events in the device's
streams that are read some steps later; the arithmetic is the same.

Exposed communication is the time in which backward stood still: inside the hook, and from the end of this rank's own
computation until the last bucket was back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from frameworm.records.observations import Bucket
from frameworm.torch_private.execution import run_after_backward
from frameworm.torch_private.tensors import sparse_indices, sparse_values

if TYPE_CHECKING:
    from torch.distributed import GradBucket  # type: ignore[attr-defined]

Hook = Callable[[Any, "GradBucket"], torch.futures.Future[torch.Tensor]]

MEAN_AFTER_STEPS = 5  # in the first steps connections are made and DDP rebuilds its buckets


class _Sent:
    """One bucket that was sent; its moments are in the units of the recorder's clock."""

    __slots__ = ("bytes", "end", "issued", "parameters", "ready")

    def __init__(self, size_bytes: int, parameters: int, ready: Any) -> None:
        self.bytes = size_bytes
        self.parameters = parameters
        self.ready = ready
        self.issued: Any = None
        self.end: Any = None


class Meeting(NamedTuple):
    """A collective within a step, in seconds of this host's clock."""

    ready_at: float  # this rank had contributed its part
    idle_at: float  # this rank had nothing else to compute
    end_at: float  # the parts of all ranks had arrived


@dataclass(slots=True)
class StepCommunication:
    """The communication of one step on one rank.

    Attributes:
        total_s: Time in which at least one bucket was being sent.
        exposed_s: The part of it that backward did not hide.
        buckets: The buckets, with times since the beginning of their backward pass.
        meetings: Collectives at which this rank may have waited for others, in order.
        sending: Index of the one that is the gradient exchange, if any.
        captured: Whether the step was replayed from a CUDA graph.
    """

    total_s: float = 0.0
    exposed_s: float = 0.0
    buckets: list[Bucket] = field(default_factory=list)
    meetings: list[Meeting] = field(default_factory=list)
    sending: int | None = None
    captured: bool = False

    def begun_at(self, moment_s: float) -> StepCommunication:
        """Convert meeting times from seconds since the start of the step to the host's clock."""
        shifted = [Meeting(*(moment_s + time_s for time_s in meeting)) for meeting in self.meetings]
        return replace(self, buckets=list(self.buckets), meetings=shifted)

    def met(self, begin_at: float, end_at: float) -> None:
        """Add a collective for which this rank waited with nothing else to do."""
        self.total_s += end_at - begin_at
        self.exposed_s += end_at - begin_at
        self.meetings.append(Meeting(begin_at, begin_at, end_at))


class Backward:
    """The moments of one backward pass that sent buckets."""

    __slots__ = ("computed", "sent")

    def __init__(self, sent: list[_Sent], computed: Any) -> None:
        self.sent = sent
        self.computed = computed

    def moments(self) -> list[Any]:
        """All moments that were recorded."""
        noted = [moment for item in self.sent for moment in (item.ready, item.issued, item.end)]
        return [moment for moment in (*noted, self.computed) if moment is not None]

    def add_to(
        self, step: StepCommunication, seconds: Callable[[Any], float], begin_at: float, limit_s: float
    ) -> float:
        """Compute the times and add them to a step; returns the exposed seconds.

        Args:
            step: The communication of the step so far.
            seconds: Converts a moment to seconds since the beginning of this backward pass.
            begin_at: Beginning of the backward pass, in seconds of the host's clock.
            limit_s: Duration of the whole backward pass, an upper bound of what was exposed.
        """
        held_s = 0.0
        intervals = []
        for item in self.sent:
            ready_s = seconds(item.ready)
            issued_s = ready_s if item.issued is None else seconds(item.issued)
            end_s = issued_s if item.end is None else max(issued_s, seconds(item.end))
            held_s += issued_s - ready_s
            intervals.append((ready_s, end_s))
            step.buckets.append(Bucket(item.bytes, ready_s, ready_s, end_s, item.parameters))
        last_ready_s = intervals[-1][0]
        last_end_s = max(end_s for _, end_s in intervals)
        computed_s = last_ready_s if self.computed is None else max(last_ready_s, seconds(self.computed))
        exposed_s = min(limit_s, held_s + max(0.0, last_end_s - computed_s))
        step.total_s += union_s(intervals)
        step.exposed_s += exposed_s
        step.sending = len(step.meetings)
        step.meetings.append(
            Meeting(begin_at + last_ready_s, begin_at + computed_s, begin_at + max(computed_s, last_end_s))
        )
        return exposed_s


def union_s(intervals: list[tuple[float, float]]) -> float:
    """Seconds covered by at least one of the intervals."""
    total_s = 0.0
    reached = float("-inf")
    for begin, end in sorted(intervals):
        if end > reached:
            total_s += end - max(begin, reached)
            reached = end
    return total_s


class BucketRecorder:
    """Records the moments of buckets between two calls of `take`.

    Args:
        now: Returns the current moment, on the clock of the step.
        wanted: Returns whether to record the coming buckets; None: always.
    """

    def __init__(self, now: Callable[[], Any], wanted: Callable[[], bool] | None = None) -> None:
        self._now = now
        self._wanted = wanted
        self._sent: list[_Sent] = []
        self._computed: Any = None

    def ready(self, bucket: GradBucket) -> _Sent | None:
        """Called when a bucket is full; returns None if it is not to be recorded."""
        if self._wanted is not None and not self._wanted():
            return None
        buffer = bucket.buffer()
        sent = _Sent(_bytes_of(buffer), buffer.numel(), self._now())
        if not self._sent:
            # Runs when autograd has finished and before DDP waits for pending buckets: DDP queues its own callback
            # when the last bucket has been sent.
            run_after_backward(self._compute_ended)
        self._sent.append(sent)
        return sent

    def ready_at_once(self, gradients: torch.Tensor) -> _Sent | None:
        """Called when all gradients are sent together after backward; returns None if that is not to be recorded."""
        if self._wanted is not None and not self._wanted():
            return None
        sent = _Sent(_bytes_of(gradients), gradients.numel(), self._now())
        self._sent.append(sent)
        return sent

    def issued(self, sent: _Sent) -> None:
        """Called when the hook has returned."""
        sent.issued = self._now()

    def ended(self, sent: _Sent) -> None:
        """Called when the reduced bucket is back."""
        sent.end = self._now()

    def take(self) -> Backward | None:
        """The recording since the last call; None if nothing was sent."""
        if not self._sent:
            return None
        backward = Backward(self._sent, self._computed)
        self._sent, self._computed = [], None
        return backward

    def _compute_ended(self) -> None:
        self._computed = self._now()


def recorded(hook: Hook, recorder: BucketRecorder) -> Hook:
    """A DDP hook that sends what `hook` sends, and records when."""

    def recording(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent = recorder.ready(bucket)
        future = hook(state, bucket)
        if sent is None:
            return future
        recorder.issued(sent)

        def back(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            recorder.ended(sent)
            return done.value()

        return future.then(back)

    recording.__annotations__ = {}  # DDP compares annotations with classes; postponed ones are strings
    return recording


def _bytes_of(buffer: torch.Tensor) -> int:
    if buffer.is_sparse:
        return sparse_values(buffer).nbytes + sparse_indices(buffer).nbytes
    return buffer.numel() * buffer.element_size()


def seconds_between(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Seconds between two events that the device has passed."""
    return float(begin.elapsed_time(end)) * 1e-3


class BucketMeans:
    """The buckets of the mean step; restarted by another bucket layout or the first replayed step."""

    def __init__(self, after_steps: int = MEAN_AFTER_STEPS) -> None:
        self._skip = after_steps
        self._layout: tuple[bool, list[int]] = (False, [])
        self._sums: list[list[float]] = []
        self._steps = 0

    def add(self, step: StepCommunication) -> None:
        """Add one step."""
        if not step.buckets:
            return
        self._skip -= 1
        layout = step.captured, [bucket.parameters or 0 for bucket in step.buckets]
        if self._layout[0] and not step.captured:
            return  # once steps are replayed, one that is not is an exception
        if self._skip == 0 or layout != self._layout:
            self._layout = layout
            self._sums = [[0.0] * 4 for _ in step.buckets]
            self._steps = 0
        for sums, bucket in zip(self._sums, step.buckets):
            sums[0] += bucket.bytes
            sums[1] += bucket.ready_s
            sums[2] += bucket.start_s
            sums[3] += bucket.end_s
        self._steps += 1

    def buckets(self) -> list[Bucket]:
        """The mean step's buckets."""
        found = []
        for sums, parameters in zip(self._sums, self._layout[1]):
            size_bytes, ready_s, start_s, end_s = (value / self._steps for value in sums)
            found.append(Bucket(round(size_bytes), ready_s, start_s, end_s, parameters))
        return found
