"""Watchdog over ranks that wait for each other: names the rank that does not arrive, and ends all in a fixed time.

Every rank regularly publishes its step, its number of collectives, and where its training thread is. A separate thread
does that and reads the others' reports; the training thread is not involved, so it may be stuck anywhere. The exchange
itself can get stuck too, with the network or with the rank that hosts the store. So another thread judges, and a rank
that has not reported for a long time counts as silent.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from frameworm.errors import StuckError
from frameworm.launch.stores import Store
from frameworm.torch_private.distributed import collectives_begun

SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S = 0.2, 5.0
MOST_FRAMES = 40
_MEETING = ("torch/distributed/", "launch/process_group.py", "torch/autograd/graph.py")


@dataclass(frozen=True)
class Beat:
    """One report of a rank.

    Attributes:
        number: Number of reports so far.
        step: Steps that the rank has finished.
        phase: What its training thread was doing.
        place: The innermost line of its training thread.
        collectives: Collectives that it has reached; None if the backend does not count them.
        meeting: True if the place is one where ranks wait for each other.
    """

    number: int
    step: int
    phase: str
    place: str
    collectives: int | None
    meeting: bool = False


@dataclass(frozen=True)
class Heard:
    """The last report of a rank, and how long ago anything in it changed."""

    beat: Beat
    silent_s: float  # since its last report
    still_s: float  # since it reached another step or collective


def missing_ranks(heard: Mapping[int, Heard | None], limit_s: float) -> dict[int, str] | None:
    """Return the ranks that the others wait for, with what is known about each.

    Args:
        heard: All ranks; None for one that has never reported.
        limit_s: How long no progress is accepted.

    Returns:
        None while all is well or may be. Empty: all ranks have arrived, but nothing moves.
    """
    speaking = {rank: item for rank, item in heard.items() if item is not None and item.silent_s <= limit_s / 2}
    if any(item.still_s < limit_s for item in speaking.values()):
        return None
    found: dict[int, str] = {}
    furthest = max((item.beat.collectives or 0 for item in speaking.values()), default=0)
    for rank, item in sorted(heard.items()):
        if item is None:
            found[rank] = "never heard of"
        elif rank not in speaking:
            found[rank] = f"silent for {item.silent_s:.0f} s, last seen {_where(item.beat)}"
        elif (item.beat.collectives or 0) < furthest:
            found[rank] = _where(item.beat)
    if found:
        return found
    return {} if any(item.beat.meeting for item in speaking.values()) else None


def _where(beat: Beat) -> str:
    return f"in step {beat.step + 1}, {beat.phase}, at {beat.place}"


class Watchdog:
    """Watches the ranks of a run while its `with` block is active.

    Args:
        store: A store shared by the ranks, under its own prefix.
        rank: This rank.
        world_size: Number of ranks.
        limit_s: How long no rank may make progress.
        step: Returns the number of steps that this rank has finished.
        phase_of: Names what the training thread does, from its innermost frame.
        end: Called in a watchdog thread with the error and a longer report on where each rank is; it ends the process.
        one_machine: All ranks are on one machine, so no network can be lost.
        replays: Returns the number of CUDA graphs with collectives launched by this rank, which torch does not count.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        limit_s: float,
        step: Callable[[], int],
        phase_of: Callable[[FrameType], str],
        end: Callable[[StuckError, str], None],
        one_machine: bool = False,
        replays: Callable[[], int] = lambda: 0,
    ) -> None:
        self._store = store
        self._rank = rank
        self._ranks = range(world_size)
        self._limit_s = limit_s
        self._interval_s = min(max(limit_s / 20, SHORTEST_INTERVAL_S), LONGEST_INTERVAL_S)
        self._step = step
        self._phase_of = phase_of
        self._end = end
        self._one_machine = one_machine
        self._replays = replays
        self._thread = threading.get_ident()
        self._over = threading.Event()
        self._own: Beat | None = None
        self._own_stack = ""
        self._beats: dict[int, Beat] = {}
        self._heard_at = dict.fromkeys(self._ranks, 0.0)
        self._moved_at = dict.fromkeys(self._ranks, 0.0)

    def __enter__(self) -> Watchdog:
        """Start watching the calling thread."""
        self._thread = threading.get_ident()
        now = time.monotonic()
        self._heard_at = dict.fromkeys(self._ranks, now)
        self._moved_at = dict.fromkeys(self._ranks, now)
        self._look(0)
        for body in (self._exchange, self._judge):
            threading.Thread(target=body, name=f"frameworm-watchdog{body.__name__}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching."""
        self._over.set()

    def _exchange(self) -> None:
        """Publish this rank's state and read the others'; a store that fails or hangs counts as silence."""
        store: Any = self._store
        # A separate connection, because the training thread may be waiting on the other one.
        with suppress(AttributeError, RuntimeError):
            store = store.clone()
        while not self._over.is_set():
            with suppress(Exception):  # after any error, no report was received
                assert self._own is not None
                store.set(f"stack-{self._rank}", self._own_stack)
                store.set(f"beat-{self._rank}", json.dumps(asdict(self._own)))
                for rank in self._ranks:
                    key = f"beat-{rank}"
                    if rank != self._rank and store.check([key]):
                        self._take(rank, Beat(**json.loads(store.get(key))))
            self._over.wait(self._interval_s)

    def _look(self, number: int) -> None:
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return
        stack = stack_lines(frame)
        meeting = any(part in line for line in stack[:6] for part in _MEETING)
        counted = _collectives()
        come_to = None if counted is None else counted + self._replays()
        self._own = Beat(number, self._step(), self._phase_of(frame), stack[0], come_to, meeting)
        self._own_stack = "\n".join(stack)
        self._take(self._rank, self._own)

    def _take(self, rank: int, beat: Beat) -> None:
        before, now = self._beats.get(rank), time.monotonic()
        if before is None or before.number != beat.number:
            self._heard_at[rank] = now
        if before is None or (before.step, before.collectives) != (beat.step, beat.collectives):
            self._moved_at[rank] = now
        self._beats[rank] = beat

    def _judge(self) -> None:
        first_step = self._step()
        number, looked_at = 0, time.monotonic()
        while not self._over.wait(self._interval_s):
            number += 1
            self._forgive(time.monotonic() - looked_at - self._interval_s)
            self._look(number)
            now = looked_at = time.monotonic()
            heard: dict[int, Heard | None] = dict.fromkeys(self._ranks)
            for rank, beat in list(self._beats.items()):
                heard[rank] = Heard(beat, now - self._heard_at[rank], now - self._moved_at[rank])
            # In the first step, connections are made and kernels compiled, on each rank at its own pace.
            limit_s = self._limit_s if self._step() > first_step else 2 * self._limit_s
            if now - min(self._moved_at.values()) < limit_s:
                continue
            missing = missing_ranks(heard, limit_s)
            if missing is not None and not self._over.is_set():
                self._over.set()
                self._tell(missing, heard, limit_s)

    def _forgive(self, away_s: float) -> None:
        """Discount the time in which this process itself stood still, for instance suspended."""
        if away_s <= self._interval_s:
            return
        now = time.monotonic()
        for times in (self._heard_at, self._moved_at):
            for rank, moment in times.items():
                times[rank] = min(now, moment + away_s)

    def _tell(self, missing: dict[int, str], heard: Mapping[int, Heard | None], limit_s: float) -> None:
        if missing:
            names = "; ".join(f"rank {rank} did not arrive ({known})" for rank, known in missing.items())
            if not self._one_machine and len(missing) == len(self._ranks) - 1 and self._rank not in missing:
                names += "; or this rank has lost its network"
        else:
            names = "all ranks have reached the same collective, but it does not end: check the network between them"
        error = StuckError(
            f"stuck in step {self._step() + 1}: nothing has moved for {limit_s:g} s (parallel.watchdog_s). {names}"
        )
        self._end(error, self._account(heard))

    def _account(self, heard: Mapping[int, Heard | None]) -> str:
        """Describe where every rank is, as far as this one knows."""
        stacks = {self._rank: self._own_stack}

        def ask() -> None:
            with suppress(Exception):
                for rank in self._ranks:
                    if rank != self._rank and self._store.check([f"stack-{rank}"]):
                        stacks[rank] = self._store.get(f"stack-{rank}").decode()

        # The store itself may be what is stuck.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(2.0)
        lines = []
        for rank, item in sorted(heard.items()):
            if item is None:
                lines.append(f"rank {rank}: never heard of")
                continue
            beat = item.beat
            lines.append(
                f"rank {rank}: step {beat.step + 1}, {beat.phase}, {beat.collectives} collectives; "
                f"last heard {item.silent_s:.1f} s ago, last moved {item.still_s:.1f} s ago"
            )
            lines += [f"    {line}" for line in stacks.get(rank, beat.place).splitlines()]
        return "\n".join(lines) + "\n"


def stack_lines(frame: FrameType | None) -> Sequence[str]:
    """Return a thread's stack, innermost first, as `file:line function`; without sources, which may be slow to read."""
    lines: list[str] = []
    while frame is not None and len(lines) < MOST_FRAMES:
        code = frame.f_code
        lines.append(f"{_short(code.co_filename)}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return lines


def _short(path: str) -> str:
    """The last parts of a path; starts at the package's name if possible."""
    for mark in ("/site-packages/", "/src/"):
        if mark in path:
            return path.rsplit(mark, 1)[1]
    return "/".join(path.split("/")[-2:])


def _collectives() -> int | None:
    """Number of collectives of the default group that this rank has reached."""
    try:
        return collectives_begun(dist.group.WORLD)
    except Exception:  # backends that do not count raise different errors
        return None
