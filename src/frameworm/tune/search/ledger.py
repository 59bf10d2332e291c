"""Trials, proofs and quality checks of a search, made once: from the journal if they are there, else by the runner."""

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
from frameworm.tune.trials.longer import Longer
from frameworm.tune.trials.outcomes import (
    Budget,
    CheckLonger,
    Failure,
    LongerRequest,
    LongerResult,
    ProofRequest,
    ProofResult,
    Prove,
    RunTrial,
    TrialRequest,
    TrialResult,
    digest_of,
    rounding_unit,
    without_dropout,
)

log = logging.getLogger("frameworm")

# A trial that was under way so often when the search died is taken to be what killed it.
_DEADLY = 2
# Once a change that has to be compiled is accepted, all that follow compile too.
_LATELY = 3
NO_TIME = "of the budget are left for it"
# Both sides start, take turns and learn.
_TRIALS_IN_PROOF = 3
# After the first trial a proof's time is a guess, and a search that trusts it may end with nothing and time left.
_AT_LEAST = 0.5
# A share of the time that the last proof may take beyond it: with no proof all that was found would be lost.
_LAST_OVER = 0.15

Outcome = TypeVar("Outcome", TrialResult, ProofResult, LongerResult)


class BudgetSpentError(Exception):
    """There is no time or trial left; never leaves the search."""


class Ledger:
    """Makes trials, proofs and quality checks, keeps the account of them, and never makes one twice.

    Args:
        run_trial: Runs a trial. Whatever it raises is a crash of that trial.
        prove: Runs a proof, likewise.
        budget: What all of them may take.
        journal: Where they are kept.
        consent: Other mathematics are allowed.
        check_longer: Runs a quality check, likewise; None: there are none.
        clock: Seconds.
    """

    def __init__(
        self,
        run_trial: RunTrial,
        prove: Prove,
        budget: Budget,
        journal: Journal,
        *,
        consent: bool = False,
        check_longer: CheckLonger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_trial = run_trial
        self._prove = prove
        self.budget = budget
        self._journal = journal
        self._consent = consent
        self._check_longer = check_longer
        self._clock = clock
        self.spent_s = 0.0
        self._walls: dict[str, list[float]] = {"trial": [], "proof": [], "check": []}
        self._fine_s: dict[str, float] = {}  # of trials that went to their end, by name
        self._proofs: list[tuple[float, float]] = []  # of those with a result: what they took, and their slower trial
        self._times_trials: list[float] = []  # how many times what the trials of both sides took
        self._seen: dict[tuple[str, str], TrialResult | ProofResult | LongerResult] = {}

    @property
    def made(self) -> int:
        """Trials, proofs and quality checks so far, those of an earlier process included."""
        return len(self._seen)

    @property
    def checks_longer(self) -> bool:
        """Whether quality checks can be made."""
        return self._check_longer is not None

    def usual_s(self, kind: str) -> float:
        """What a trial or proof takes lately; a proof is taken for three trials until one was made."""
        if self._walls[kind]:
            return median(self._walls[kind][-_LATELY:])
        return _TRIALS_IN_PROOF * self.usual_s("trial") if kind == "proof" else 0.0

    def proof_s(self, trial: str | None) -> float:
        """What the proof of a config with this trial should take: as an earlier one, and what it starts later."""
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
        """The trial of a config.

        Args:
            config: What to run.
            label: What is tried.
            keep_going: See `TrialRequest`.
            beside: The config and the trial that it will be held against; it should take about as long.
            reserve: Proofs that there must be budget for afterwards.

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
        """The proof of a change; the context gives the machine. `last`: nothing else waits for the budget.

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
                change.mathematics,
                units,
                self._consent,
                change.label,
                timeout_s,
                last,
                self.proof_s(digest_of(candidate)),
            )
            return self._prove(request)

        # The last one makes do with what is left and a little more, if it is not far too little.
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

    def longer_check(
        self,
        baseline: Config,
        candidate: Config,
        steps: int,
        longer: Longer,
        expected_s: float,
        label: str,
        *,
        reserve: int = 0,
    ) -> LongerResult:
        """The quality check of a change; see `LongerRequest`.

        Raises:
            BudgetSpentError: There is no budget for what it should take.
        """
        name = digest_of(baseline, candidate)

        def make(timeout_s: float | None) -> LongerResult:
            assert self._check_longer is not None
            request = LongerRequest(
                name, baseline, candidate, steps, longer.looks, expected_s, label, timeout_s, longer.margin
            )
            return self._check_longer(request)

        return self._once("check", name, label, make, LongerResult, reserve, expected_s)

    def has_room(self, seconds: float, reserve: int) -> bool:
        """Whether the budget has so much left, beside some proofs."""
        if self.budget.trials is not None and self.made + 1 + reserve > self.budget.trials:
            return False
        return self.budget.time_s is None or self._beside(reserve, self.budget.time_s) >= seconds

    def no_time_to_start(self, setup_s: float) -> str | None:
        """Why a trial whose start takes so long is not worth beginning; it would be stopped before it has measured."""
        if not setup_s or self.budget.time_s is None:
            return None
        left_s = (
            self._beside(self._sure_of(1), self.budget.time_s) - setup_s
        )  # its proof, or that of the whole, starts as slowly
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
        # A search that goes on must find the same budget spent as the one that was killed did.
        self._walls[kind].append(wall_s)
        if isinstance(result, TrialResult) and result.failure is None and not result.stopped_early:
            self._fine_s[name] = wall_s
        self._seen[kind, name] = result
        return result

    def _left_s(self, needs_s: float, reserve: int, over_s: float) -> float | None:
        """Seconds for the next one, which may take some beyond the budget."""
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
        """What is left of the time beside some proofs."""
        return time_s - self.spent_s - reserve * self._long_proof_s()

    def _long_proof_s(self) -> float:
        """What a proof may take: as the longest lately, one of what is slow to start lately, or that of the whole.

        There the config as it was takes part, which may be the slowest.
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
    """A config for the comparison of learning; as it is where the changes do not fit it."""
    try:
        return apply_changes(config, changes)
    except ConfigError:
        return config
