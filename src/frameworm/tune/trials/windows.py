"""Windows of live runs: warm-up until they are meaningful, single runs, and two runs in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from frameworm.config.schema import Config
from frameworm.guard.gain import LEAST_PAIRS, Side, Window, speedup_of
from frameworm.guard.proof import MINIMUM_GAIN
from frameworm.tune.trials.live import Live, Stand
from frameworm.tune.trials.outcomes import TrialResult
from frameworm.tune.trials.warmth import Warmth


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure.

    Attributes:
        window_s: Length of a window; at least two steps.
        windows: Windows of a trial.
        pairs: Pairs of windows of a proof.
        more_pairs: Further pairs, once, if the first ones leave a gain open.
        warm_s: Time limit for warming up, until it gets no faster and single steps look warm; not counted.
        warm_windows: Windows allowed for getting no faster even if they exceed that, as compiling does.
        learn_s: Target duration of the training along which states are compared, with the config before the change.
        learn_steps: Fewest and most steps of it.
        states: States at which two sides are compared.
        draws: Steps from one state, to compare random draws.
        limit_s: Most seconds for a trial; twice that for a proof.
    """

    window_s: float = 0.3
    windows: int = 5
    pairs: int = 10
    more_pairs: int = 15
    warm_s: float = 12.0
    warm_windows: int = 8
    learn_s: float = 2.0
    learn_steps: tuple[int, int] = (16, 48)
    states: int = 8
    draws: int = 24
    limit_s: float = 300.0


# Warming up takes at most this fraction of the time left, and a window of it at most this long; a window that takes
# this multiple of what its steps took before has hit something else, such as compilation.
_MOST_TO_WARM = 0.25
_LONGEST_S = 2.0
_EXPECTED = 2.0
# If steps of both sides take about as long, they get the same steps, and so the same samples, in each pair of windows;
# the side that needed fewer steps to warm up catches up, if that takes at most this fraction of the warm-up limit.
_ABOUT_AS_LONG = 2.0
_MOST_TO_CATCH_UP = 0.5
# Time that the first trial leaves to later ones for warming up, and the longest that one waits to reach its steps.
_ROOM_S = 0.5
_LONGEST_ROOM_S = 3.0
# If a pair of windows takes longer than this, the result is also checked after this many pairs: two equal sides are
# fully separated by then in only one of C(12, 6) = 924 cases.
_LONG_PAIR_S = 1.0
_FEW_PAIRS = 6

# Windows with more disturbance than this say little about a trial. Wait this long before another, doubling each time.
DISTURBED = 0.1
_FIRST_REST_S = 0.25

Sides = tuple[tuple[Live, Config], tuple[Live, Config]]


class Size(NamedTuple):
    """Untimed and timed steps of a window."""

    lead_in: int
    steps: int


def warm_up(live: Live, effort: Effort, deadline: float, least_steps: int = 0) -> tuple[float, Stand]:
    """Run until it gets no faster and its steps look warm; returns seconds per step, and the last measurements.

    Args:
        live: The run.
        effort: How much to measure.
        deadline: Time of `time.monotonic`.
        least_steps: It cannot be warm before this many steps.
    """
    warmth, window_s = Warmth(), effort.window_s
    until: float | None = None
    steps, step_s, number = 2, math.inf, 0
    while True:
        stand = live.go(0, steps, watched=True)
        assert stand.seconds is not None
        now = time.monotonic()
        if until is None:
            until = now + min(effort.warm_s, _MOST_TO_WARM * (deadline - now))
        # Time beyond all expectation, such as compiling, is not counted.
        until += max(0.0, stand.seconds - _EXPECTED * steps * step_s)
        step_s = stand.seconds / steps
        state = warmth.look(stand.seconds, stand.notes, stand.ahead_s)
        if stand.done - steps < least_steps and now < deadline:
            steps, number = max(steps, least_steps - stand.done), number + 1
            continue
        if state == "warm" or (now >= until and (state == "cold" or number >= effort.warm_windows)):
            return step_s, stand
        if state == "cold":
            window_s = max(effort.window_s, min(2 * window_s, until - now, _LONGEST_S))
        steps, number = _steps(step_s, window_s), number + 1


