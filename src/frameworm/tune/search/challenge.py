"""The best config so far, and how candidates challenge it: first by a trial, then by a proof."""

from __future__ import annotations

from collections.abc import Sequence

from frameworm.config.schema import Config
from frameworm.guard.gain import Window, speedup_of
from frameworm.guard.proof import MINIMUM_GAIN, QUALITY, Proof, lacks_only_quality, with_quality
from frameworm.guard.quality import judge_quality
from frameworm.tune.knobs.base import Candidate, Knob, together
from frameworm.tune.knobs.context import Context, apply_changes, setting_of
from frameworm.tune.search.journal import Journal
from frameworm.tune.search.ledger import BudgetSpentError, Ledger
from frameworm.tune.search.result import Accepted, Attempt, Progress, Status, Tell, TuneResult, trade_off, was_checked
from frameworm.tune.trials.outcomes import ProofResult, TrialResult, rounding_unit
from frameworm.tune.trials.quality_check import QualityChecker
from frameworm.tune.trials.windows import DISTURBED

# A trial ends after a first window that is slower than the best by this factor.
CLEARLY_WORSE = 1.25
WANTS_CHECK = "needs a quality check"
# A quality check that needs a larger fraction of the budget waits until everything else was tried.
MOST_OF_BUDGET = 0.8
# If a proof takes more of the budget than this, changes are accepted by their trials and proved together at the end,
MOST_FOR_PROOF = 1 / 10
# unless their trials leave it in doubt whether they gain this much.
_WORTH_PROOF = 0.05
_PUT_OFF = "to be proved with the rest"


