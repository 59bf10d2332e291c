"""Events reach listeners in order, and watchers cannot end a training."""

from __future__ import annotations

from typing import Any

import pytest

from frameworm.records.events import Events, Listener
from frameworm.records.schema import Batch, EpochRecord, RunRecord, StepRecord

STEP = StepRecord(1, 1, 0.0, 0.1, 0.5, 0.1, 4, 4.0)
EPOCH = EpochRecord(1, 1.0, 0.5, None, None, None)
RUN = RunRecord("run", "completed", {}, Batch(1, 1, 1, 1))


class Writes(Listener):
    def __init__(self, name: str, log: list[tuple[str, object]]) -> None:
        self.name, self.log = name, log

    def on_run_start(self, record: RunRecord) -> None:
        self.log.append((self.name, record))

    def on_step(self, step: StepRecord) -> None:
        self.log.append((self.name, step))

    def on_epoch(self, epoch: EpochRecord) -> None:
        self.log.append((self.name, epoch))

    def on_checkpoint(self, path: str, step: int) -> None:
        self.log.append((self.name, (path, step)))

    def on_run_end(self, record: RunRecord) -> None:
        self.log.append((self.name, record))


class Fails(Listener):
    def __init__(self) -> None:
        self.calls = 0

    def on_step(self, step: StepRecord) -> None:
        self.calls += 1
        raise ValueError("broken gauge")

    def on_run_end(self, record: RunRecord) -> None:
        self.calls += 1
        raise ValueError("broken end")


class FailsQuietly(Fails):
    must_not_break_training = True


def tell_all(events: Events) -> None:
    events.on_run_start(RUN)
    events.on_step(STEP)
    events.on_epoch(EPOCH)
    events.on_checkpoint("checkpoints/1", 1)
    events.on_run_end(RUN)


def test_every_listener_hears_every_event_in_order() -> None:
    log: list[tuple[str, object]] = []
    tell_all(Events([Writes("a", log), Listener(), Writes("b", log)]))
    expected = [RUN, STEP, EPOCH, ("checkpoints/1", 1), RUN]
    assert log == [(name, event) for event in expected for name in ("a", "b")]


def test_nobody_listening_is_fine() -> None:
    events = Events()
    tell_all(events)
    assert events.notes == []


def test_an_error_of_a_callback_reaches_the_loop() -> None:
    log: list[tuple[str, object]] = []
    events = Events([Fails(), Writes("after", log)])
    with pytest.raises(ValueError, match="broken gauge"):
        events.on_step(STEP)
    assert log == []


def test_a_watcher_that_fails_is_dropped_with_one_note() -> None:
    log: list[tuple[str, object]] = []
    watcher = FailsQuietly()
    events = Events([watcher, Writes("after", log)])
    events.on_step(STEP)
    events.on_step(STEP)
    events.on_run_end(RUN)
    assert watcher.calls == 1
    assert events.notes == ["FailsQuietly was dropped: ValueError: broken gauge"]
    assert log == [("after", STEP), ("after", STEP), ("after", RUN)]


def test_all_hear_the_end_before_its_error_is_raised() -> None:
    log: list[tuple[str, object]] = []
    with pytest.raises(ValueError, match="broken end"):
        Events([Fails(), Writes("after", log)]).on_run_end(RUN)
    assert log == [("after", RUN)]


def test_ctrl_c_passes_through_a_watcher() -> None:
    class Interrupted(Listener):
        must_not_break_training = True

        def on_step(self, step: StepRecord) -> None:
            raise KeyboardInterrupt

    events = Events([Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        events.on_step(STEP)
    assert len(events.listeners) == 1


class OnlySteps:
    """No base class, and one method."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def on_step(self, step: StepRecord) -> None:
        self.steps.append(step)


def test_a_listener_needs_only_the_methods_that_it_wants() -> None:
    listener: Any = OnlySteps()
    tell_all(Events([listener]))
    assert listener.steps == [STEP]


def test_those_who_act_hear_of_a_step_apart() -> None:
    log: list[tuple[str, object]] = []
    acts, watches = Writes("acts", log), Writes("watches", log)
    events = Events([acts, watches], acting=[acts])
    events.on_own_step(STEP)
    events.on_step(STEP)
    assert log == [("acts", STEP), ("watches", STEP)]
