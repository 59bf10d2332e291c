"""Trials, proofs and quality checks of a search, each run only once: read from the journal if finished, else run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

from frameworm.config.schema import Config
from frameworm.errors import ConfigError
from frameworm.tune.knobs.base import Candidate
from frameworm.tune.knobs.context import Changes, Context, apply_changes
from frameworm.tune.search.journal import Journal
from frameworm.tune.trials.outcomes import (
    Budget,
    CheckLonger,
    Failure,
    ProofRequest,
    ProofResult,
    Prove,
    QualityCheckRequest,
    QualityCheckResult,
    RunTrial,
    TrialRequest,
    TrialResult,
    digest_of,
    rounding_unit,
    without_dropout,
)
from frameworm.tune.trials.quality_check import QualityChecker

log = logging.getLogger("frameworm")

# A trial during which the search died this often is assumed to have killed it.
_DEADLY = 2
# Once a change that requires compiling is accepted, all later trials compile too.
_LATELY = 3
NO_TIME = "of the budget are left for it"
# Both sides start, take turns, and have their learning compared.
_TRIALS_IN_PROOF = 3
# After only one trial the duration of a proof is a guess, which must not end a search while time is left.
_AT_LEAST = 0.5
# Fraction of the budget by which the last proof may exceed it: without a proof all findings would be lost.
_LAST_OVER = 0.15

Outcome = TypeVar("Outcome", TrialResult, ProofResult, QualityCheckResult)


class BudgetSpentError(Exception):
    """There is no time or trial left; never leaves the search."""


class Ledger:
    """Runs trials, proofs and quality checks, accounts for their time, and never runs one twice.

    Args:
        run_trial: Runs a trial. Any exception counts as a crash of that trial.
        prove: Runs a proof, likewise.
        budget: The budget of the whole search.
        journal: Stores the results.
        consent: Whether changes of numerics are allowed.
        check_longer: Runs a quality check, likewise; None: there are none.
        clock: Returns seconds.
    """

    def __init__(
        self,
        run_trial: RunTrial,
        prove: Prove,
        budget: Budget,
        journal: Journal,
        *,
        consent: bool = False,
        check_quality: CheckLonger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_trial = run_trial
        self._prove = prove
        self.budget = budget
        self._journal = journal
        self._consent = consent
        self._check_longer = check_quality
        self._clock = clock
        self.spent_s = 0.0
        self._walls: dict[str, list[float]] = {"trial": [], "proof": [], "check": []}
        self._fine_s: dict[str, float] = {}  # duration of complete trials, by name
        self._proofs: list[tuple[float, float]] = []  # of proofs with a result: duration, and that of the slower trial
        self._times_trials: list[float] = []  # duration as a multiple of both sides' trials together
        self._seen: dict[tuple[str, str], TrialResult | ProofResult | QualityCheckResult] = {}

    @property
    def made(self) -> int:
        """Trials, proofs and quality checks so far, including those of an earlier process."""
        return len(self._seen)

    @property
    def checks_quality(self) -> bool:
        """Whether quality checks can be made."""
        return self._check_longer is not None

    def usual_s(self, kind: str) -> float:
        """The usual recent duration of a trial or proof; the first proof is estimated as three trials."""
        if self._walls[kind]:
            return median(self._walls[kind][-_LATELY:])
        return _TRIALS_IN_PROOF * self.usual_s("trial") if kind == "proof" else 0.0

    def proof_s(self, trial: str | None) -> float:
        """Expected duration of the proof of a config with this trial: that of an earlier one plus its slower start."""
        wall_s = None if trial is None else self._fine_s.get(trial)
        if wall_s is None:
            return self.usual_s("proof")
        quickest_s = min(self._fine_s.values())
        known = self._proofs or [(_TRIALS_IN_PROOF * quickest_s, quickest_s)]
        return min(proof_s + max(0.0, wall_s - slower_s) for proof_s, slower_s in known)

    def trial(
        self,
        config: Config,
        label: str,
        keep_going: Callable[[Sequence[float]], bool],
        *,
        beside: tuple[Config, TrialResult] | None = None,
        reserve: int = 0,
    ) -> tuple[str, TrialResult]:
        """Run the trial of a config.

        Args:
            config: What to run.
            label: What is tried.
            keep_going: See `TrialRequest`.
            beside: The config and trial to compare with; this one should take about as long.
            reserve: Number of later proofs for which to reserve budget.

        Raises:
            BudgetSpentError: There is no budget for it.
        """
        name = digest_of(config)
        known = None if beside is None else beside[1]

        def make(timeout_s: float | None) -> TrialResult:
            return self._run_trial(TrialRequest(name, config, label, timeout_s, keep_going, known))

        needs_s = None if beside is None else self._fine_s.get(digest_of(beside[0]))
        return name, self._once("trial", name, label, make, TrialResult, reserve, needs_s)

    def proof(
        self,
        baseline: Config,
        candidate: Config,
        change: Candidate,
        context: Context,
        *,
        reserve: int = 0,
        last: bool = False,
    ) -> ProofResult:
        """Run the proof of a change; the context gives the machine. `last`: nothing else waits for the budget.

        Raises:
            BudgetSpentError: There is no budget for it.
        """
        name = digest_of(baseline, candidate)
        units = rounding_unit(context.resolve(baseline)), rounding_unit(context.resolve(candidate))
        also = {key: value for key, value in change.reference.items() if key not in change.changes}

        def make(timeout_s: float | None) -> ProofResult:
            request = ProofRequest(
                name,
                baseline,
                candidate,
                _learning(baseline, {**without_dropout(baseline), **change.reference}),
                _learning(candidate, {**without_dropout(candidate), **also}),
                _learning(baseline, change.reference),
                _learning(candidate, also),
                change.numerics_effect,
                units,
                self._consent,
                change.label,
                timeout_s,
                last,
                self.proof_s(digest_of(candidate)),
            )
            return self._prove(request)

        # The last proof may use what is left and a little more, unless that is far too little.
        usual_s = self.usual_s("proof")
        needs_s = usual_s / 2 if last else min(usual_s, self.proof_s(digest_of(candidate)))
        over_s = _LAST_OVER * (self.budget.time_s or 0.0) if last else 0.0
        is_known = ("proof", name) in self._seen
        result = self._once("proof", name, change.label, make, ProofResult, reserve, needs_s, over_s)
        if result.failure is None and not is_known:
            wall_s = self._walls["proof"][-1]
            sides_s = [self._fine_s[side] for side in map(digest_of, (baseline, candidate)) if side in self._fine_s]
            self._proofs.append((wall_s, max(sides_s, default=0.0)))
            if len(sides_s) == 2:
                self._times_trials.append(wall_s / max(sum(sides_s), 1e-9))
        return result

    def quality_check(
        self,
        baseline: Config,
        candidate: Config,
        steps: int,
        longer: QualityChecker,
        expected_s: float,
        label: str,
        *,
        reserve: int = 0,
    ) -> QualityCheckResult:
        """Run the quality check of a change; see `QualityCheckRequest`.

        Raises:
            BudgetSpentError: There is no budget for its expected duration.
        """
        name = digest_of(baseline, candidate)

        def make(timeout_s: float | None) -> QualityCheckResult:
            assert self._check_longer is not None
            request = QualityCheckRequest(
                name, baseline, candidate, steps, longer.looks, expected_s, label, timeout_s, longer.margin
            )
            return self._check_longer(request)

        return self._once("check", name, label, make, QualityCheckResult, reserve, expected_s)

    def has_room(self, seconds: float, reserve: int) -> bool:
        """Whether the budget has `seconds` left, after reserving time for some proofs."""
        if self.budget.trials is not None and self.made + 1 + reserve > self.budget.trials:
            return False
        return self.budget.time_s is None or self._beside(reserve, self.budget.time_s) >= seconds

    def no_time_to_start(self, setup_s: float) -> str | None:
        """Why a trial with such a long start is not worthwhile: it would be stopped before measuring anything."""
        if not setup_s or self.budget.time_s is None:
            return None
        left_s = (
            self._beside(self._sure_of(1), self.budget.time_s) - setup_s
        )  # its proof, or the final one, starts as slowly
        if left_s >= setup_s + self.usual_s("trial") / 2:
            return None
        return f"takes about {setup_s:.0f} s to start, and {max(left_s, 0.0):.0f} s {NO_TIME}"

    def _once(
        self,
        kind: str,
        name: str,
        label: str,
        make: Callable[[float | None], Outcome],
        outcome: type[Outcome],
        reserve: int,
        needs_s: float | None = None,
        over_s: float = 0.0,
    ) -> Outcome:
        seen = self._seen.get((kind, name))
        if seen is not None:
            assert isinstance(seen, outcome)
            return seen
        stored = self._journal.finished(kind, name)
        if stored is not None:
            result, wall_s = outcome.from_json(stored.result), stored.wall_s
        elif self._journal.begun(kind, name) >= _DEADLY:
            reason = f"the search died {self._journal.begun(kind, name)} times during this {kind}"
            result, wall_s = outcome(failure=Failure("crash", reason)), 0.0
            self._journal.end(kind, name, result.to_json(), wall_s)
        else:
            left_s = self._left_s(self.usual_s(kind) if needs_s is None else needs_s, reserve, over_s)
            self._journal.begin(kind, name, label)
            began = self._clock()
            result = self._guarded(make, left_s, outcome)
            wall_s = self._clock() - began
            self._journal.end(kind, name, result.to_json(), wall_s)
        self.spent_s += wall_s
        # A resumed search must account for the same time as the one that was killed.
        self._walls[kind].append(wall_s)
        if isinstance(result, TrialResult) and result.failure is None and not result.stopped_early:
            self._fine_s[name] = wall_s
        self._seen[kind, name] = result
        return result

    def _left_s(self, needs_s: float, reserve: int, over_s: float) -> float | None:
        """Seconds available for the next one, which may exceed the budget by `over_s`."""
        if self.budget.trials is not None and self.made + 1 + reserve > self.budget.trials:
            raise BudgetSpentError(f"the budget of {self.budget.trials} trials is spent")
        if self.budget.time_s is None:
            return None
        left_s = self._beside(self._sure_of(reserve), self.budget.time_s) + over_s
        if self.made and left_s < needs_s:
            raise BudgetSpentError(f"the budget of {self.budget.time_s:.0f} s is spent")
        return left_s

    def _sure_of(self, reserve: int) -> float:
        return reserve if self.made > 1 else _AT_LEAST * reserve

    def _beside(self, reserve: float, time_s: float) -> float:
        """The time left after reserving some proofs."""
        return time_s - self.spent_s - reserve * self._long_proof_s()

    def _long_proof_s(self) -> float:
        """Upper estimate of a proof's duration: the longest recent one, one with a slow start, or the final one.

        In the final proof the initial config takes part, which may be the slowest.
        """
        lately = list(self._fine_s)[-_LATELY:]
        whole_s = 0.0
        if lately:
            times = max(self._times_trials[-_LATELY:], default=_TRIALS_IN_PROOF / 2)
            whole_s = times * (next(iter(self._fine_s.values())) + self._fine_s[lately[-1]])
        return max([whole_s, *self._walls["proof"][-_LATELY:], *(self.proof_s(name) for name in lately)])

    def _guarded(
        self, make: Callable[[float | None], Outcome], left_s: float | None, outcome: type[Outcome]
    ) -> Outcome:
        try:
            return make(left_s)
        except MemoryError as error:
            return outcome(failure=Failure("oom", str(error) or "out of memory"))
        except ConfigError as error:
            return outcome(failure=Failure("not_applicable", str(error)))
        except TimeoutError as error:
            return outcome(failure=Failure("hang", str(error) or "took too long"))
        except Exception as error:
            log.debug("a trial failed", exc_info=True)
            return outcome(failure=Failure("crash", f"{type(error).__name__}: {error}"))


def _learning(config: Config, changes: Changes) -> Config:
    """A config for comparing learning; unchanged if the changes do not apply to it."""
    try:
        return apply_changes(config, changes)
    except ConfigError:
        return config
