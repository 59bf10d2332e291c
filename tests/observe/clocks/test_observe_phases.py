"""Phases of a step on CPU: attributed to their names, adding up, and nothing lost between steps."""

from __future__ import annotations

import pytest
import torch

from frameworm.observe.clocks import phases
from frameworm.observe.clocks.device_clock import make_clock
from frameworm.observe.clocks.phases import BACKWARD, CHECKPOINT, DATA_WAIT, FORWARD, OTHER, TRANSFER, HostClock


def test_times_go_to_the_phase_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(phases, "perf_counter", lambda: now_s)
    clock = HostClock()
    clock.start()
    now_s += 0.02
    clock.mark(DATA_WAIT)
    for _ in range(2):
        now_s += 0.01
        clock.mark(FORWARD)
        now_s += 0.03
        clock.mark(BACKWARD)
    (timed,) = clock.end_step("payload", (torch.tensor(1.5), None))
    assert timed.payload == "payload"
    assert timed.values == [1.5, None]
    assert timed.phases == pytest.approx({DATA_WAIT: 0.02, FORWARD: 0.02, BACKWARD: 0.06, OTHER: 0.0})
    assert sum(timed.phases.values()) == pytest.approx(timed.step_s, rel=1e-9)


def test_what_follows_a_step_belongs_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(phases, "perf_counter", lambda: now_s)
    clock = HostClock()
    clock.start()
    now_s += 0.03
    clock.mark(FORWARD)
    first = clock.end_step(1, ())
    now_s += 0.02
    clock.mark(CHECKPOINT)
    now_s += 0.04
    clock.mark(FORWARD)
    now_s += 0.01
    second = clock.end_step(2, ())
    assert second[0].phases == pytest.approx({CHECKPOINT: 0.02, FORWARD: 0.04, OTHER: 0.01})
    assert (first[0].step_s, second[0].step_s) == pytest.approx((0.03, 0.07))
    assert clock.drain() == []


def test_starting_anew_forgets_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(phases, "perf_counter", lambda: now_s)
    clock = HostClock()
    now_s += 0.03
    clock.start()
    now_s += 0.01
    (timed,) = clock.end_step(None, ())
    assert timed.step_s == pytest.approx(0.01)


def test_the_clock_suits_the_device() -> None:
    assert isinstance(make_clock(torch.device("cpu")), HostClock)


def test_short_steps_are_handed_out_several_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(phases, "perf_counter", lambda: now_s)
    clock = HostClock(at_once=False)
    clock.start()
    groups = []
    for number in range(20):
        now_s += 0.003
        clock.mark(FORWARD)
        now_s += 0.001
        groups.append(clock.end_step(number, (torch.tensor(float(number)),)))
    assert [len(group) for group in groups] == [0, 0, 0, 0, 5] * 4
    timed = [item for group in groups for item in group]
    assert [item.payload for item in timed] == list(range(20))
    assert [item.values for item in timed] == [[float(number)] for number in range(20)]
    assert all(item.phases == pytest.approx({FORWARD: 0.003, OTHER: 0.001}) for item in timed)
    assert [item.ended_at for item in timed] == pytest.approx([100.0 + 0.004 * (number + 1) for number in range(20)])
    now_s += 0.03
    assert len(clock.end_step("long", ())) == 1
    clock.end_step("short", ())
    assert [item.payload for item in clock.abandon()] == ["short"]
    assert clock.drain() == []


def test_ranks_that_tell_each_other_of_steps_know_each_at_once() -> None:
    clock = HostClock(at_once=False)
    clock.record_buckets()
    assert len(clock.end_step(1, ())) == 1


def test_the_copy_of_a_batch_is_cut_out_of_the_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(phases, "perf_counter", lambda: now_s)
    clock = HostClock()
    clock.mark(OTHER)
    now_s += 0.05
    clock.copied(0.03)
    clock.mark(DATA_WAIT)
    (timed,) = clock.end_step(1, ())
    assert timed.phases == pytest.approx({OTHER: 0.0, TRANSFER: 0.03, DATA_WAIT: 0.02})


def test_several_phases_share_what_was_measured_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(phases, "perf_counter", lambda: now_s)
    clock = HostClock()
    now_s += 0.04
    clock.split({FORWARD: 0.25, BACKWARD: 0.75})
    (timed,) = clock.end_step(1, ())
    assert timed.phases == pytest.approx({FORWARD: 0.01, BACKWARD: 0.03, OTHER: 0.0})
