"""The closed loop: the verdict picks a knob, its values are tried, the best is proved, and the loop starts again.

The search depends only on outcomes, and every outcome is in the journal: a killed search is run again from the
beginning, finds the recorded results, and so returns to the point where it stopped.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod

from frameworm.guard.proof import MINIMUM_GAIN
from frameworm.tune.knobs.base import Candidate, Knob, together
from frameworm.tune.knobs.context import Context, apply_changes, setting_of
from frameworm.tune.search.challenge import WANTS_CHECK, Challenge
from frameworm.tune.search.journal import Journal
from frameworm.tune.search.ledger import NO_TIME, BudgetSpentError, Ledger
from frameworm.tune.search.noise import Noise
from frameworm.tune.search.order import Promise, cost_of, in_order, past_the_peak, promise_of, too_little_to_gain
from frameworm.tune.search.result import (
    Accepted,
    Attempt,
    Tell,
    TuneResult,
    figure_of,
    figures_of,
    is_asked_for,
    only_gain_failed,
)
from frameworm.tune.trials.outcomes import Budget, CheckLonger, Failure, Prove, RunTrial, TrialResult, digest_of
from frameworm.tune.trials.quality_check import QualityChecker

_ALL = "everything was tried"
# A change this close to break-even is worth a second trial once the config around it has changed.
_NEARLY_EVEN = 0.9
# The search does not try to leave out a change that gained this much.
_SURELY_GOOD = 1.3
# A knob with this usual gain is part of the first combined attempt.
_USUALLY_MUCH = 0.1
_LEAP = "usual gain together"


class Search:
    """Searches for the fastest config that learns the same.

    Args:
        knobs: What may be changed.
        context: The initial config, the machine and the workload.
        run_trial: Measures one config; see `TrialRequest`.
        prove: Measures two in turns and judges them with `guard.proof.prove`; see `ProofRequest`.
        budget: The budget of all trials and proofs.
        journal: Records them; made by `Journal(folder, search_name(context))`.
        allow_approximate: Changes of numerics beyond rounding need no quality check.
        minimum_gain: The least speedup minus one that is worth a change.
        check_longer: Runs quality checks; None: changes of numerics beyond rounding need consent.
        longer: How quality checks are run.
        tell: Called with progress before and after everything.
        clock: Returns seconds.
    """

    def __init__(
        self,
        knobs: Sequence[Knob],
        context: Context,
        run_trial: RunTrial,
        prove: Prove,
        budget: Budget,
        journal: Journal,
        *,
        allow_approximate: bool = False,
        minimum_gain: float = MINIMUM_GAIN,
        check_quality: CheckLonger | None = None,
        longer: QualityChecker | None = None,
        tell: Tell | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._knobs = {knob.name: knob for knob in knobs}
        ledger = Ledger(
            run_trial, prove, budget, journal, consent=allow_approximate, check_quality=check_quality, clock=clock
        )
        self._challenge = Challenge(
            context,
            ledger,
            journal,
            allow_approximate=allow_approximate,
            minimum_gain=minimum_gain,
            longer=longer,
            tell=tell,
        )
        self._tried: dict[str, int] = {}  # knob -> number of changes accepted before its last attempts
        self._noise = Noise()
        self._leapt: list[Candidate] = []

    @property
    def result(self) -> TuneResult:
        """The result so far."""
        return self._challenge.result

    def run(self) -> TuneResult:
        """Search until nothing is left to try or the budget is spent."""
        try:
            baseline = self._challenge.measure_start()
            if baseline.failure is not None:
                return self._ended(_no_start(baseline.failure))
            self._leap()
            self._turn_all()
            self._turn_together()
            self._turn_again()
            self._turn_back()
            self._turn_costly()
            settle_doubts(self._challenge, self._knobs)
            why = _ALL
        except BudgetSpentError as spent:
            why = str(spent)
        self._challenge.prove_total()
        list_skipped(self._knobs.values(), self._challenge, self._tried, why)
        skipped = [item for item in self.result.attempts if item.status == "skipped" and item.why != "interaction"]
        unchecked = [f"{item.label} {WANTS_CHECK}" for item in skipped if WANTS_CHECK in item.reason]
        unchecked += [f"{item.label} {item.reason}" for item in skipped if NO_TIME in item.reason]
        if unchecked and why == _ALL:
            why = f"all was tried that the budget has time for; {unchecked[0]}"
        return self._ended(why)

    # One knob

    def _turn_all(self) -> None:
        while (following := self._next()) is not None:
            knob, _, promise = following
            asked_for = promise.by_verdict == 2
            if self._turn(*following):
                self._look_again()
            elif asked_for or self._challenge.was_refused(knob):
                self._turn_with_a_partner(knob, asked_for)

    def _look_again(self) -> None:
        """Reopen knobs that were judged while step times were unsteady, if they are steady now."""
        for name in self._noise.in_doubt(self._challenge.best):
            knob = self._knobs[name]
            told_nothing = self._challenge.has_failed(knob) or self._challenge.cannot_tell(knob)
            if self._is_open(knob) and not told_nothing and knob.why_not(self._challenge.context) is None:
                self._tried.pop(name, None)

    def _next(self) -> tuple[Knob, list[Candidate], Promise] | None:
        """The untried knob that promises the most for its cost."""
        context, ledger, best = self._challenge.context, self._challenge.ledger, self._challenge.best
        waiting = [knob for knob in self._knobs.values() if knob.name not in self._tried]
        waiting = [knob for knob in waiting if too_little_to_gain(knob, context, best, MINIMUM_GAIN) is None]
        possible = [(knob, self._possible(knob)) for knob in waiting if knob.why_not(context) is None]
        total = sum(len(candidates) for _, candidates in possible)
        trial_s, proof_s = ledger.usual_s("trial"), ledger.usual_s("proof")
        open_ones = []
        for knob, candidates in possible:
            cost_s = cost_of(knob, len(candidates), trial_s, proof_s, total - len(candidates))
            promise = promise_of(knob, candidates, context, best, cost_s)
            if candidates and promise.gain > 0:
                open_ones.append((knob, candidates, promise))
        return max(open_ones, key=lambda item: item[2].rank, default=None)

    def _possible(self, knob: Knob) -> list[Candidate]:
        found = self._noise.worth_another_look(knob, knob.candidates(self._challenge.context), self.result.attempts)
        return [candidate for candidate in found if self._challenge.why_not(candidate, knob.setup_s) is None]

    def _turn(self, knob: Knob, candidates: Sequence[Candidate], promise: Promise) -> bool:
        """Try the values of a knob and prove the fastest; returns whether one was accepted."""
        self._tried[knob.name] = len(self.result.accepted)
        self._noise.note(knob, self._challenge.best)
        promising: list[tuple[Attempt, Candidate, TrialResult]] = []
        screened: dict[float, float] = {}
        present = knob.position_of(self._challenge.context)
        spent: BudgetSpentError | None = None
        for candidate in in_order(knob, candidates, self._challenge.context, self._challenge.best):
            beyond = past_the_peak(candidate.position, present, screened) if knob.ordered else None
            if beyond is not None:
                self._challenge.add(candidate, "skipped", f"{knob.keys[0]}={beyond}", promise.why)
                continue
            try:
                attempt, trial = self._challenge.screen(candidate, promise.why)
            except BudgetSpentError as error:
                spent = error  # earlier results of this knob are kept
                break
            if attempt.screened is not None or attempt.failure == "oom":
                screened[candidate.position] = attempt.screened or 0.0
            if attempt.status == "inconclusive":
                promising.append((attempt, candidate, trial))
        accepted = False
        promising.sort(key=lambda item: item[2].sample_s)
        for place, (attempt, candidate, trial) in enumerate(promising):
            if self._challenge.prove(attempt, candidate, trial):
                for other, _, _ in promising[place + 1 :]:
                    other.status, other.reason = "rejected", f"{candidate.label} is faster"
                self._challenge.report(f"accepted {candidate.label}")
                accepted = True
                break
            if attempt.proof is not None and only_gain_failed(attempt):
                for other, _, _ in promising[place + 1 :]:
                    other.status, other.reason = "rejected", f"slower than {candidate.label}, which gains nothing"
                break
        if spent is not None:
            raise spent
        return accepted

    # Combinations of knobs

    def _leap(self) -> None:
        """On a GPU, try all knobs with a large usual gain as one change, with one trial and one proof for all of them.

        If this cannot be captured, other values are tried, such as compiling more of the model. If that fails too,
        knobs that start quickly are tried without the others; then the search continues knob by knob. This is skipped
        for steps of several passes: the compiler specialises on their size, which must be found first.
        """
        context = self._challenge.context
        if not context.on_gpu or context.micro_batch * context.world_size < context.global_batch:
            return
        usual = [item for item in self._knobs.values() if not item.ordered and item.gain(context) >= _USUALLY_MUCH]
        usual.sort(key=lambda knob: -knob.gain(context))
        for chosen, place in ((usual, 0), (usual, 1), ([knob for knob in usual if not knob.setup_s], 0)):
            if place and [item.failure for item in self.result.attempts[-1:]] != ["capture_refused"]:
                continue
            parts = self._parts_of([knob for knob in chosen if knob in usual], place)
            while len(parts) > 1:
                bundle = functools.reduce(together, parts)
                if self._challenge.has_tried(bundle):
                    break
                if self._try_alone(bundle, _LEAP, sum(self._start_of(part) for part in parts), at_once=True):
                    self._leapt = parts
                    self._tried.update({part.knob: len(self.result.accepted) for part in parts})
                    return
                if (refused := self._refused_of(parts)) is None:
                    break
                usual.remove(refused)
                parts = self._parts_of([knob for knob in chosen if knob in usual], place)

    def _refused_of(self, parts: Sequence[Candidate]) -> Knob | None:
        """The part of the last attempt that the model or its data do not allow, as named in the refusal."""
        last = self.result.attempts[-1]
        named = [part for part in parts if any(last.reason.startswith(key) for key in part.changes)]
        return self._knobs[named[0].knob] if last.failure == "not_applicable" and named else None

    def _start_of(self, part: Candidate) -> float:
        """Its usual start-up cost in seconds."""
        return self._knobs[part.knob].setup_s if part.setup_s is None else part.setup_s

    def _parts_of(self, knobs: Sequence[Knob], place: int) -> list[Candidate]:
        """The n-th (or last) value of each knob, as far as they are compatible; one may make another possible."""
        parts: list[Candidate] = []
        there = self._challenge.context
        for knob in (*knobs, *knobs):
            open_to = knob.name not in [part.knob for part in parts] and knob.why_not(there) is None
            found = in_order(knob, knob.candidates(there) if open_to else [], there, self._challenge.best)
            fits = [item for item in found if not self._challenge.needs_check(item) and not there.why_not(item.changes)]
            if fits:
                parts.append(fits[min(place, len(fits) - 1)])
                there = there.having(apply_changes(there.config, parts[-1].changes))
        return parts

    def _turn_together(self) -> None:
        """Try pairs that work together if each failed alone; then continue with what they make possible."""
        accepted = True
        while accepted:
            accepted = False
            for knob, other, bundle in self._pairs():
                if self._try_alone(bundle, "together", knob.setup_s + other.setup_s):
                    self._turn_all()
                    accepted = True
                    break

    def _turn_with_a_partner(self, knob: Knob, asked_for: bool) -> None:
        """Try a knob that promised most but failed alone together with its partners, quickest start first.

        Args:
            knob: It is impossible or does not pay alone.
            asked_for: A remedy of the verdict names it; then it may also be what makes its partner possible.
        """
        others = [other for other in self._knobs.values() if other.name in knob.partners]
        if not asked_for:
            others += [other for other in self._knobs.values() if knob.name in other.partners and other not in others]
        for other in sorted(others, key=lambda other: (other.setup_s, -other.gain(self._challenge.context))):
            if self._is_settled(other):
                continue
            ways = [self._bundles(knob, other), *([self._bundles(other, knob)] if asked_for else [])]
            bundle = next(chain(*ways), None)
            if bundle is None or self._challenge.has_tried(bundle):
                continue
            if self._try_alone(bundle, "together", knob.setup_s + other.setup_s):
                return

    def _pairs(self) -> list[tuple[Knob, Knob, Candidate]]:
        """Pairs worth a trial, sorted by the product of their individual speedups."""
        found: list[tuple[float, Knob, Knob, Candidate]] = []
        context, best, attempts = self._challenge.context, self._challenge.best, self.result.attempts
        for knob in self._knobs.values():
            for pair in ((knob, self._knobs[name]) for name in knob.partners if name in self._knobs):
                if any(self._is_settled(item) or not is_asked_for(item, context, best, attempts) for item in pair):
                    continue
                bundle = next(self._bundles(*pair), None)
                known = [item.changes for _, _, _, item in found]
                if bundle is not None and bundle.changes not in known and not self._challenge.has_tried(bundle):
                    found.append((prod(figure_of(item, context, attempts) for item in pair), *pair, bundle))
        found.sort(key=lambda item: -item[0])
        return [(knob, other, bundle) for _, knob, other, bundle in found]

    def _bundles(self, knob: Knob, other: Knob) -> Iterator[Candidate]:
        """Combinations of one knob's values with the then most promising values of the other, best first."""
        if other.why_not(self._challenge.context) is not None:
            return
        for first in in_order(
            other, other.candidates(self._challenge.context), self._challenge.context, self._challenge.best
        ):
            if self._challenge.why_not(first, 0.0) is not None:
                continue
            there = self._challenge.context.having(apply_changes(self._challenge.context.config, first.changes))
            if knob.why_not(there) is not None:
                continue
            for second in in_order(knob, knob.candidates(there), there, self._challenge.best):
                yield together(first, second)

    def _turn_again(self) -> None:
        """Retry knobs that failed earlier but came close, or that work together with changes accepted since."""
        again = []
        for knob in self._knobs.values():
            if knob.name not in self._tried or not self._is_open(knob):
                continue
            since = {item.candidate.knob for item in self.result.accepted[self._tried[knob.name] :]}
            names = {part for name in since for part in name.split("+")}
            figures = figures_of(knob, self.result.attempts).values()
            nearly = max(figures, default=0.0) >= _NEARLY_EVEN and not self._challenge.has_failed(knob)
            if self._challenge.cannot_tell(knob):
                continue
            if names & set(knob.partners) or (names and nearly):
                again.append((bool(names & set(knob.partners)), max(figures, default=0.0), knob))
        for _, _, knob in sorted(again, key=lambda item: item[:2], reverse=True):
            candidates = [item for item in self._possible(knob) if knob.why_not(self._challenge.context) is None]
            if candidates and self._turn(knob, candidates, Promise(0, 0.0, "tried again")):
                self._turn_all()

    def _turn_back(self) -> None:
        """Try to leave out each accepted change, except the last and large ones, and each part of a combined one."""
        for part in self._leapt:
            self._try_alone(self._without(part), "interaction")
        for item in sorted(self.result.accepted[:-1], key=lambda item: item.speedup.value):
            if item.speedup.value >= _SURELY_GOOD:
                continue
            if self._try_alone(self._undo(item), "interaction"):
                item.attempt.reason += "; taken back, as it slows down what came after it"

    def _turn_costly(self) -> None:
        """Try values whose quality check would have left too little time for the rest."""
        for knob in self._knobs.values():
            if knob.why_not(self._challenge.context) is not None:
                continue
            costly = [
                candidate
                for candidate in knob.candidates(self._challenge.context)
                if self._challenge.needs_check(candidate)
                and not self._challenge.has_tried(candidate)
                and self._challenge.why_not(candidate, knob.setup_s, last=True) is None
            ]
            promise = promise_of(knob, costly, self._challenge.context, self._challenge.best)
            if costly and promise.gain > 0:
                self._turn(knob, costly, promise)

    def _is_settled(self, knob: Knob) -> bool:
        """Whether the knob was accepted or changes learning, so that it is not tried in combinations."""
        return self._challenge.is_accepted(knob) or self._challenge.learned_otherwise(knob)

    def _is_open(self, knob: Knob) -> bool:
        """Whether it may still be worth a change after others were made."""
        return not self._is_settled(knob) and not self._challenge.does_not_pay(knob)

    def _undo(self, item: Accepted) -> Candidate:
        return self._without(item.candidate)

    def _without(self, candidate: Candidate) -> Candidate:
        back = {key: setting_of(self._challenge.start.config, key) for key in candidate.changes}
        return Candidate(f"without {candidate.knob}", back, candidate.numerics_effect, candidate.reference)

    def _try_alone(self, candidate: Candidate, why: str, setup_s: float = 0.0, *, at_once: bool = False) -> bool:
        refused = self._challenge.why_not(candidate, setup_s)
        if refused is not None:
            self._challenge.add(candidate, "skipped", refused, why)
            return False
        attempt, trial = self._challenge.screen(candidate, why)
        return attempt.status == "inconclusive" and self._challenge.prove(attempt, candidate, trial, at_once=at_once)

    # Accounting

    def _ended(self, why: str) -> TuneResult:
        self.result.stopped = why
        self._challenge.report(why)
        return self.result


