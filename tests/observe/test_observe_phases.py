"""Phases of a step on CPU: attributed to their names, adding up, and nothing lost between steps."""

from __future__ import annotations

import time

import pytest
import torch

from frameworm.observe import phases
from frameworm.observe.device_clock import make_clock
from frameworm.observe.phases import BACKWARD, CHECKPOINT, DATA_WAIT, FORWARD, OTHER, HostClock


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


def test_what_follows_a_step_belongs_to_the_next() -> None:
    clock = HostClock()
    clock.start()
    begin = time.perf_counter()
    clock.mark(FORWARD)
    first = clock.end_step(1, ())
    time.sleep(0.02)
    clock.mark(CHECKPOINT)
    clock.mark(FORWARD)
    second = clock.end_step(2, ())
    total = time.perf_counter() - begin
    assert second[0].phases[CHECKPOINT] >= 0.02
    assert set(second[0].phases) == {CHECKPOINT, FORWARD, OTHER}
    assert first[0].step_s + second[0].step_s == pytest.approx(total, abs=0.005)
    assert clock.drain() == []


def test_starting_anew_forgets_what_came_before() -> None:
    clock = HostClock()
    time.sleep(0.03)
    clock.start()
    (timed,) = clock.end_step(None, ())
    assert timed.step_s < 0.02


def test_the_clock_suits_the_device() -> None:
    assert isinstance(make_clock(torch.device("cpu")), HostClock)
