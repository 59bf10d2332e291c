"""Runs a script several times from the same states, and compares the results as one agreement that can be judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from frameworm.attach.trial.job import Role
from frameworm.attach.trial.switches import Switches
from frameworm.guard.agreement import Agreement, Draws, StateErrors
from frameworm.guard.proof import Evidence, Learning, StepEvidence
from frameworm.numerics.comparison import errors_of, noise_of
from frameworm.numerics.state import read
from frameworm.tune.scripts.process import ScriptEndedError, ScriptError
from frameworm.tune.scripts.trials import ScriptTrials

LEADER, CANDIDATE = "leader", "candidate"
COMPARED_STEPS = (2, 3, 4, 6, 8, 12, 16, 24)
NOT_REPEATABLE = "the script takes other samples each time it runs; seed every generator that it draws from"
_NOISE = ("noise-1", "noise-2")
_EXPECTED = "expected"
_DRAWN, _DRAWN_BEFORE, _DRAWS = "drawn", "before-drawn", 32


class _Run(NamedTuple):
    name: str
    switches: Switches
    perturbed: int = 0
    source: str | None = None
    options: str = ""
    draws: int = 0


class Comparing:
    """Compares candidates; the results of the unchanged script are recorded once for all of them.

    Args:
        trials: Starts the runs.
    """

    def __init__(self, trials: ScriptTrials) -> None:
        self._trials = trials
        self._noted: dict[str, _Run] = {}

    @property
    def has_led(self) -> bool:
        """Whether the results of the unchanged script are recorded."""
        return LEADER in self._noted

    def compare(
        self,
        candidate: Switches,
        wanted: Sequence[int] = COMPARED_STEPS,
        source: str | None = None,
        *,
        draws: bool = True,
    ) -> Evidence:
        """Compare the candidate, or another source, with the unchanged script, starting from the same states.

        Args:
            candidate: The switches to set.
            wanted: The steps to compare.
            source: Source that it runs in place of the script.
            draws: Also compare with random draws as in training, if the candidate may draw differently.
        """
        draws = draws and self._trials.draws_differently(candidate)
        missing = self._missing(candidate, source, draws)
        for together in [missing] if self._trials.fit_together(len(missing)) else [[run] for run in missing]:
            with self._begun(together, wanted) as finish:
                finish()
        expected = LEADER if candidate.autocast == "off" else _EXPECTED
        steps = self._steps(wanted)
        evidence = evidence_of(self._trials.folders, steps, _NOISE, CANDIDATE, self._trials.unit(candidate), expected)
        if evidence.agreement is None or not draws:
            return evidence
        return replace(evidence, agreement=replace(evidence.agreement, draws=self._draws()))

    def _draws(self) -> Draws | None:
        before, after = (_read(self._trials.folders[0] / f"{name}-draws.pt") for name in (_DRAWN_BEFORE, _DRAWN))
        if not (before and before["draws"] and after and after["draws"]):
            return None
        sides = [(tuple(side["draws"]["figures"]), side["draws"]["repeated"]) for side in (before, after)]
        return Draws(_DRAWS, sides[0][0], sides[1][0], sides[1][1], sides[0][1])

    @contextmanager
    def beside(
        self, others: int, candidate: Switches, source: str | None = None, *, likely: bool
    ) -> Iterator[Callable[[], None]]:
        """Start the runs of a coming comparison while other processes start, if the machine has room for all of them.

        Args:
            others: Number of other processes.
            candidate: What will be compared.
            source: Source that it runs in place of the script.
            likely: Whether the comparison is likely; if not, only the runs that other candidates also need are started.

        Yields:
            A function that waits until all of them have recorded their results.
        """
        missing = self._missing(candidate, source, self._trials.draws_differently(candidate))
        runs = [run for run in missing if likely or run.name not in (CANDIDATE, _DRAWN)]
        if runs and self._trials.can_overlap(others + len(runs)):
            with self._begun(runs, COMPARED_STEPS) as finish:
                yield finish
        else:
            yield lambda: None

    def _missing(self, candidate: Switches, source: str | None, draws: bool) -> list[_Run]:
        """The runs that a comparison needs and that are still missing."""
        runs = [_Run(LEADER, Switches()), *(_Run(name, Switches(), place) for place, name in enumerate(_NOISE, 1))]
        same = Switches(autocast=candidate.autocast)  # the candidate's precision, otherwise unchanged
        options, own = self._trials.options_of(same), self._trials.options_of(candidate)
        if candidate.autocast != "off":
            runs.append(_Run(_EXPECTED, same, options=options))
        runs.append(_Run(CANDIDATE, candidate, source=source, options=own))
        if draws:
            runs.append(_Run(_DRAWN_BEFORE, same, options=options, draws=_DRAWS))
            runs.append(_Run(_DRAWN, candidate, source=source, options=own, draws=_DRAWS))
        return [run for run in runs if self._noted.get(run.name) != run]

    def _steps(self, wanted: Sequence[int]) -> list[int]:
        total = self._trials.total
        return [step for step in wanted if total is None or step < total]

    @contextmanager
    def _begun(self, runs: Sequence[_Run], wanted: Sequence[int]) -> Iterator[Callable[[], None]]:
        """Start runs that record the results of their steps, side by side; followers wait for the leader's states."""
        steps = self._steps(wanted)
        with ExitStack() as all_of_them:
            processes = []
            for run in runs:
                self._noted.pop(run.name, None)
                for folder in self._trials.folders:
                    for path in folder.glob(f"{run.name}-*.pt"):
                        path.unlink()
                role: Role = "lead" if run.name == LEADER else "follow"
                at = steps[:1] if run.draws else steps
                started = self._trials.start(run.switches, run.name, role, at, run.perturbed, run.source, run.draws)
                processes.append((run, all_of_them.enter_context(started)))

            def finish() -> None:
                for run, process in processes:
                    try:
                        process.hear("compared")
                    except ScriptEndedError as ended:
                        self._trials.total = ended.steps  # what it has recorded so far counts
                    self._noted[run.name] = run
                processes.clear()
                all_of_them.close()

            yield finish


