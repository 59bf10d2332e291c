"""Which rank waits for which: splits exposed communication into waiting for the slowest rank and transfer.

From time to time the ranks exchange when they were ready in their last steps, in a small asynchronous gather. Step
records are held back until then. A rank waited from the end of its own computation until the last rank had contributed
its part; the rest of the exposed time is the transfer.

The ranks' clocks are compared at collectives ("meetings"): no rank can leave one before every other has entered it.
That bounds the difference of two clocks from both sides, first by a few empty collectives, later by those of the
training.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from frameworm.observe.clocks.communication import MEAN_AFTER_STEPS, BucketMeans, StepCommunication
from frameworm.records.observations import Bucket
from frameworm.records.schema import StepRecord

ROUNDS = 10
MEETINGS = 2  # most per step: the exchange of sample counts, and that of the gradients
EXCHANGE_EVERY_S = 0.5  # rare enough to cost nothing, frequent enough for a progress line
MOST_STEPS = 64
DEVICE_STEPS = 32  # on NCCL: more than the host can be ahead of the device, so that a query never waits
NOTICEABLE_SHARE = 0.01

Row = list[float]  # ready and end of each meeting, then step_s; nan if unknown


class RankClocks:
    """How far each rank's clock is ahead of rank 0's, in seconds."""

    def __init__(self, world_size: int) -> None:
        self.offsets = [0.0] * world_size
        self.uncertainty_s = 0.0

    def compare(self, ready: Sequence[Sequence[float]], end: Sequence[Sequence[float]]) -> None:
        """Estimate offsets from when each rank entered and left each meeting."""
        self.uncertainty_s = 0.0
        for rank, (low, high) in enumerate(_bounds(ready, end)):
            if low <= 0 <= high:  # ranks on one host share a clock
                self.offsets[rank] = 0.0
            else:
                self.offsets[rank] = (low + high) / 2
                self.uncertainty_s = max(self.uncertainty_s, (high - low) / 2)

    def correct(self, ready: Sequence[Sequence[float]], end: Sequence[Sequence[float]]) -> None:
        """Follow clock drift: an offset that later meetings rule out moves to the nearest possible one."""
        for rank, (low, high) in enumerate(_bounds(ready, end)):
            if low <= high:
                self.offsets[rank] = min(max(self.offsets[rank], low), high)


def _bounds(ready: Sequence[Sequence[float]], end: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Bounds on how far each clock can be ahead of rank 0's."""
    found = []
    for rank in range(len(ready)):
        low, high = -math.inf, math.inf
        if rank:
            for own_ready, own_end, first_ready, first_end in zip(ready[rank], end[rank], ready[0], end[0]):
                if not math.isnan(own_ready + own_end + first_ready + first_end):
                    low = max(low, own_ready - first_end)
                    high = min(high, own_end - first_ready)
        found.append((low, high))
    return found


class Stragglers:
    """Finds the rank that the others wait for.

    A rank is named if it came last in half of the steps and clearly more often than by chance, and if the others lost a
    noticeable fraction of the step to it that exceeds the uncertainty of the clocks.
    """

    def __init__(self, world_size: int) -> None:
        self._last = [0] * world_size
        self._caused_s = [0.0] * world_size
        self._steps = 0
        self._step_s = 0.0

    def add(self, meetings: Sequence[Sequence[float]], step_s: float) -> None:
        """Add one step: for each meeting when each rank was ready, on one clock."""
        caused_s = [0.0] * len(self._last)
        for ready in meetings:
            latest = max(ready)
            caused_s[ready.index(latest)] += sum(latest - moment for moment in ready) / (len(ready) - 1)
        worst = max(range(len(caused_s)), key=caused_s.__getitem__)
        self._last[worst] += 1
        self._caused_s[worst] += caused_s[worst]
        self._steps += 1
        self._step_s += step_s

    def slowest_rank(self, uncertainty_s: float = 0.0) -> int | None:
        """The rank that the others waited for, or None."""
        if not self._steps:
            return None
        worst = max(range(len(self._last)), key=self._caused_s.__getitem__)
        turn = 1 / len(self._last)
        chance = self._steps * turn + 3 * math.sqrt(self._steps * turn * (1 - turn))
        often = self._last[worst] > chance and 2 * self._last[worst] >= self._steps
        noticeable_s = max(NOTICEABLE_SHARE * self._step_s / self._steps, 2 * uncertainty_s)
        return worst if often and self._caused_s[worst] / self._steps > noticeable_s else None