def _no_start(failure: Failure) -> str:
    """Why there is nothing to compare with."""
    if failure.kind == "hang":
        return (
            f"the config as it is was {failure.reason}; give a larger --budget, or let `frameworm doctor` say what "
            "else uses this machine"
        )
    return f"the config itself fails: {failure.reason}"


def search_name(context: Context) -> str:
    """Identifies a search by its initial config and kind of machine; its trials are only valid for these."""
    return f"{digest_of(context.config)} {context.world_size} {context.machine}"


def settle_doubts(challenge: Challenge, knobs: Mapping[str, Knob]) -> None:
    """Prove doubtful attempts after all, most promising first, while time is left besides the final proof."""
    left = [item for item in challenge.result.attempts if _is_doubtful(item)]
    for item in sorted(left, key=lambda item: -(item.screened or 0.0)):
        candidate = _candidate(item, challenge, knobs)
        ledger = challenge.ledger
        proof_s = max(ledger.usual_s("proof"), ledger.proof_s(item.trial))
        if candidate is None or not ledger.has_room(ledger.usual_s("trial") + proof_s, 1):
            continue
        challenge.result.attempts.remove(item)
        attempt, trial = challenge.screen(candidate, item.why)  # cached, unless others were accepted since
        if attempt.status == "inconclusive":
            challenge.prove(attempt, candidate, trial, at_once=True)


