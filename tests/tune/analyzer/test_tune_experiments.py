"""The first look at a variant: a pause of the host is no reason to leave it out, a slow variant is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from frameworm.tune.analyzer.experiments import AS_IS, AUTOCAST, SAME_BATCH, Measured, run_rounds

PAUSE_S = 0.05


class Scripted:
    """A variant whose steps take what a script says, and the last of it from then on."""

    drop = 0

    def __init__(self, *steps_s: float) -> None:
        self.looks = 0
        self._script = list(steps_s)

    def run(self, bench: object, steps: int) -> list[Any]:
        self.looks += 1
        step_s = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        return [SimpleNamespace(step_s=step_s) for _ in range(steps)]


def run(**variants: Scripted) -> Measured:
    measured = Measured()
    bench = cast(Any, SimpleNamespace(agreed=lambda value: value))
    run_rounds(bench, cast(Any, variants), measured, budget_s=0.5)
    return measured


@pytest.mark.parametrize("pauses", [1, 2, 3])
def test_a_pause_at_the_first_look_leaves_nothing_out(pauses: int) -> None:
    slow = [PAUSE_S] * pauses
    measured = run(**{AS_IS: Scripted(0.001), SAME_BATCH: Scripted(0.001), AUTOCAST: Scripted(*slow, 0.002)})
    assert not measured.skipped
    assert all(set(times) == {AS_IS, SAME_BATCH, AUTOCAST} for times in measured.rounds)


def test_the_same_batch_is_never_left_out_as_others_are_compared_with_it() -> None:
    measured = run(**{AS_IS: Scripted(0.001), SAME_BATCH: Scripted(PAUSE_S, 0.001)})
    assert not measured.skipped
    assert measured.gain(AS_IS, SAME_BATCH) is not None


def test_what_is_many_times_slower_at_every_look_is_left_out() -> None:
    hopeless = Scripted(0.02)
    measured = run(**{AS_IS: Scripted(0.001), SAME_BATCH: Scripted(0.001), AUTOCAST: hopeless})
    assert measured.skipped == {AUTOCAST: "its step takes 20 times as long at the first look"}
    assert all(AUTOCAST not in times for times in measured.rounds)
    assert hopeless.looks == 4


def test_a_step_longer_than_any_pause_is_not_looked_at_again() -> None:
    hopeless = Scripted(2.0)
    measured = run(**{AS_IS: Scripted(0.1), SAME_BATCH: Scripted(0.1), AUTOCAST: hopeless})
    assert AUTOCAST in measured.skipped
    assert hopeless.looks == 1