class Challenge:
    """Holds the best config so far and lets candidates challenge it.

    Args:
        context: The initial config, the machine and the workload.
        ledger: Runs trials and proofs.
        journal: Writes the summary.
        allow_approximate: Whether candidates may change numerics by more than rounding.
        minimum_gain: The least speedup minus one that is worth a change.
        longer: How quality checks are run.
        tell: Called with progress before and after everything.
    """

    def __init__(
        self,
        context: Context,
        ledger: Ledger,
        journal: Journal,
        *,
        allow_approximate: bool = False,
        minimum_gain: float = MINIMUM_GAIN,
        longer: QualityChecker | None = None,
        tell: Tell | None = None,
    ) -> None:
        self.context = context
        self.start = context
        self.ledger = ledger
        self.best = TrialResult()
        self.result = TuneResult(context.config, context.config, self.best, self.best, run_samples=context.run_samples)
        self.result.global_batch = context.global_batch
        self._journal = journal
        self._allow_approximate = allow_approximate
        self._minimum_gain = minimum_gain
        self._longer = longer or QualityChecker()
        self._tell = tell
        self._unpaid: set[str] = set()

    def why_not(self, candidate: Candidate, setup_s: float, *, last: bool = False) -> str | None:
        """Why a candidate is not worth a trial; `last`: nothing else waits for the budget."""
        setup_s = setup_s if candidate.setup_s is None else candidate.setup_s
        if self.needs_check(candidate) and (refused := self._no_check(last=last)) is not None:
            return f"changes more than rounding: {refused}"
        if any(was_checked(item, candidate) for item in self.result.attempts):
            return "a quality check did not speak for it"
        run_s = self.result.run_s(self.best)
        if run_s is not None and setup_s >= run_s:
            return f"takes about {setup_s:.0f} s to start, and the whole run takes {run_s:.0f} s"
        return self.context.why_not(candidate.changes) or self.ledger.no_time_to_start(setup_s)

    def screen(self, candidate: Candidate, why: str) -> tuple[Attempt, TrialResult]:
        """Run a trial of a candidate; the status `inconclusive` means that a proof is worthwhile."""
        config = apply_changes(self.context.config, candidate.changes)
        name, trial = self._trial(config, candidate.label)
        attempt = self.add(candidate, "rejected", "", why, trial=name)
        if trial.failure is not None:
            attempt.status, attempt.failure, attempt.reason = "failed", trial.failure.kind, trial.failure.reason
        elif not trial.seconds_per_sample:
            attempt.status, attempt.failure, attempt.reason = "failed", "crash", "nothing was measured"
        else:
            attempt.screened = trial.times_as_fast_as(self.best)
            gains = attempt.screened >= 1 + self._minimum_gain / 2
            if not gains and trial.disturbed > DISTURBED:
                # A proof decides, because other work on the machine affects both of its sides alike.
                attempt.status = "inconclusive"
                attempt.reason = f"{attempt.screened:.3f} x in a trial of which other work took {trial.disturbed:.0%}"
            elif trial.stopped_early:
                attempt.reason = f"clearly slower: {attempt.screened:.2f} x after its first window"
            elif not gains:
                attempt.reason = f"no gain: {attempt.screened:.3f} x"
            elif (cost := self._not_paid_back(trial)) is not None:
                attempt.reason = cost
                self._unpaid |= set(candidate.knob.split("+"))
            else:
                attempt.status, attempt.reason = "inconclusive", f"{attempt.screened:.3f} x in its trial, not proved"
        self.report(f"{candidate.label}: {attempt.reason}")
        return attempt, trial

    def prove(self, attempt: Attempt, candidate: Candidate, trial: TrialResult, *, at_once: bool = False) -> bool:
        """Prove a candidate against the best so far, and keep it if that succeeds; `at_once`: whatever it costs."""
        config = apply_changes(self.context.config, candidate.changes)
        if not at_once and self._puts_off(attempt, candidate):
            kept = self._take_for_now(attempt, candidate, config, trial)
            if kept is not None:
                return kept
        self.report(f"proving {candidate.label}")
        try:
            outcome = self._prove_step(candidate, config)
        except BudgetSpentError:
            attempt.reason += ", and the budget has no room left for its proof"
            return False  # others may still be possible
        if outcome.failure is not None or outcome.proof is None:
            attempt.status = "failed"
            attempt.failure = outcome.failure.kind if outcome.failure else "crash"
            attempt.reason = outcome.failure.reason if outcome.failure else "the proof gave no result"
            return False
        proof = outcome.proof
        if lacks_only_quality(proof):
            proof = self._check(proof, candidate, self.context, config, trial)
        attempt.proof = proof
        attempt.status, attempt.reason = proof.verdict, proof.reason
        if proof.verdict != "accepted":
            self._offer(attempt)
            return False
        self._accept(attempt, candidate, config, trial)
        return True

    def _offer(self, attempt: Attempt) -> None:
        """Offer a change as a trade-off if its gain is proved and its quality was checked."""
        proof = attempt.proof
        if proof is None or proof.quality is None or not proof.checks[0].passed:
            return
        judged = judge_quality(proof.quality, self._longer.margin)
        found = trade_off(attempt, judged, self.context, self.best.sample_s)
        if found is not None:
            self.result.trade_offs.append(found)

    def _prove_step(self, candidate: Candidate, config: Config) -> ProofResult:
        """Prove one more change, keeping time for a final proof if one is due, and otherwise if possible.

        While nothing is accepted, a proof may use whatever is left: without it all findings would be lost.
        """
        try:
            reserve = 1 if self.result.accepted else 0
            return self.ledger.proof(self.context.config, config, candidate, self.context, reserve=reserve)
        except BudgetSpentError:
            if self._owes_proof:
                raise
        last = not self.result.accepted
        return self.ledger.proof(self.context.config, config, candidate, self.context, last=last)

    def _puts_off(self, attempt: Attempt, candidate: Candidate) -> bool:
        """Whether its proof would take too much of the budget, or leave no time for the final proof."""
        time_s, proof_s = self.ledger.budget.time_s, self.ledger.proof_s(attempt.trial)
        if time_s is None or candidate.numerics_effect == "more" or self._is_coarser(candidate):
            return False
        return proof_s > MOST_FOR_PROOF * time_s or not self.ledger.has_room(proof_s, 1)

    def _is_coarser(self, candidate: Candidate) -> bool:
        """Whether it computes in a coarser precision: if that is wrong, everything built on it is lost too."""
        after = self.context.having(apply_changes(self.context.config, candidate.changes))
        return rounding_unit(after.resolved) > rounding_unit(self.context.resolved)

    def _take_for_now(self, attempt: Attempt, candidate: Candidate, config: Config, trial: TrialResult) -> bool | None:
        """Keep a candidate whose trial is clearly faster; returns None if that is in doubt and much may be gained."""
        pairs = zip(self.best.seconds_per_sample, trial.seconds_per_sample)
        gain = speedup_of([item for one, other in pairs for item in (Window("before", one), Window("after", other))])
        # Trials are minutes apart, in which a machine may change slightly.
        if gain is None or gain.low <= 1 + self._minimum_gain:
            if gain is None or gain.value >= 1 + _WORTH_PROOF:
                return None
            attempt.gain = gain
            attempt.reason += ", which may be noise, and a proof would take too much of the budget"
            return False
        attempt.gain, attempt.status = gain, "accepted"
        attempt.reason = f"{gain.value:.3f} x ({gain.low:.3f}..{gain.high:.3f}) in its trial, {_PUT_OFF}"
        self._accept(attempt, candidate, config, trial)
        return True

    def _accept(self, attempt: Attempt, candidate: Candidate, config: Config, trial: TrialResult) -> None:
        before = {key: setting_of(self.context.config, key) for key in candidate.changes}
        assert attempt.trial is not None
        self.result.accepted.append(Accepted(candidate, before, config, trial, attempt.trial, attempt))
        self.move_to(config, trial)

    @property
    def _owes_proof(self) -> bool:
        """Whether changes were accepted without a proof of their own."""
        return not all(item.proved_alone for item in self.result.accepted)

    def prove_total(self) -> None:
        """Prove the best config against the first; changes that fail together are undone from the end."""
        accepted = self.result.accepted
        while len(accepted) > 1 or self._owes_proof:
            merged = accepted[0].candidate
            for item in accepted[1:]:
                merged = together(merged, item.candidate)
            self.report("proving all changes together")
            try:
                outcome = self._prove_whole(merged)
            except BudgetSpentError:
                while self._owes_proof:
                    self._take_back("inconclusive", "there was no budget left to prove it")
                return
            proof = self.result.total = outcome.proof
            if proof is not None and proof.verdict == "accepted":
                for item in accepted:
                    item.attempt.reason = item.attempt.reason.replace(_PUT_OFF, "proved with the rest")
                return
            if not self._owes_proof and (proof is None or proof.verdict != "rejected"):
                return
            told = proof.reason if proof is not None else outcome.failure.reason if outcome.failure else "no result"
            status: Status = "inconclusive" if proof is None else proof.verdict
            self._take_back(status, f"together with the others: {told}")

    def _take_back(self, status: Status, reason: str) -> None:
        """Undo the last change."""
        last = self.result.accepted.pop()
        last.attempt.status, last.attempt.reason = status, reason
        self.result.total = None
        if self.result.accepted:
            self.move_to(self.result.accepted[-1].config, self.result.accepted[-1].trial)
        else:
            self.move_to(self.start.config, self.result.baseline)

    def _prove_whole(self, merged: Candidate) -> ProofResult:
        outcome = self.ledger.proof(self.start.config, self.context.config, merged, self.start, last=True)
        if outcome.proof is None or not lacks_only_quality(outcome.proof):
            return outcome
        other = [item for item in self.result.accepted if self.needs_check(item.candidate)]
        if len(other) == 1 and (known := other[0].attempt.proof) is not None and known.quality is not None:
            # Nothing else changes more than rounding, so the earlier quality check applies.
            detail = next(check.detail for check in known.checks if check.name == QUALITY)
            return ProofResult(with_quality(outcome.proof, True, detail, known.quality), details=outcome.details)
        proof = self._check(outcome.proof, merged, self.start, self.context.config, self.best)
        return ProofResult(proof, details=outcome.details)

    def needs_check(self, candidate: Candidate) -> bool:
        """Whether it changes more than rounding, is not allowed to, and is not the user's own setting again."""
        if candidate.numerics_effect != "more" or self._allow_approximate:
            return False
        return any(setting_of(self.start.config, key) != value for key, value in candidate.changes.items())

    def _no_check(self, after: TrialResult | None = None, *, last: bool = False) -> str | None:
        """Why a quality check is not possible now; if trial and proof are still to come, their time is added."""
        if not self.ledger.checks_quality:
            return "needs --allow approximate"
        if not self.context.workload.has_validation:
            return "needs validation data for a quality check, or --allow approximate"
        needs_s = expected_s = self._longer.seconds(self.context, self.best, after)
        if after is None:
            share = 1.0 if last else MOST_OF_BUDGET
            needs_s = expected_s / share + self.ledger.usual_s("trial") + self.ledger.usual_s("proof")
        if not self.ledger.has_room(needs_s, 1):
            return f"{WANTS_CHECK} of about {expected_s:.0f} s, or --allow approximate"
        return None

    def _check(self, proof: Proof, candidate: Candidate, before: Context, after: Config, trial: TrialResult) -> Proof:
        """The proof, completed by a quality check if one is possible."""
        if not self.needs_check(candidate):
            return with_quality(proof, True, "the config's own setting again")
        refused = self._no_check(trial)
        if refused is not None:
            gain = proof.checks[0].detail
            return with_quality(proof, None, f"changes more than rounding: {refused} (its gain is proved: {gain})")
        expected_s = self._longer.seconds(before, self.best, trial)
        steps = self._longer.steps(before)
        self.report(f"checking the quality of {candidate.label}, about {expected_s:.0f} s")
        try:
            # Time for one proof is reserved, for the next value or for the final proof.
            outcome = self.ledger.quality_check(
                before.config, after, steps, self._longer, expected_s, candidate.label, reserve=1
            )
        except BudgetSpentError as spent:
            return with_quality(proof, None, f"changes more than rounding: {spent} (its gain is proved)")
        if outcome.quality is None:
            why = outcome.failure.reason if outcome.failure else "it gave no result"
            return with_quality(proof, None, f"the quality check failed: {why}")
        judged = judge_quality(outcome.quality, self._longer.margin)
        return with_quality(proof, judged.passed, judged.detail, outcome.quality)

    def _not_paid_back(self, trial: TrialResult) -> str | None:
        """Why a slower start does not pay off over the whole run."""
        samples = self.result.run_samples
        if samples is None or trial.setup_s is None or self.best.setup_s is None:
            return None
        more_s = trial.setup_s - self.best.setup_s
        saved_s = samples * (self.best.sample_s - trial.sample_s)
        if more_s <= saved_s or more_s <= 0:
            return None
        return f"its start takes {more_s:.1f} s more and it saves {saved_s:.1f} s over the whole run"

    def measure_start(self) -> TrialResult:
        """Run the trial of the initial config."""
        _, self.best = self._trial(self.start.config, "the config as it is", racing=False)
        self.result.baseline = self.result.final = self.best
        return self.best

    def _trial(self, config: Config, label: str, *, racing: bool = True) -> tuple[str, TrialResult]:
        self.report(f"trying {label}")
        limit_s = CLEARLY_WORSE * self.best.sample_s

        def keep_going(windows: Sequence[float]) -> bool:
            return not racing or not windows or min(windows) <= limit_s

        # A trial that leaves no time for a proof is useless; but a budget of two trials means two trials.
        timed = racing and self.ledger.budget.time_s is not None and self.ledger.budget.trials is None
        wanted = timed or len(self.result.accepted) > 1
        beside = (self.context.config, self.best) if racing else None
        return self.ledger.trial(config, label, keep_going, beside=beside, reserve=1 if wanted else 0)

    def move_to(self, config: Config, trial: TrialResult) -> None:
        """Make a config the best one."""
        self.context = self.context.having(config)
        assert self.context.global_batch == self.start.global_batch, "the global batch never changes"
        self.best = trial
        self.result.best, self.result.final = config, trial

    def add(self, candidate: Candidate, status: Status, reason: str, why: str, trial: str | None = None) -> Attempt:
        """Record an attempt."""
        attempt = Attempt(candidate.knob, candidate.label, dict(candidate.changes), status, reason, why, trial=trial)
        self.result.attempts.append(attempt)
        return attempt

    def has_tried(self, candidate: Candidate) -> bool:
        """Whether exactly these changes were attempted."""
        return any(item.changes == candidate.changes for item in self.result.attempts)

    def is_accepted(self, knob: Knob) -> bool:
        """Whether a change of the knob was accepted."""
        return any(knob.name in item.candidate.knob.split("+") for item in self.result.accepted)

    def learned_otherwise(self, knob: Knob) -> bool:
        """Whether a proof found that the knob alone changes learning; a quality check only applies to one value."""
        proofs = [item.proof for item in self.result.attempts if item.knob == knob.name and item.proof is not None]
        return any(check.passed is False for proof in proofs for check in proof.checks[1:] if check.name != QUALITY)

    def does_not_pay(self, knob: Knob) -> bool:
        """Whether its start-up cost was not paid back; after every other change there is less left to save."""
        return knob.setup_s > 0 and knob.name in self._unpaid

    def was_refused(self, knob: Knob) -> bool:
        """Whether the knob alone is currently impossible here."""
        found = [item.failure for item in self.result.attempts if item.knob == knob.name]
        return bool(found) and found[-1] in ("capture_refused", "hang", "not_applicable")

    def cannot_tell(self, knob: Knob) -> bool:
        """Whether its gain was proved but its effect on learning left open, as it would be again."""
        open_ones = [item for item in self.result.attempts if item.knob == knob.name and item.status == "inconclusive"]
        return any(item.proof is not None and item.proof.checks[0].passed for item in open_ones)

    def has_failed(self, knob: Knob) -> bool:
        """Whether a trial or proof of the knob alone gave no result."""
        return any(item.knob == knob.name and item.status == "failed" for item in self.result.attempts)

    def report(self, doing: str) -> None:
        """Rewrite the summary and report progress."""
        self.result.spent_s, self.result.trials = self.ledger.spent_s, self.ledger.made
        self._journal.write_summary(self.result.to_json())
        if self._tell is not None:
            self._tell(Progress(doing, self.result, self.ledger.budget))