def _is_doubtful(item: Attempt) -> bool:
    return item.status == "inconclusive" and item.gain is not None and item.proof is None


def _candidate(item: Attempt, challenge: Challenge, knobs: Mapping[str, Knob]) -> Candidate | None:
    """The candidate of an attempt, if it is still worthwhile."""
    knob = knobs.get(item.knob)
    if knob is None or challenge.is_accepted(knob) or knob.why_not(challenge.context) is not None:
        return None
    found = [one for one in knob.candidates(challenge.context) if dict(one.changes) == item.changes]
    return next((one for one in found if challenge.why_not(one, knob.setup_s) is None), None)


def list_skipped(knobs: Iterable[Knob], challenge: Challenge, tried: Container[str], why: str) -> None:
    """Record everything that was never tried.

    Args:
        knobs: All knobs.
        challenge: Receives the records.
        tried: Names of the knobs that were tried.
        why: Why the search ended.
    """
    context = challenge.context
    for knob in knobs:
        refused = knob.why_not(context)
        little = too_little_to_gain(knob, context, challenge.best, MINIMUM_GAIN)
        for candidate in knob.candidates(context) if refused is None else ():
            reason = challenge.why_not(candidate, knob.setup_s) or little
            # Other values of an accepted knob are slower, unless they were not even tried.
            if not challenge.has_tried(candidate) and (reason or not challenge.is_accepted(knob)):
                challenge.add(candidate, "skipped", reason or _unless_tried(why), "")
        if refused is not None and knob.name not in tried:
            challenge.result.attempts.append(Attempt(knob.name, knob.keys[0], {}, "skipped", refused))


def _unless_tried(why: str) -> str:
    return why if "budget" in why else "no finding asks for it"
