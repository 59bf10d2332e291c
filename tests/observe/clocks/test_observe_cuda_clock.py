"""The logic of the CUDA clock, on events that a test moves by hand; `pytest -m gpu` checks it on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from frameworm.observe.clocks import device_clock
from frameworm.observe.clocks.communication import _Sent
from frameworm.observe.clocks.device_clock import DIVIDE_EVERY, GROUP_STEPS, CudaClock
from frameworm.observe.clocks.phases import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION_EXPOSED,
    DATA_WAIT,
    FORWARD,
    OPTIMIZER,
    OTHER,
    TRANSFER,
    VALIDATION,
    Timed,
)


class Device:
    """A device and a host whose clocks a test sets."""

    def __init__(self) -> None:
        self.device_s = 0.0
        self.host_s = 0.0
        self.recorded = 0

    def work(self, seconds: float, host_s: float | None = None) -> None:
        self.device_s += seconds
        self.host_s += seconds if host_s is None else host_s


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.at = 0.0

        def record(self, stream: Any = None) -> None:
            self.at = made.device_s
            made.recorded += 1

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) * 1e3

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(device_clock, "perf_counter", lambda: made.host_s)
    return made


def _step(clock: CudaClock, device: Device, number: int, scale: float, **extra: float) -> list[Timed]:
    clock.mark(OTHER)
    device.work(0.002 * scale)
    clock.mark(DATA_WAIT)
    device.work(0.003 * scale)
    clock.mark(FORWARD)
    device.work(0.004 * scale)
    clock.mark(BACKWARD)
    device.work(0.001 * scale)
    clock.mark(OPTIMIZER)
    if "validation" in extra:
        clock.mark(OTHER)
        device.work(extra["validation"])
        clock.mark(VALIDATION)
    return clock.end_step(number, ())


def test_long_steps_are_all_divided(device: Device) -> None:
    clock = CudaClock(torch.device("cuda"))
    timed = [item for number in range(40) for item in _step(clock, device, number, 10.0)] + clock.drain()
    assert [item.payload for item in timed] == list(range(40))
    for item in timed:
        assert item.step_s == pytest.approx(0.1)
        assert sum(item.phases.values()) == pytest.approx(0.1)
        assert item.phases[FORWARD] == pytest.approx(0.03)
        assert item.phases[DATA_WAIT] == pytest.approx(0.02)
    assert clock.note is None


def test_short_steps_are_measured_whole_and_divided_now_and_then(device: Device) -> None:
    clock = CudaClock(torch.device("cuda"))
    timed = [item for number in range(80) for item in _step(clock, device, number, 0.5)] + clock.drain()
    assert [item.payload for item in timed] == list(range(80))
    assert all(item.step_s == pytest.approx(0.005) for item in timed)
    divided = [item for item in timed if item.phases]
    later = [item for item in divided if item.payload > GROUP_STEPS]
    assert [item.payload % DIVIDE_EVERY for item in later] == [0] * len(later)
    assert len(later) == (80 - GROUP_STEPS) // DIVIDE_EVERY
    assert all(item.phases[BACKWARD] == pytest.approx(0.002) for item in divided)
    assert device.recorded < 80 * 2
    assert clock.note is not None


@pytest.mark.parametrize("period", [GROUP_STEPS, 10, 32])
def test_what_recurs_is_seen_by_its_true_share(device: Device, period: int) -> None:
    clock = CudaClock(torch.device("cuda"))
    timed = []
    for number in range(GROUP_STEPS + 20 * period * DIVIDE_EVERY):
        if number % period == 0:
            device.work(0.001)
        timed += _step(clock, device, number, 0.5)
    divided = [item for item in timed + clock.drain() if item.phases and item.payload > GROUP_STEPS]
    seen_s = sum(item.step_s - 0.005 for item in divided) / len(divided)
    assert seen_s == pytest.approx(0.001 / period, rel=0.06)


def test_a_transfer_is_seen_in_the_short_steps_that_are_divided(device: Device) -> None:
    clock = CudaClock(torch.device("cuda"))
    timed = []
    for number in range(40):
        clock.mark(OTHER)
        device.work(0.004, host_s=0.001)  # the device waits for the copy longer than the host for the batch
        clock.mark(DATA_WAIT)
        device.work(0.001)
        clock.mark(FORWARD)
        timed += clock.end_step(number, ())
    divided = [item for item in timed + clock.drain() if item.phases]
    assert len(divided) < 20
    for item in divided:
        assert item.phases[DATA_WAIT] == pytest.approx(0.001)
        assert item.phases[TRANSFER] == pytest.approx(0.003)


def test_checkpoints_and_validation_are_seen_in_short_steps_too(device: Device) -> None:
    clock = CudaClock(torch.device("cuda"))
    timed = [item for number in range(29) for item in _step(clock, device, number, 0.5)]
    device.work(0.25)
    clock.mark(CHECKPOINT)
    timed += _step(clock, device, 29, 0.5)
    timed += _step(clock, device, 30, 0.5)
    clock.divide()
    timed += _step(clock, device, 31, 0.5, validation=0.5)
    timed += clock.drain()
    assert timed[29].phases[CHECKPOINT] == pytest.approx(0.25)
    assert timed[29].step_s == pytest.approx(0.255)
    assert timed[30].phases == {}
    assert timed[31].phases[VALIDATION] == pytest.approx(0.5)
    for item in timed:
        if item.phases:
            assert sum(item.phases.values()) == pytest.approx(item.step_s)


def test_what_the_clock_itself_takes_is_no_wait_for_data(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    carried = device_clock._Group

    def carry(steps: list[Any]) -> Any:
        device.work(0.0005)
        return carried(steps)

    monkeypatch.setattr(device_clock, "_Group", carry)
    clock, timed = CudaClock(torch.device("cuda")), []
    for number in range(3 * GROUP_STEPS):
        clock.mark(OTHER)
        device.work(1.5e-6, host_s=0.001)
        clock.mark(DATA_WAIT)
        device.work(0.03)
        clock.mark(FORWARD)
        timed += clock.end_step(number, ())
    assert [item.phases[DATA_WAIT] + item.phases[TRANSFER] for item in timed] == [0.0] * len(timed)
    assert timed[GROUP_STEPS].phases[OTHER] == pytest.approx(0.0005 + 1.5e-6)
    assert all(sum(item.phases.values()) == pytest.approx(item.step_s) for item in timed)


def test_validation_does_not_make_steps_long(device: Device) -> None:
    """All steps after it would be divided, and an epoch's beginning weigh more than it does."""
    clock = CudaClock(torch.device("cuda"))
    for number in range(24):
        _step(clock, device, number, 0.5)
    clock.divide()
    _step(clock, device, 24, 0.5, validation=0.5)
    clock.drain()
    clock.start()
    timed = [item for number in range(25, 35) for item in _step(clock, device, number, 0.5)] + clock.drain()
    assert [item.payload for item in timed if item.phases] == [28]


