"""Communication of a step from noted moments: what was on its way, what backward did not hide, and the mean step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from frameworm.observe.clocks import phases
from frameworm.observe.clocks.communication import (
    Backward,
    BucketMeans,
    BucketRecorder,
    Meeting,
    StepCommunication,
    _Sent,
    recorded,
    union_s,
)
from frameworm.observe.clocks.phases import BACKWARD, COMMUNICATION_EXPOSED, DATA_WAIT, FORWARD, HostClock
from frameworm.records.observations import Bucket


def test_a_message_sent_at_once_notes_no_moment_twice() -> None:
    recorder = BucketRecorder(object)
    sent = recorder.ready_at_once(torch.zeros(4))
    assert sent is not None
    recorder.ended(sent)
    backward = recorder.take()
    assert backward is not None
    moments = backward.moments()
    assert len({id(moment) for moment in moments}) == len(moments) == 2  # events would be given back twice


def test_union_counts_overlapping_time_once() -> None:
    assert union_s([]) == 0
    assert union_s([(3.0, 4.0), (0.0, 2.0), (1.0, 2.5), (1.2, 1.3)]) == pytest.approx(3.5)


def _sent(ready: float, issued: float, end: float | None) -> _Sent:
    sent = _Sent(100, 25, ready)
    sent.issued, sent.end = issued, end
    return sent


def _step(*buckets: _Sent, computed: float | None, whole_s: float = 100.0) -> StepCommunication:
    step = StepCommunication()
    exposed_s = Backward(list(buckets), computed).add_to(step, lambda moment: moment - 1000.0, 50.0, whole_s)
    assert exposed_s == step.exposed_s
    return step


def test_exposed_is_what_comes_after_the_computing() -> None:
    step = _step(_sent(1001, 1001, 1003), _sent(1002, 1002, 1007), computed=1004)
    assert step.total_s == pytest.approx(6)
    assert step.exposed_s == pytest.approx(3)
    assert [(bucket.ready_s, bucket.end_s, bucket.bytes) for bucket in step.buckets] == [(1, 3, 100), (2, 7, 100)]
    (meeting,) = step.meetings
    assert meeting == (52, 54, 57)
    assert step.sending == 0


def test_what_backward_hides_is_not_exposed() -> None:
    step = _step(_sent(1001, 1001, 1003), _sent(1002, 1002, 1004), computed=1009)
    assert step.exposed_s == 0
    assert step.total_s == pytest.approx(3)
    assert step.meetings[0].end_at == step.meetings[0].idle_at, "nobody waited"


def test_time_inside_the_hook_holds_backward_up() -> None:
    step = _step(_sent(1001, 1002, 1003), _sent(1004, 1004.5, 1005), computed=1009)
    assert step.exposed_s == pytest.approx(1.5)


def test_no_more_is_exposed_than_backward_took() -> None:
    assert _step(_sent(1001, 1001, 1008), computed=1001, whole_s=5.0).exposed_s == 5


def test_without_a_word_from_autograd_the_last_bucket_ends_the_computing() -> None:
    assert _step(_sent(1001, 1001, 1002), _sent(1003, 1003, 1007), computed=None).exposed_s == pytest.approx(4)


class _Bucket:
    def buffer(self) -> torch.Tensor:
        return torch.zeros(10)


def _backward_through(hook: Any) -> None:
    """Call a hook in the middle of a backward, as DDP does."""
    values = torch.ones(2, requires_grad=True)

    def call(gradient: torch.Tensor) -> None:
        hook(None, _Bucket())

    values.register_hook(call)
    (values * 2).sum().backward()


def test_any_hook_can_be_wrapped_and_its_value_passes_through() -> None:
    moments = iter(range(100))
    recorder = BucketRecorder(lambda: next(moments))
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(torch.tensor([7.0]))
    wrapped = recorded(lambda state, bucket: future, recorder)
    results: list[torch.futures.Future[torch.Tensor]] = []
    _backward_through(lambda state, bucket: results.append(wrapped(state, bucket)))
    assert torch.equal(results[0].wait(), torch.tensor([7.0]))
    backward = recorder.take()
    assert backward is not None
    (sent,) = backward.sent
    assert (sent.bytes, sent.parameters, sent.ready, sent.issued, sent.end) == (40, 10, 0, 1, 2)
    assert backward.computed == 3
    assert recorder.take() is None


def test_an_error_of_the_hook_passes_through() -> None:
    recorder = BucketRecorder(lambda: 0.0)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    wrapped = recorded(lambda state, bucket: future, recorder)
    found: list[torch.futures.Future[torch.Tensor]] = []
    _backward_through(lambda state, bucket: found.append(wrapped(state, bucket)))
    future.set_exception(ValueError("the other rank is gone"))
    with pytest.raises(Exception, match="the other rank is gone"):
        found[0].wait()


def test_nothing_is_noted_when_nobody_wants_to_know() -> None:
    recorder = BucketRecorder(lambda: 0.0, lambda: False)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    assert recorded(lambda state, bucket: future, recorder)(None, _Bucket()) is future  # type: ignore[arg-type]
    assert recorder.take() is None


def test_a_backward_that_sends_nothing_stays_whole() -> None:
    clock = HostClock()
    clock.record_buckets()
    clock.start()
    clock.mark(FORWARD)
    nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    clock.mark(BACKWARD)
    (timed,) = clock.end_step(None, ())
    assert timed.communication is None
    assert COMMUNICATION_EXPOSED not in timed.phases


def test_a_collective_between_phases_is_communication_too() -> None:
    clock = HostClock()
    clock.record_buckets()
    clock.start()
    clock.mark(FORWARD)
    clock.mark(COMMUNICATION_EXPOSED)
    (timed,) = clock.end_step(None, ())
    assert timed.communication is not None
    assert timed.communication.total_s == timed.communication.exposed_s == timed.phases[COMMUNICATION_EXPOSED]
    assert timed.communication.sending is None


def _communication(*buckets: Bucket) -> StepCommunication:
    return StepCommunication(buckets=list(buckets))


def test_the_mean_step_leaves_out_the_first_steps_and_old_divisions() -> None:
    means = BucketMeans(after_steps=2)
    assert means.buckets() == []
    means.add(_communication(Bucket(4, 9.0, 9.0, 99.0, 1), Bucket(4, 9.0, 9.0, 99.0, 1)))
    means.add(_communication(Bucket(8, 1.0, 2.0, 3.0, 2)))
    means.add(_communication(Bucket(8, 2.0, 4.0, 7.0, 2)))
    means.add(StepCommunication())
    assert means.buckets() == [Bucket(8, 1.5, 3.0, 5.0, 2)]
    means.add(_communication(Bucket(4, 1.0, 1.0, 2.0, 1), Bucket(4, 1.0, 1.0, 2.0, 1)))
    assert means.buckets() == [Bucket(4, 1.0, 1.0, 2.0, 1)] * 2


def test_replays_start_the_means_again_and_are_not_mixed_with_eager_steps() -> None:
    means = BucketMeans(after_steps=1)
    means.add(_communication(Bucket(8, 5.0, 5.0, 9.0, 2)))
    replayed = StepCommunication(buckets=[Bucket(8, 1.0, 1.0, 2.0, 2)], captured=True)
    means.add(replayed)
    means.add(_communication(Bucket(8, 5.0, 5.0, 9.0, 2)))
    means.add(replayed)
    assert means.buckets() == [Bucket(8, 1.0, 1.0, 2.0, 2)]


def test_what_a_replay_sent_is_placed_on_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(phases, "perf_counter", lambda: now_s)
    clock = HostClock()
    now_s = 101.0
    clock.mark(DATA_WAIT)
    now_s = 103.0
    sample = StepCommunication(1.0, 0.5, [], [Meeting(0.5, 1.0, 1.5)], 0, captured=True)
    clock.split({FORWARD: 0.5, COMMUNICATION_EXPOSED: 0.5}, sample)
    (timed,) = clock.end_step(None, ())
    assert timed.communication is not None
    assert timed.communication.meetings == [Meeting(101.5, 102.0, 102.5)]
    assert sample.meetings == [Meeting(0.5, 1.0, 1.5)], "the sample serves the following steps, too"
    assert timed.phases[COMMUNICATION_EXPOSED] == pytest.approx(1.0)