def window_of(step_s: float, effort: Effort, config: Config) -> Size:
    """The window of a run with this step time."""
    # A step as long as a window is a window by itself.
    steps = 1 if step_s >= effort.window_s else _steps(step_s, effort.window_s)
    workers = config.data.num_workers if isinstance(config.data.num_workers, int) else 0
    # Batches prefetched in the meantime are used up before the clock starts.
    return Size(max(1, steps // 10, min(workers * config.data.prefetch_factor, steps)), steps)


class Steps(NamedTuple):
    """The first step of a trial's windows, and the size of them all."""

    first: int
    size: Size


def go_beside(live: Live, done: int, step_s: float, size: Size, beside: TrialResult | None) -> Steps:
    """Run on to the steps that a trial measures: those of the other trial, if steps take about as long.

    Steps differ in their content, above all if batches differ in length. If there is no other trial, or this run has
    passed its steps, some steps are left for later trials to warm up in.

    Args:
        live: A run that has warmed up.
        done: Its steps so far.
        step_s: Their duration.
        size: Its preferred window.
        beside: The other trial; None: there is none.
    """
    first = done + math.ceil(_ROOM_S / step_s)
    if beside is not None and beside.steps is not None:
        theirs, other = beside.steps[0], Size(*beside.steps[1:])
        alike = other.steps <= _ABOUT_AS_LONG * size.steps and size.steps <= _ABOUT_AS_LONG * other.steps
        if alike and theirs >= done and (theirs - done) * step_s <= _LONGEST_ROOM_S:
            first, size = theirs, other
    if first > done:
        live.go(0, first - done)
    return Steps(first, size)


def measure(live: Live, lead_in: int, steps: int) -> float:
    """Seconds per sample in one window."""
    return _sample_s(live.go(lead_in, steps))


class CalmWindow(NamedTuple):
    """One window, and how it was obtained.

    Attributes:
        sample_s: Seconds per sample.
        disturbed: Fraction of it lost to other work on the machine.
        repeated: Whether it is not the first that was measured.
    """

    sample_s: float
    disturbed: float
    repeated: bool


def measure_calm(live: Live, size: Size, last_call: float) -> CalmWindow:
    """Measure one window, repeated after a pause if other work used the cores; the least disturbed one counts.

    A trial is compared with one that ran at another time, when there may have been no disturbance.

    Args:
        live: A run that has warmed up.
        size: Size of a window.
        last_call: Time of `time.monotonic` after which nothing is repeated.
    """
    stand = live.go(*size)
    rest_s, repeated = _FIRST_REST_S, False
    while stand.disturbed > DISTURBED and time.monotonic() + rest_s < last_call:
        time.sleep(rest_s)
        rest_s, repeated = 2 * rest_s, True
        stand = min(stand, live.go(*size), key=lambda one: one.disturbed)
    return CalmWindow(_sample_s(stand), stand.disturbed, repeated)


def _sample_s(stand: Stand) -> float:
    assert stand.seconds is not None
    return stand.seconds / max(1, stand.samples)


def take_turns(
    sides: Sides,
    effort: Effort,
    deadline: float,
    learning_s: Callable[[float, float], float],
    least_steps: int = 0,
) -> tuple[list[Window], float]:
    """Windows of two paused runs, A B B A A B ..., and the slower one's seconds per step.

    Args:
        sides: The run before a change and its config, and the one after it.
        effort: How much to measure.
        deadline: Time of `time.monotonic`.
        learning_s: Returns the time to reserve at the end of the last window, given the seconds per step of both.
        least_steps: Neither can be warm before this many steps.
    """
    (before, baseline), (after, candidate) = sides
    before_s, before_stand = warm_up(before, effort, deadline, least_steps)
    after_s, after_stand = warm_up(after, effort, deadline, least_steps)
    sizes = [window_of(before_s, effort, baseline), window_of(after_s, effort, candidate)]
    if max(before_s, after_s) <= _ABOUT_AS_LONG * min(before_s, after_s):
        sizes = [Size(max(size.lead_in for size in sizes), max(size.steps for size in sizes))] * 2
        ahead = before_stand.done - after_stand.done
        if ahead and abs(ahead) * max(before_s, after_s) <= _MOST_TO_CATCH_UP * effort.warm_s:
            (after if ahead > 0 else before).go(0, abs(ahead))
    turns: list[tuple[Side, Live, Size]] = [("before", before, sizes[0]), ("after", after, sizes[1])]
    # Two tests at a one-sided level of 2.5% each: a change without effect passes in at most 5% of cases.
    last_call = deadline - learning_s(before_s, after_s)
    windows: list[Window] = []
    pair_s = sum((size.lead_in + size.steps) * step_s for size, step_s in zip(sizes, (before_s, after_s)))
    while wants_more(windows, effort, long_pairs=pair_s > _LONG_PAIR_S):
        if len(windows) >= 2 * LEAST_PAIRS and time.monotonic() > last_call:
            break
        for side, live, size in turns:
            windows.append(Window(side, measure(live, *size)))
        turns.reverse()
    return windows, max(before_s, after_s)


def wants_more(windows: Sequence[Window], effort: Effort, *, long_pairs: bool) -> bool:
    """Whether another pair is needed; results are tested twice, or three times if pairs are long."""
    pairs = len(windows) // 2
    if long_pairs and pairs == _FEW_PAIRS and _lie_apart(windows) and not _is_open(windows):
        return False
    if pairs == effort.pairs:
        return _is_open(windows)
    return pairs < effort.pairs + effort.more_pairs


def _steps(step_s: float, window_s: float) -> int:
    return max(2, math.ceil(window_s / max(step_s, 1e-6)))


def _lie_apart(windows: Sequence[Window]) -> bool:
    """Whether all windows of one side are faster than all of the other."""
    before, after = ([one.seconds_per_sample for one in windows if one.side == side] for side in ("before", "after"))
    return max(after) < min(before) or max(before) < min(after)


def _is_open(windows: Sequence[Window]) -> bool:
    """Whether there may be a gain that is hidden by noise."""
    speedup = speedup_of(windows)
    return speedup is not None and speedup.low <= 1 < speedup.value - MINIMUM_GAIN
