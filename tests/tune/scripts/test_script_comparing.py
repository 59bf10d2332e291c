"""Which runs a comparison needs, and when they start: with processes that compute nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frameworm.attach.trial.switches import Switches
from frameworm.numerics.state import write
from frameworm.tune.scripts.comparing import CANDIDATE, LEADER, Comparing, evidence_of
from frameworm.tune.scripts.process import ScriptEndedError, ScriptError

COMPILED, HALF = Switches(compile=True), Switches(autocast="bf16")


class Process:
    def __init__(self, trials: Trials) -> None:
        self._trials = trials

    def __enter__(self) -> Process:
        self._trials.alive += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._trials.alive -= 1

    def hear(self, event: str) -> None:
        assert event == "compared"
        if self._trials.ends_after:
            raise ScriptEndedError("it ended", self._trials.ends_after)


class Trials:
    """In place of `ScriptTrials`."""

    def __init__(self, folder: Path, cores: int = 16) -> None:
        self.folders, self.total, self.cores = [folder], None, cores
        self.alive = self.ends_after = 0
        self.options, self.draws = "", False
        self.started: list[str] = []
        self.steps: list[Any] = []

    def start(self, switches: Switches, name: str, role: str, steps: Any, *_: Any) -> Process:
        assert (role == "lead") == (name == "leader")
        self.started.append(name)
        self.steps.append(steps)
        return Process(self)

    def fit_together(self, count: int) -> bool:
        return True

    def can_overlap(self, count: int) -> bool:
        return count <= self.cores

    def unit(self, switches: Switches) -> float:
        return 1e-7

    def options_of(self, switches: Switches) -> str:
        return self.options

    def draws_differently(self, switches: Switches) -> bool:
        return self.draws and switches.compiles


@pytest.fixture
def trials(tmp_path: Path) -> Trials:
    return Trials(tmp_path)


def test_what_the_script_computes_is_noted_once(trials: Trials) -> None:
    comparing: Any = Comparing(trials)  # type: ignore[arg-type]
    assert not comparing.has_led
    comparing.compare(COMPILED)
    assert comparing.has_led
    assert trials.started == ["leader", "noise-1", "noise-2", "candidate"]
    comparing.compare(HALF)
    assert trials.started[4:] == ["expected", "candidate"]
    comparing.compare(HALF)
    assert trials.started[6:] == []
    comparing.compare(HALF, source="pass")
    trials.options = "bf16=True"
    comparing.compare(HALF, source="pass")
    assert trials.started[6:] == ["candidate", "expected", "candidate"], "other options are other runs"
    assert trials.alive == 0


def test_draws_are_noted_where_others_may_be_drawn(trials: Trials) -> None:
    trials.draws = True
    comparing: Any = Comparing(trials)  # type: ignore[arg-type]
    comparing.compare(HALF)
    comparing.compare(COMPILED, draws=False)
    assert not [name for name in trials.started if "drawn" in name]
    comparing.compare(COMPILED)
    assert trials.started[-2:] == ["before-drawn", "drawn"]
    assert trials.steps[-1] == [2], "from the first state"
    comparing.compare(Switches(compile=True, fused_optimizer=True))
    assert trials.started[-2:] == ["candidate", "drawn"], "of the script itself they are known"


@pytest.mark.parametrize("likely", [True, False])
def test_runs_start_beside_others_that_start(trials: Trials, likely: bool) -> None:
    comparing: Any = Comparing(trials)  # type: ignore[arg-type]
    with comparing.beside(2, COMPILED, likely=likely) as finish:
        assert trials.alive == 3 + likely
        finish()
        assert trials.alive == 0, "nothing else runs while something is timed"
        finish()
    comparing.compare(COMPILED)
    assert trials.started == ["leader", "noise-1", "noise-2", "candidate"]


def test_runs_that_nobody_waited_for_are_made_again(trials: Trials) -> None:
    comparing: Any = Comparing(trials)  # type: ignore[arg-type]
    with comparing.beside(2, COMPILED, likely=True):
        pass
    assert (trials.alive, comparing.has_led) == (0, False)
    comparing.compare(COMPILED)
    assert len(trials.started) == 8


def test_a_small_machine_makes_them_later(tmp_path: Path) -> None:
    trials = Trials(tmp_path, cores=2)
    comparing: Any = Comparing(trials)  # type: ignore[arg-type]
    with comparing.beside(2, COMPILED, likely=True) as finish:
        finish()
    assert trials.started == []


def test_a_script_that_ends_is_compared_up_to_there(trials: Trials) -> None:
    comparing: Any = Comparing(trials)  # type: ignore[arg-type]
    trials.ends_after = 10
    comparing.compare(COMPILED)
    assert trials.total == 10
    comparing.compare(HALF)
    assert trials.steps[-1] == [2, 3, 4, 6, 8]


@pytest.mark.parametrize("who", ["noise", CANDIDATE])
def test_other_samples_are_the_script_s_own_or_the_change_s(tmp_path: Path, who: str) -> None:
    for name in (LEADER, "noise", CANDIDATE):
        content = {"outputs": {}, "counts": {}, "samples": 2 if name == who else 1, "loss": 0.0}
        write(tmp_path / f"{name}-2.pt", {**content, "settings": {}, "updates": {}})
    if who == "noise":
        with pytest.raises(ScriptError, match="takes other samples each time it runs; seed"):
            evidence_of([tmp_path], [2], ["noise"], CANDIDATE, 1e-7)
    else:
        evidence = evidence_of([tmp_path], [2], ["noise"], CANDIDATE, 1e-7)
        assert evidence.baseline.steps[0].samples != evidence.candidate.steps[0].samples
