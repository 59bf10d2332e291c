"""What the account of a search takes the next trial or proof to cost."""

from __future__ import annotations

from simulated_machine import config_of

from frameworm.tune.knobs.base import Candidate
from frameworm.tune.knobs.context import Context
from frameworm.tune.search.journal import Journal
from frameworm.tune.search.ledger import Ledger
from frameworm.tune.trials.outcomes import Budget, ProofRequest, ProofResult, TrialRequest, TrialResult


def test_a_proof_has_paid_for_the_slow_start_of_its_own_side() -> None:
    """What is compiled starts slowly in its trial; the proof that followed tells what such proofs take."""
    now_s = 0.0

    def run_trial(request: TrialRequest) -> TrialResult:
        nonlocal now_s
        now_s += 42.0 if request.label == "compiled" else 16.0
        return TrialResult([1e-3], 1.0, "host_bound", [])

    def prove(request: ProofRequest) -> ProofResult:
        nonlocal now_s
        now_s += 31.0
        return ProofResult()

    ledger = Ledger(run_trial, prove, Budget(time_s=170.0), Journal(None, "x"), clock=lambda: now_s)
    plain, compiled = config_of(a=False), config_of(a=True)
    ledger.trial(plain, "plain", lambda windows: True)
    name, _ = ledger.trial(compiled, "compiled", lambda windows: True)
    assert ledger.proof_s(name) == 3 * 16 + 42 - 16, "a guess"
    ledger.proof(plain, compiled, Candidate("a", {"model.a": True}, "nothing"), Context(plain))
    assert ledger.proof_s(name) == 31
    assert ledger.has_room(170 - 16 - 42 - 31 - 31, 1)
