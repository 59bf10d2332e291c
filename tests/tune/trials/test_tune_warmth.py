"""When a run counts as warm: streams of steps whose times are made up, with a clock of their own."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Hashable
from copy import copy
from statistics import median
from typing import cast

import pytest

from frameworm.config.load import load_config_from_mapping
from frameworm.tune.trials import windows
from frameworm.tune.trials.live import Live, Stand
from frameworm.tune.trials.outcomes import TrialResult
from frameworm.tune.trials.warmth import StepNote, Warmth
from frameworm.tune.trials.windows import Effort, go_beside, take_turns, warm_up

# The shapes of the next step and its seconds, given how often each shape has come.
Stream = Callable[[Counter[Hashable]], tuple[Hashable, float]]


class FakeLive:
    """Steps of a stream, on a clock that only they move."""

    def __init__(self, stream: Stream) -> None:
        self.now = 0.0
        self.windows = 0
        self.last_s = 0.0
        self.done = 0
        self._stream = stream
        self._visits: Counter[Hashable] = Counter()

    def monotonic(self) -> float:
        return self.now

    def go(self, lead_in: int, steps: int, *, watched: bool = False) -> Stand:
        notes = []
        for _ in range(lead_in + steps):
            shapes, seconds = self._stream(self._visits)
            notes.append(StepNote(seconds, self._visits[shapes]))
            self._visits[shapes] += 1
            self.now += seconds
        self.done += lead_in + steps
        self.windows += 1
        seconds = sum(note.host_s for note in notes[lead_in:])
        self.last_s = seconds / steps
        return Stand(seconds, steps, self.done, self.now, 0.0, tuple(notes[lead_in:]))


def warmed(stream: Stream, monkeypatch: pytest.MonkeyPatch, deadline: float = 300.0) -> tuple[FakeLive, float]:
    """A run that was warmed up, and its seconds per step in windows after that."""
    live = FakeLive(stream)
    monkeypatch.setattr(windows, "time", live)
    live.go(0, 2)
    step_s, _ = warm_up(cast(Live, live), Effort(), deadline)
    warm = copy(live)
    steps = max(2, round(0.3 / step_s))
    return warm, median((live.go(0, steps).seconds or 0.0) / steps for _ in range(5))


def even(step_s: float, seed: int = 0) -> Stream:
    draw = random.Random(seed)
    return lambda visits: ("one", step_s * draw.uniform(0.95, 1.05) * (3 if visits.total() < 3 else 1))


def cold_widths(widths: int, usual_s: float, first_s: float, seed: int = 0, *, second_s: float = 0.0) -> Stream:
    draw = random.Random(seed)

    def step(visits: Counter[Hashable]) -> tuple[Hashable, float]:
        width = draw.randrange(widths)
        return width, usual_s + {0: first_s, 1: second_s}.get(visits[width], 0.0)

    return step


@pytest.mark.parametrize("step_s", [0.001, 0.05, 1.0])
def test_a_steady_run_is_warm_after_a_window_or_two(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    live, found_s = warmed(even(step_s), monkeypatch)
    assert live.windows <= 4
    assert live.now < 1.2 or live.done <= 8
    assert found_s == pytest.approx(step_s, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_steps_of_new_widths_are_waited_for_although_all_windows_are_equally_slow(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, found_s = warmed(cold_widths(40, 0.0086, 0.1, seed), monkeypatch)
    assert found_s == pytest.approx(0.0086, rel=0.05)
    assert live.now < 14
    assert live.windows < 30


def test_so_are_those_of_widths_that_are_prepared_when_they_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found_s = warmed(cold_widths(30, 0.0007, 0.05, second_s=0.2), monkeypatch)
    assert found_s == pytest.approx(0.0007, rel=0.05)


def test_warming_up_takes_a_part_of_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    live, _ = warmed(cold_widths(1000, 0.01, 0.1), monkeypatch, deadline=16.0)
    assert live.now < 6


def test_a_recompilation_after_even_steps_is_not_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(visits: Counter[Hashable]) -> tuple[Hashable, float]:
        return "one", 15.0 if visits.total() == 8 else 0.05

    live, found_s = warmed(step, monkeypatch)
    assert found_s == pytest.approx(0.05)
    assert live.now > 15
    assert live.last_s == pytest.approx(0.05), "the window with the long step was not the last"


def test_a_step_that_is_recorded_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks train some steps eagerly before they record: even steps, and not the pace of the run."""

    def step(visits: Counter[Hashable]) -> tuple[Hashable, float]:
        return "one", 0.9 if visits.total() < 14 else 0.1

    eager, captured = FakeLive(step), FakeLive(step)
    for live, least in ((eager, 0), (captured, 14)):
        monkeypatch.setattr(windows, "time", live)
        step_s, stand = warm_up(cast(Live, live), Effort(), 300.0, least)
        assert step_s == pytest.approx(0.1 if least else 0.9)
        assert stand.done >= least


def test_a_run_that_is_uneven_by_nature_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)

    def step(visits: Counter[Hashable]) -> tuple[Hashable, float]:
        width = draw.randint(1, 128)
        return width, 0.002 + 0.0002 * width

    live, _ = warmed(step, monkeypatch)
    assert live.now < 4.5