def evidence_of(
    folders: Sequence[Path], steps: Sequence[int], moved: Sequence[str], name: str, unit: float, expected: str = LEADER
) -> Evidence:
    """Compare a run with the one that led.

    Args:
        folders: Where the runs wrote, one folder per process.
        steps: Steps to compare.
        moved: Names of the runs that show the noise: perturbed, or just repeated.
        name: Name of the run to compare.
        unit: Rounding unit of the coarser precision.
        expected: Name of a run in the same precision as the compared one, otherwise unchanged.

    Raises:
        ScriptError: Two runs of the unchanged script did not take the same samples.
    """
    states: list[StateErrors] = []
    differences: list[str] = []
    updates: dict[str, float] = {}
    before: list[StepEvidence] = []
    after: list[StepEvidence] = []
    for folder, step in product(folders, steps):
        leader, other, plain = (_noted(folder, who, step) for who in (LEADER, name, expected))
        noise_runs = [_noted(folder, who, step) for who in moved]
        if leader is None or other is None or plain is None or None in noise_runs:
            continue
        if any(item is not None and item["samples"] != leader["samples"] for item in noise_runs):
            raise ScriptError(NOT_REPEATABLE)
        own = leader["outputs"]
        noise = noise_of(own, [item["outputs"] for item in noise_runs if item is not None])
        states.append(
            StateErrors(step, errors_of(own, own, plain["outputs"], other["outputs"], noise, leader["counts"]))
        )
        differences += _differences(step, leader, other)
        for key, times in other["updates"].items():
            updates[key] = max(times, updates.get(key, 0.0))
        before.append(StepEvidence(leader["loss"] or 0.0, leader["samples"]))
        after.append(StepEvidence(other["loss"] or 0.0, other["samples"]))
    agreement = Agreement(states, differences, updates, "baseline", unit, changes_precision=expected != LEADER)
    return Evidence(Learning(before), Learning(after), agreement)


def _noted(folder: Path, name: str, step: int) -> dict[str, Any] | None:
    return _read(folder / f"{name}-{step}.pt")


def _read(path: Path) -> dict[str, Any] | None:
    return read(path) if path.exists() else None


def _differences(step: int, leader: dict[str, Any], other: dict[str, Any]) -> list[str]:
    found = []
    missing = sorted(set(leader["outputs"]) - set(other["outputs"]))
    if missing:
        found.append(f"step {step} gave no {missing[0]}")
    if leader["settings"] != other["settings"]:
        names = [name for name, value in leader["settings"].items() if other["settings"].get(name) != value]
        found.append(f"the optimizer's settings of {names[0] if names else 'a parameter'} differ in step {step}")
    return found