def test_a_gap_the_host_does_not_explain_is_the_transfer(device: Device) -> None:
    clock = CudaClock(torch.device("cuda"))
    device.work(0.0, host_s=0.004)
    clock.mark(OTHER)
    device.work(0.1, host_s=0.03)
    clock.mark(DATA_WAIT)
    clock.mark(FORWARD)
    clock.end_step(0, ())
    (timed,) = clock.drain()
    assert timed.phases[DATA_WAIT] == pytest.approx(0.03)
    assert timed.phases[OTHER] == pytest.approx(0.004)
    assert timed.phases[TRANSFER] == pytest.approx(0.066)


def test_exposed_communication_is_cut_out_of_the_backward_that_sent_it(device: Device) -> None:
    clock = CudaClock(torch.device("cuda"))
    device.host_s = 500.0
    recorder = clock.record_buckets()
    clock.start()
    now = recorder._now
    timed: list[Timed] = []
    for number in range(20):
        clock.mark(OTHER)
        clock.mark(DATA_WAIT)
        device.work(0.03)
        clock.mark(FORWARD)
        device.work(0.04)
        clock.mark(BACKWARD)  # the first micro-batch sends nothing
        device.work(0.03)
        clock.mark(FORWARD)
        device.work(0.01)
        sent = [_Sent(8, 2, now())]
        sent[0].issued = now()
        device.work(0.02)
        sent.append(_Sent(4, 1, now()))
        sent[1].issued = now()
        sent[0].end = now()
        device.work(0.01)
        recorder._sent, recorder._computed = sent, now()
        device.work(0.05)
        sent[1].end = now()
        clock.mark(BACKWARD)
        device.work(0.005)
        clock.mark(COMMUNICATION_EXPOSED)  # the counts, after accumulation
        device.work(0.01)
        clock.mark(OPTIMIZER)
        timed += clock.end_step(number, ())
    timed += clock.drain()
    assert len(timed) == 20
    for number, item in enumerate(timed):
        assert item.phases[BACKWARD] == pytest.approx(0.08)
        assert item.phases[COMMUNICATION_EXPOSED] == pytest.approx(0.055)
        assert sum(item.phases.values()) == pytest.approx(item.step_s)
        communication = item.communication
        assert communication is not None
        assert communication.total_s == pytest.approx(0.085)
        assert communication.exposed_s == pytest.approx(0.055)
        assert [bucket.ready_s for bucket in communication.buckets] == pytest.approx([0.01, 0.03])
        assert [bucket.end_s for bucket in communication.buckets] == pytest.approx([0.03, 0.09])
        begin = 500.0 + number * item.step_s
        assert communication.meetings[0] == pytest.approx((begin + 0.13, begin + 0.14, begin + 0.19))
        assert communication.meetings[1] == pytest.approx((begin + 0.19, begin + 0.19, begin + 0.195))
    assert len(clock._free) == len(set(map(id, clock._free))), "no event is given back twice"


def test_buckets_are_noted_only_in_steps_that_are_divided(device: Device) -> None:
    clock = CudaClock(torch.device("cuda"))
    recorder = clock.record_buckets()
    wanted = []
    for number in range(40):
        wanted.append(recorder._wanted is not None and recorder._wanted())
        _step(clock, device, number, 0.5)
    assert all(wanted[:GROUP_STEPS])
    assert sum(wanted[GROUP_STEPS + 1 :]) == (40 - GROUP_STEPS) // DIVIDE_EVERY


@pytest.mark.parametrize(("gap_s", "hidden"), [(0.05, 1.0), (0.06, 1.0), (0.025, 0.5)])
def test_a_copy_that_the_host_makes_is_no_wait_for_data(device: Device, gap_s: float, hidden: float) -> None:
    clock = CudaClock(torch.device("cuda"))
    timed = []
    for number in range(GROUP_STEPS):
        clock.mark(OTHER)
        device.work(gap_s, host_s=0.05)  # the host fetches for 20 ms and copies for 30
        clock.copied(0.03)
        clock.mark(DATA_WAIT)
        device.work(0.04)
        clock.mark(FORWARD)
        timed += clock.end_step(number, ())
    for item in timed + clock.drain():
        assert item.phases[DATA_WAIT] == pytest.approx(0.02 * hidden)
        assert item.phases[TRANSFER] == pytest.approx(0.03 * hidden + max(gap_s - 0.05, 0.0))
        assert sum(item.phases.values()) == pytest.approx(item.step_s)
