"""Who waits for whom: the wait for the slowest rank, told apart from the transfer.

Every now and then the ranks tell each other when they were ready in their last steps, in a small gather that nobody
waits for. Step records are held back until then. A rank waited from its own end of computing until the last rank had
brought its part; what is left of the exposed time is the transfer.

The ranks' clocks are compared by meetings: no rank can leave one before every other has come to it. That bounds the
difference between two clocks from both sides, at the start by a few empty meetings, later by those of the training.
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
MEETINGS = 2  # most in a step: the counts that weigh gradients, and the gradients
EXCHANGE_EVERY_S = 0.5  # far apart enough to cost nothing, close enough for a progress line
MOST_STEPS = 64
DEVICE_STEPS = 32  # on NCCL: more than the host can be ahead of the device, so that asking never waits
NOTICEABLE_SHARE = 0.01

Row = list[float]  # ready and end of each meeting, then step_s; what is not known is nan


class RankClocks:
    """What each rank's clock shows beyond rank 0's at the same moment, in seconds."""

    def __init__(self, world_size: int) -> None:
        self.offsets = [0.0] * world_size
        self.uncertainty_s = 0.0

    def compare(self, ready: Sequence[Sequence[float]], end: Sequence[Sequence[float]]) -> None:
        """Estimate from meetings: by rank, when it came to each and when it left."""
        self.uncertainty_s = 0.0
        for rank, (low, high) in enumerate(_bounds(ready, end)):
            if low <= 0 <= high:  # ranks of one host read one clock
                self.offsets[rank] = 0.0
            else:
                self.offsets[rank] = (low + high) / 2
                self.uncertainty_s = max(self.uncertainty_s, (high - low) / 2)

    def correct(self, ready: Sequence[Sequence[float]], end: Sequence[Sequence[float]]) -> None:
        """Follow clocks that drift: an offset that later meetings rule out moves to the nearest possible one."""
        for rank, (low, high) in enumerate(_bounds(ready, end)):
            if low <= high:
                self.offsets[rank] = min(max(self.offsets[rank], low), high)


def _bounds(ready: Sequence[Sequence[float]], end: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Least and most that each clock can be ahead of rank 0's."""
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
    """Which rank the others wait for.

    One is named when it came last in half of the steps and in clearly more than its turn, and the others lost a share
    of the step by it that matters and that the clocks can tell.
    """

    def __init__(self, world_size: int) -> None:
        self._last = [0] * world_size
        self._caused_s = [0.0] * world_size
        self._steps = 0
        self._step_s = 0.0

    def add(self, meetings: Sequence[Sequence[float]], step_s: float) -> None:
        """Take one step in: for each meeting when each rank was ready, on one clock."""
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
        """The rank the others waited for, or None."""
        if not self._steps:
            return None
        worst = max(range(len(self._last)), key=self._caused_s.__getitem__)
        turn = 1 / len(self._last)
        chance = self._steps * turn + 3 * math.sqrt(self._steps * turn * (1 - turn))
        often = self._last[worst] > chance and 2 * self._last[worst] >= self._steps
        noticeable_s = max(NOTICEABLE_SHARE * self._step_s / self._steps, 2 * uncertainty_s)
        return worst if often and self._caused_s[worst] / self._steps > noticeable_s else None


class _Gathering:
    """Rows of all ranks on their way to each other.

    Over NCCL they travel through the device, in a stream of their own: neither host nor training waits.
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
        """By rank; waits if it must."""
        if self._event is None:
            self._work.wait()
        else:
            self._event.synchronize()
        return [part.tolist() for part in self._gathered]


_Held = tuple[StepRecord, StepCommunication | None]


class RankWatch:
    """Holds this rank's step records back until the other ranks have told when they were ready.

    All calls but `add` and `abandon` may be collective: every rank must make them in the same order, at the same steps.

    Args:
        rank: This rank.
        world_size: How many there are.
        device: Where the training runs.
        steps_behind: How many steps later at most a step is known on every rank.
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
        """Compare the ranks' clocks; collective."""
        moments: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            begin = perf_counter()
            _Gathering([[0.0]], self._stream).rows()
            moments.append((begin, perf_counter()))
        rounds = _Gathering([list(moment) for moment in moments[1:]], self._stream).rows()  # the first may set up
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
        """Called after every step with its number; the records that are complete by now, in order."""
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
        """All records as they are, when the other ranks cannot be asked any more."""
        records = [record for record, _ in (*self._sent, *self._held)]
        self._sent, self._gathering = [], None
        self._held.clear()
        return records

    @property
    def slowest_rank(self) -> int | None:
        """The rank the others waited for in this run, or None."""
        return self._stragglers.slowest_rank(self._clocks.uncertainty_s)

    def buckets(self) -> list[Bucket]:
        """The buckets of this rank's mean step."""
        return self._means.buckets()

    def _send(self, until: int | None) -> None:
        """Tell the others of the steps up to a number, or of all."""
        assert self._gathering is None
        while self._held and (until is None or self._held[0][0].step <= until):
            self._sent.append(self._held.popleft())
        if self._sent:
            self._gathering = _Gathering([_row(*item) for item in self._sent], self._stream)

    def _receive(self) -> list[StepRecord]:
        """What the others told about the steps sent; waits if it must."""
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
        """Write down how long one step waited, given when each rank was ready for each of its meetings."""
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
                # The last bucket of the slowest rank was that late; the ones before it were, by all we know.
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
