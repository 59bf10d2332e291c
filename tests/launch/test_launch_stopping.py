from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from frameworm.errors import StateError
from frameworm.launch.process_group import all_reduce_sums, shared_store
from frameworm.launch.stopping import StopAgreement, StopRequest


class MemoryStore:
    """A store for ranks that live in one process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.counters: dict[str, int] = {}
        self.calls = 0

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value

    def get(self, key: str, /) -> bytes:
        return self.values[key].encode()

    def add(self, key: str, amount: int, /) -> int:
        self.calls += 1
        self.counters[key] = self.counters.get(key, 0) + amount
        return self.counters[key]


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "preempted"), (signal.SIGUSR1, "preempted")],
)
def test_signals_become_a_reason_and_handlers_come_back(number: signal.Signals, reason: str) -> None:
    before = signal.getsignal(number)
    with StopRequest() as request:
        assert request.reason is None
        os.kill(os.getpid(), number)
        assert request.reason == reason
    assert signal.getsignal(number) is before


def test_the_first_reason_stays_and_the_second_interrupt_is_at_once() -> None:
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert request.reason == "preempted"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_other_threads_leave_the_handlers_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def body() -> None:
        with StopRequest():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]


def test_one_process_stops_at_the_next_boundary() -> None:
    request = StopRequest()
    agreement = StopAgreement(request, None, 0, 1)
    assert agreement.stop_before(1) is None
    request.ask("interrupted")
    assert agreement.stop_before(2) == "interrupted"


def test_ranks_apart_by_a_step_stop_before_the_same_one() -> None:
    store = MemoryStore()
    requests = [StopRequest(), StopRequest()]
    ahead, behind = (StopAgreement(requests[rank], store, rank, 2, poll_interval_s=0) for rank in (0, 1))
    requests[0].ask("preempted")
    assert ahead.stop_before(7) is None  # posted, waits for the other
    assert behind.stop_before(6) is None  # learns of it, settles on 7 + 1
    assert behind.stop_before(7) is None
    assert ahead.stop_before(8) == "preempted"
    assert behind.stop_before(8) == "preempted"


def test_reasons_are_agreed_on_too() -> None:
    store = MemoryStore()
    requests = [StopRequest(), StopRequest()]
    agreements = [StopAgreement(requests[rank], store, rank, 2) for rank in (0, 1)]
    requests[0].ask("preempted")
    requests[1].ask("interrupted")
    assert [agreement.stop_before(3) for agreement in agreements] == [None, None]
    assert [agreement.stop_before(4) for agreement in agreements] == ["interrupted", "interrupted"]


def test_a_larger_lookahead_waits_longer_and_overrunning_is_an_error() -> None:
    store = MemoryStore()
    requests = [StopRequest(), StopRequest()]
    first, second = (StopAgreement(requests[rank], store, rank, 2, lookahead=3) for rank in (0, 1))
    for request in requests:
        request.ask("preempted")
    assert first.stop_before(1) is None
    assert second.stop_before(1) is None
    assert [first.stop_before(step) for step in (2, 3, 4)] == [None, None, "preempted"]
    with pytest.raises(StateError, match="stop before step 4"):
        second.stop_before(5)


def test_nobody_asked_costs_one_look_per_interval() -> None:
    store = MemoryStore()
    agreement = StopAgreement(StopRequest(), store, 0, 2, poll_interval_s=3600)
    for step in range(1000):
        assert agreement.stop_before(step) is None
    assert store.calls == 1


def train_until_stopped(rank: int, world_size: int, seed: int, rounds: int) -> list[tuple[int, str | None]]:
    """Several runs in which a random rank gets a signal at a random moment."""
    shared, own = random.Random(seed), random.Random(seed * 100 + rank)
    stops: list[tuple[int, str | None]] = []
    for number in range(rounds):
        victim, moment_s = shared.randrange(world_size), shared.uniform(0, 0.15)
        with StopRequest() as request:
            agreement = StopAgreement(request, shared_store(f"stop-{number}"), rank, world_size, poll_interval_s=0.02)
            if rank == victim:
                threading.Timer(moment_s, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            deadline = time.monotonic() + 30
            step = 1
            while (reason := agreement.stop_before(step)) is None:
                assert time.monotonic() < deadline
                time.sleep(own.choice([0, 0, 0.001, 0.01]))
                all_reduce_sums([1.0])
                time.sleep(own.choice([0, 0, 0.001, 0.01]))
                step += 1
            stops.append((step, reason))
        # As the engine does at its end: nobody goes on while another rank has yet to look.
        all_reduce_sums([1.0])
    return stops


@pytest.mark.slow
def test_three_processes_agree_when_one_gets_the_signal(run_ranks: Callable[..., list[Any]]) -> None:
    stops = run_ranks(train_until_stopped, world_size=3, args=(random.randrange(10**6), 12))
    assert stops[0] == stops[1] == stops[2]
    assert all(reason == "preempted" for _, reason in stops[0])
    assert any(step > 2 for step, _ in stops[0])