class _Gathering:
    """An asynchronous gather of rows from all ranks.

    Over NCCL they go through the device on a separate stream: neither host nor training waits.
    """

    def __init__(self, rows: list[Row], stream: torch.cuda.Stream | None) -> None:
        own = torch.tensor(rows, dtype=torch.float64)
        self._event: torch.cuda.Event | None = None
        if stream is None:
            self._gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            self._work: Any = dist.all_gather(self._gathered, own, async_op=True)
            return
        with torch.cuda.stream(stream):
            sent = own.pin_memory().to(stream.device, non_blocking=True)
            received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
            self._work = dist.all_gather(received, sent, async_op=True)
            self._work.wait()
            self._gathered = [torch.empty(own.shape, dtype=own.dtype, pin_memory=True) for _ in received]
            for host, part in zip(self._gathered, received):
                host.copy_(part, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def is_done(self) -> bool:
        return bool(self._work.is_completed() if self._event is None else self._event.query())

    def rows(self) -> list[list[Row]]:
        """The rows by rank; waits if necessary."""
        if self._event is None:
            self._work.wait()
        else:
            self._event.synchronize()
        return [part.tolist() for part in self._gathered]


_Held = tuple[StepRecord, StepCommunication | None]


class RankWatch:
    """Holds this rank's step records back until the other ranks have reported when they were ready.

    All methods but `add` and `abandon` may be collective: every rank must call them in the same order, at the same
    steps.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        device: Where the training runs.
        steps_behind: After at most this many further steps, a step is known on every rank.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, steps_behind: int) -> None:
        self._rank = rank
        self._behind = steps_behind
        on_device = device.type == "cuda" and dist.get_backend() == "nccl"
        self._stream = torch.cuda.Stream(device) if on_device else None
        self._window = DEVICE_STEPS if on_device else 1
        self._next_at = 0
        self._held: deque[_Held] = deque()
        self._sent: list[_Held] = []
        self._gathering: _Gathering | None = None
        self._clocks = RankClocks(world_size)
        self._stragglers = Stragglers(world_size)
        self._means = BucketMeans()
        self._warm_up = MEAN_AFTER_STEPS
        self._cost_s = 0.0

    def start(self) -> None:
        """Compare the ranks' clocks; a collective."""
        moments: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            begin = perf_counter()
            _Gathering([[0.0]], self._stream).rows()
            moments.append((begin, perf_counter()))
        rounds = _Gathering([list(moment) for moment in moments[1:]], self._stream).rows()  # without the set-up round
        self._clocks.compare(
            [[row[0] for row in rows] for rows in rounds], [[row[1] for row in rows] for rows in rounds]
        )

    def add(self, record: StepRecord, communication: StepCommunication | None) -> None:
        """Keep a step until it is known how long it waited."""
        if self._cost_s:
            record.metrics["exchange_s"] = self._cost_s
            self._cost_s = 0.0
        self._held.append((record, communication))

    def after_step(self, step: int) -> list[StepRecord]:
        """Call after every step with its number; returns the records that are complete by now, in order."""
        if step < self._next_at:
            if self._gathering is not None and self._gathering.is_done():
                return self._receive()
            return []
        begin = perf_counter()
        complete = self._receive()
        self._send(step - self._behind)
        self._next_at = step + self._window
        self._cost_s += perf_counter() - begin
        return complete

    def flush(self) -> list[StepRecord]:
        """Complete all records, waiting for the other ranks."""
        complete = self._receive()
        self._send(None)
        return complete + self._receive()

    def abandon(self) -> list[StepRecord]:
        """Return all records as they are, when the other ranks cannot be reached any more."""
        records = [record for record, _ in (*self._sent, *self._held)]
        self._sent, self._gathering = [], None
        self._held.clear()
        return records

    @property
    def slowest_rank(self) -> int | None:
        """The rank that the others waited for in this run, or None."""
        return self._stragglers.slowest_rank(self._clocks.uncertainty_s)

    def buckets(self) -> list[Bucket]:
        """The buckets of this rank's mean step."""
        return self._means.buckets()

    def _send(self, until: int | None) -> None:
        """Send the steps up to a number, or all of them, to the other ranks."""
        assert self._gathering is None
        while self._held and (until is None or self._held[0][0].step <= until):
            self._sent.append(self._held.popleft())
        if self._sent:
            self._gathering = _Gathering([_row(*item) for item in self._sent], self._stream)

    def _receive(self) -> list[StepRecord]:
        """Complete the steps that were sent with the other ranks' rows; waits if necessary."""
        if self._gathering is None:
            return []
        rows = self._gathering.rows()
        self._gathering = None
        sent, self._sent = self._sent, []
        columns = [
            (
                [[row[2 * number] for row in part] for part in rows],
                [[row[2 * number + 1] for row in part] for part in rows],
            )
            for number in range(MEETINGS)
        ]
        for ready, end in columns:
            self._clocks.correct(ready, end)
        for index, (record, communication) in enumerate(sent):
            if communication is not None:
                self._judge([[part[index] for part in ready] for ready, _ in columns], record, communication)
        if self._stream is None:
            mean_s = max(sum(row[-1] for row in part) / len(part) for part in rows)
            self._window = max(1, min(MOST_STEPS, round(EXCHANGE_EVERY_S / mean_s))) if mean_s > 0 else MOST_STEPS
        return [record for record, _ in sent]

    def _judge(self, ready: list[list[float]], record: StepRecord, communication: StepCommunication) -> None:
        """Set how long one step waited, given when each rank was ready for each of its meetings."""
        offsets = self._clocks.offsets
        known = []
        wait_s = 0.0
        for number, meeting in enumerate(communication.meetings[:MEETINGS]):
            moments = [moment - offset for moment, offset in zip(ready[number], offsets)]
            if any(map(math.isnan, moments)):
                continue
            known.append(moments)
            own_offset = offsets[self._rank]
            latest = max(moments) + own_offset
            wait_s += min(max(0.0, latest - meeting.idle_at), meeting.end_at - meeting.idle_at)
            if number == communication.sending:
                # The slowest rank's last bucket was this late; assume that its earlier ones were too.
                late_s = max(0.0, latest - meeting.ready_at)
                for bucket in communication.buckets:
                    bucket.start_s = min(bucket.ready_s + late_s, bucket.end_s)
        if known:
            record.rank_wait_s = min(wait_s, communication.exposed_s)
        self._warm_up -= 1
        if self._warm_up < 0 and known:
            self._stragglers.add(known, record.step_s)
        self._means.add(communication)


def _row(record: StepRecord, communication: StepCommunication | None) -> Row:
    meetings = [] if communication is None else communication.meetings[:MEETINGS]
    moments = [moment for meeting in meetings for moment in (meeting.ready_at, meeting.end_at)]
    return [*moments, *[math.nan] * (2 * MEETINGS - len(moments)), record.step_s]
