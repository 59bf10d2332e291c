"""When gradients were on their way, and how much of that backward did not hide.

What is sent is the business of a DDP hook; `recorded` wraps any such hook and notes when each bucket was ready, when
the hook let backward go on, and when the reduced gradients were back. The moments come from the host's clock, or are
events in the device's streams that are read some steps later; the arithmetic is the same.

Exposed is what backward had to stand still for: the time inside the hook, and from the end of this rank's own
computing until the last bucket was back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from frameworm.records.observations import Bucket

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

Hook = Callable[[Any, "GradBucket"], torch.futures.Future[torch.Tensor]]

MEAN_AFTER_STEPS = 5  # the first steps pay for connections and for DDP's second look at its buckets


class _Sent:
    """One bucket on its way; the moments are whatever the recorder's clock gives."""

    __slots__ = ("bytes", "end", "issued", "parameters", "ready")

    def __init__(self, size_bytes: int, parameters: int, ready: Any) -> None:
        self.bytes = size_bytes
        self.parameters = parameters
        self.ready = ready
        self.issued: Any = None
        self.end: Any = None


class Meeting(NamedTuple):
    """A point of a step that all ranks must reach, in seconds of this host's clock."""

    ready_at: float  # this rank had brought its part
    idle_at: float  # it had nothing else to compute
    end_at: float  # the parts of all were back


@dataclass(slots=True)
class StepCommunication:
    """The communication of one step on one rank.

    Attributes:
        total_s: Time in which at least one bucket was on its way.
        exposed_s: What of it backward did not hide.
        buckets: With times since the beginning of the backward that sent them.
        meetings: Where this rank may have had to wait for others, in order.
        sending: Which of them is that of the buckets, if any.
    """

    total_s: float = 0.0
    exposed_s: float = 0.0
    buckets: list[Bucket] = field(default_factory=list)
    meetings: list[Meeting] = field(default_factory=list)
    sending: int | None = None

    def met(self, begin_at: float, end_at: float) -> None:
        """Add a collective that this rank waited for with nothing else to do."""
        self.total_s += end_at - begin_at
        self.exposed_s += end_at - begin_at
        self.meetings.append(Meeting(begin_at, begin_at, end_at))


class Backward:
    """The moments of one backward that sent buckets."""

    __slots__ = ("computed", "sent")

    def __init__(self, sent: list[_Sent], computed: Any) -> None:
        self.sent = sent
        self.computed = computed

    def moments(self) -> list[Any]:
        """Every moment that was noted."""
        noted = [moment for item in self.sent for moment in (item.ready, item.issued, item.end)]
        return [moment for moment in (*noted, self.computed) if moment is not None]

    def add_to(
        self, step: StepCommunication, seconds: Callable[[Any], float], begin_at: float, limit_s: float
    ) -> float:
        """Work out the times and add them to a step; returns what was exposed.

        Args:
            step: What is known of the step's communication.
            seconds: From a moment to the time since the beginning of this backward.
            begin_at: When the backward began, in seconds of the host's clock.
            limit_s: How long the whole backward took: not more than that was exposed.
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
    """How long at least one of the intervals lasts."""
    total_s = 0.0
    reached = float("-inf")
    for begin, end in sorted(intervals):
        if end > reached:
            total_s += end - max(begin, reached)
            reached = end
    return total_s


class BucketRecorder:
    """Notes the moments of the buckets between two `take`s.

    Args:
        now: The moment this is called at, on the clock of the step.
        wanted: Whether the coming buckets are to be noted at all.
    """

    def __init__(self, now: Callable[[], Any], wanted: Callable[[], bool] | None = None) -> None:
        self._now = now
        self._wanted = wanted
        self._sent: list[_Sent] = []
        self._computed: Any = None

    def ready(self, bucket: GradBucket) -> _Sent | None:
        """A bucket is full; None when nobody wants to know."""
        if self._wanted is not None and not self._wanted():
            return None
        buffer = bucket.buffer()
        sent = _Sent(_bytes_of(buffer), buffer.numel(), self._now())
        if not self._sent:
            # Called when autograd has nothing left to do, and before DDP waits for what is on its way: DDP asks for
            # its own call when the last bucket has gone.
            torch.autograd.Variable._execution_engine.queue_callback(self._compute_ended)
        self._sent.append(sent)
        return sent

    def issued(self, sent: _Sent) -> None:
        """The hook has returned."""
        sent.issued = self._now()

    def ended(self, sent: _Sent) -> None:
        """The reduced bucket is back."""
        sent.end = self._now()

    def take(self) -> Backward | None:
        """What was noted since the last call; None when nothing was sent."""
        if not self._sent:
            return None
        backward = Backward(self._sent, self._computed)
        self._sent, self._computed = [], None
        return backward

    def _compute_ended(self) -> None:
        self._computed = self._now()


def recorded(hook: Hook, recorder: BucketRecorder) -> Hook:
    """A DDP hook that sends what `hook` sends, and notes when."""

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

    recording.__annotations__ = {}  # DDP compares annotations with classes, which postponed ones are not
    return recording


def _bytes_of(buffer: torch.Tensor) -> int:
    if buffer.is_sparse:
        return buffer._values().nbytes + buffer._indices().nbytes
    return buffer.numel() * buffer.element_size()


class BucketMeans:
    """The buckets of the mean step; a new division into buckets starts the means anew."""

    def __init__(self, after_steps: int = MEAN_AFTER_STEPS) -> None:
        self._skip = after_steps
        self._layout: list[int] = []
        self._sums: list[list[float]] = []
        self._steps = 0

    def add(self, step: StepCommunication) -> None:
        """Take one step in."""
        if not step.buckets:
            return
        self._skip -= 1
        layout = [bucket.parameters or 0 for bucket in step.buckets]
        if self._skip == 0 or layout != self._layout:
            self._layout = layout
            self._sums = [[0.0] * 4 for _ in layout]
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
        for sums, parameters in zip(self._sums, self._layout):
            size_bytes, ready_s, start_s, end_s = (value / self._steps for value in sums)
            found.append(Bucket(round(size_bytes), ready_s, start_s, end_s, parameters))
        return found