@pytest.mark.parametrize(("step_s", "most_s"), [(0.01, 1.0), (1.0, 8.0)])
def test_shapes_that_never_come_back_are_not_waited_for(
    step_s: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, _ = warmed(lambda visits: (visits.total(), step_s), monkeypatch)
    assert live.now < most_s


def test_a_host_that_runs_ahead_of_its_device_is_no_sign_of_cold_steps() -> None:
    def window(ahead_s: float) -> list[str]:
        warmth = Warmth()
        notes = [StepNote(host_s, 5) for host_s in (0.005, 0.005, 0.005, 0.1, 0.1, 0.1)]
        return [warmth.look(0.6, notes, ahead_s) for _ in range(2)]

    assert window(0.3) == ["faster", "warm"]
    assert window(0.0) == ["faster", "cold"]


def of_many_widths(speed: float, *, cold_steps: int = 0) -> Stream:
    """Batches of widths from 1 to 8, the same for all who ask; the first so many steps are slower."""
    draw = random.Random(7)

    def step(visits: Counter[Hashable]) -> tuple[Hashable, float]:
        width = draw.randint(1, 8)
        return width, 0.01 * width / speed * (5 if visits.total() < cold_steps else 1)

    return step


def test_sides_of_about_the_same_speed_are_compared_on_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = FakeLive(of_many_widths(1.0)), FakeLive(of_many_widths(1.04, cold_steps=40))
    monkeypatch.setattr(windows, "time", before)
    config = load_config_from_mapping({}, environ={})
    sides = tuple((cast(Live, live), config) for live in (before, after))
    found, _ = take_turns(cast("windows.Sides", sides), Effort(), 300.0, lambda one, other: 1.0)
    seconds = {side: [item[1] for item in found if item[0] == side] for side in ("before", "after")}
    assert len(seconds["before"]) == len(seconds["after"]) >= 10
    for slow, fast in zip(seconds["before"], seconds["after"], strict=True):
        assert slow / fast == pytest.approx(1.04)
    assert max(seconds["before"]) > 1.1 * min(seconds["before"]), "alike by themselves, so nothing was shown"


def test_sides_of_unlike_speed_have_windows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = FakeLive(even(0.1)), FakeLive(even(0.001))
    monkeypatch.setattr(windows, "time", before)
    config = load_config_from_mapping({}, environ={})
    sides = tuple((cast(Live, live), config) for live in (before, after))
    take_turns(cast("windows.Sides", sides), Effort(), 300.0, lambda one, other: 1.0)
    assert before.now < 60.0
    assert after.done > 10 * before.done


@pytest.mark.parametrize(("before_s", "after_s", "pairs"), [(0.6, 0.5, 6), (0.5, 0.6, 6), (0.02, 0.015, 10)])
def test_long_steps_that_lie_apart_need_few_pairs(
    before_s: float, after_s: float, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = FakeLive(even(before_s)), FakeLive(even(after_s))
    monkeypatch.setattr(windows, "time", before)
    config = load_config_from_mapping({}, environ={})
    sides = tuple((cast(Live, live), config) for live in (before, after))
    found, _ = take_turns(cast("windows.Sides", sides), Effort(), 300.0, lambda one, other: 1.0)
    assert len(found) == 2 * pairs


def test_long_steps_that_do_not_lie_apart_get_all_their_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)

    def step(visits: Counter[Hashable]) -> tuple[Hashable, float]:
        return "one", draw.uniform(0.5, 0.6)

    before, after = FakeLive(step), FakeLive(step)
    monkeypatch.setattr(windows, "time", before)
    config = load_config_from_mapping({}, environ={})
    sides = tuple((cast(Live, live), config) for live in (before, after))
    found, _ = take_turns(cast("windows.Sides", sides), Effort(), 300.0, lambda one, other: 1.0)
    assert len(found) >= 2 * Effort().pairs


@pytest.mark.parametrize(("done", "steps", "same"), [(30, 10, True), (50, 15, True), (61, 10, False), (30, 25, False)])
def test_a_trial_measures_the_steps_of_the_one_it_is_held_against(done: int, steps: int, same: bool) -> None:
    live = FakeLive(even(0.03))
    live.go(0, done)
    beside = TrialResult([1.0], steps=(60, 2, 10))
    found = go_beside(cast(Live, live), done, 0.03, windows.Size(1, steps), beside)
    assert live.done == found.first
    if same:
        assert found == (60, (2, 10))
    else:
        assert found.size == (1, steps)
        assert 0.5 <= (found.first - done) * 0.03 < 0.6, "others can warm up until then"


def test_the_same_steps_are_compared_window_by_window() -> None:
    # Windows hold batches of unlike length; the second trial is 5% faster in each.
    first = TrialResult([1.0, 2.0, 1.5, 1.2, 1.9], steps=(60, 2, 10))
    second = TrialResult([seconds / 1.05 for seconds in first.seconds_per_sample[:3]], steps=(60, 2, 10))
    assert second.times_as_fast_as(first) == pytest.approx(1.05)
    elsewhere = TrialResult(second.seconds_per_sample, steps=(70, 2, 10))
    assert elsewhere.times_as_fast_as(first) == pytest.approx(1.05)
    early = TrialResult(second.seconds_per_sample[:1], steps=(61, 2, 10))
    assert early.times_as_fast_as(first) > 1.5, "all there is to compare are medians"
    stored = TrialResult.from_json(json.loads(json.dumps(second.to_json())))
    assert stored.times_as_fast_as(first) == second.times_as_fast_as(first)
    assert stored.steps == second.steps


@pytest.mark.parametrize(("step_s", "state"), [(0.02, "cold"), (0.2, "warm")])
def test_short_steps_of_new_shapes_are_cold_however_busy_the_device_is(step_s: float, state: str) -> None:
    warmth = Warmth()
    notes = [StepNote(step_s, 0) for _ in range(4)]  # no shape has come back yet
    warmth.look(4 * step_s, notes, ahead_s=step_s)
    assert warmth.look(4 * step_s, notes, ahead_s=step_s) == state
