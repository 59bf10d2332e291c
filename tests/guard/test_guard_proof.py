from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
from small_training import HONEST, ROUNDINGS, Faults, compare, to_bf16, train

from frameworm.guard.gain import LEAST_PAIRS, Window, pair_windows, speedup_of
from frameworm.guard.proof import (
    AGREEMENT,
    Evidence,
    Learning,
    NumericsEffect,
    Proof,
    StepEvidence,
    lacks_only_quality,
    prove,
    with_quality,
)
from frameworm.guard.quality import Quality, SeedEnd


def windows(gain: float, pairs: int, noise: Callable[[], float]) -> list[Window]:
    found = []
    for _ in range(pairs):
        found.append(Window("before", 1e-3 * (1 + gain) * math.exp(noise())))
        found.append(Window("after", 1e-3 * math.exp(noise())))
    return found


def quiet(seed: int, scale: float = 0.01) -> Callable[[], float]:
    draw = random.Random(seed)
    return lambda: draw.gauss(0, scale)


def disturbed(seed: int) -> Callable[[], float]:
    """Noise that remembers, with spikes of up to twice the time."""
    draw = random.Random(seed)
    level = [0.0]

    def noise() -> float:
        level[0] = 0.8 * level[0] + draw.gauss(0, 0.01)
        return level[0] + draw.gauss(0, 0.005) + (draw.uniform(0.1, 0.7) if draw.random() < 0.08 else 0.0)

    return noise


def evidence_of(precision: str = "fp32", faults: Faults = HONEST) -> Evidence:
    """An honest side in fp32 beside one in some precision, with or without faults."""
    rounding = ROUNDINGS[precision]
    return Evidence(train(), train(rounding, faults), compare(rounding, faults, declared=precision))


SAME = evidence_of()


def verdict_of(evidence: Evidence, numerics_effect: NumericsEffect = "rounding") -> Proof:
    return prove(windows(0.1, 6, quiet(0)), evidence, numerics_effect=numerics_effect)


def test_pairs_are_neighbours_and_used_once() -> None:
    a, b = "before", "after"
    in_order = [Window(a, 1.0), Window(b, 2.0), Window(b, 3.0), Window(a, 4.0), Window(a, 5.0), Window(a, 6.0)]
    assert pair_windows(in_order) == [(1.0, 2.0), (4.0, 3.0)]
    assert pair_windows([Window(a, math.nan), Window(a, 1.0), Window(b, 0.0), Window(b, 2.0)]) == [(1.0, 2.0)]


def test_few_pairs_have_no_interval() -> None:
    assert speedup_of(windows(0.5, LEAST_PAIRS - 1, quiet(0))) is None
    assert prove(windows(0.5, LEAST_PAIRS - 1, quiet(0)), SAME).verdict == "inconclusive"


def test_a_steady_slowdown_of_the_machine_cancels_in_abba() -> None:
    sides = ["before", "after", "after", "before"] * 3
    slower = [Window(side, 1e-3 * 1.02**at) for at, side in enumerate(sides)]  # type: ignore[arg-type]
    found = speedup_of(slower)
    assert found is not None
    assert found.low <= 1.0 <= found.high


@pytest.mark.parametrize("make", [quiet, disturbed])
@pytest.mark.parametrize("pairs", [5, 8])
@pytest.mark.slow
def test_null_changes_are_accepted_in_at_most_five_of_a_hundred(
    make: Callable[[int], Callable[[], float]], pairs: int
) -> None:
    tries = 200
    accepted = sum(prove(windows(0.0, pairs, make(seed)), SAME).verdict == "accepted" for seed in range(tries))
    assert accepted <= 0.05 * tries


@pytest.mark.slow
def test_looking_again_after_more_windows_keeps_null_changes_out() -> None:
    tries, accepted = 100, 0
    for seed in range(tries):
        every = windows(0.0, 12, quiet(seed, 0.02))
        looks = (prove(every[: 2 * pairs], SAME).verdict for pairs in (5, 8, 12))
        accepted += next((look for look in looks if look != "inconclusive"), "inconclusive") == "accepted"
    assert accepted <= 0.05 * tries


def test_ten_percent_are_found_and_the_interval_holds_them() -> None:
    tries = 100
    proofs = [prove(windows(0.1, 6, quiet(seed)), SAME) for seed in range(tries)]
    assert sum(proof.verdict == "accepted" for proof in proofs) >= 95
    held = sum(proof.speedup is not None and proof.speedup.low <= 1.1 <= proof.speedup.high for proof in proofs)
    assert held >= 90


def test_a_slowdown_and_a_gain_not_worth_it_are_rejected() -> None:
    slower = prove(windows(-0.1, 8, quiet(1)), SAME)
    assert slower.verdict == "rejected"
    assert "slower" in slower.reason
    tiny = prove(windows(0.004, 10, quiet(1, 0.0005)), SAME)
    assert tiny.verdict == "rejected"


def test_rounding_of_another_precision_is_accepted() -> None:
    proof = verdict_of(evidence_of("bf16"))
    assert proof.verdict == "accepted", proof.reason
    assert (proof.change, verdict_of(SAME).change) == ("precision", "rounding")


def test_sums_in_another_order_are_accepted() -> None:
    evidence = evidence_of(faults=Faults(reverse=True))
    assert evidence.candidate.losses != evidence.baseline.losses
    assert verdict_of(evidence).verdict == "accepted"


def test_a_precision_coarser_than_declared_is_rejected() -> None:
    proof = verdict_of(Evidence(train(), train(to_bf16), compare(to_bf16, declared="fp32")))
    assert proof.verdict == "rejected"
    assert "rounding explains" in proof.reason


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lie", [False, True])
def test_half_the_batch_is_rejected(precision: str, lie: bool) -> None:
    proof = verdict_of(evidence_of(precision, Faults(kept=16, lie=lie)))
    assert proof.verdict == "rejected"
    failed = {check.name for check in proof.checks if check.passed is False}
    assert failed == {AGREEMENT} if lie else {AGREEMENT, "samples", "real tokens"}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layer", ["first", "second"])
def test_a_frozen_layer_is_rejected_by_name(precision: str, layer: str) -> None:
    evidence = evidence_of(precision, Faults(frozen=layer))
    proof = verdict_of(evidence)
    assert proof.verdict == "rejected"
    assert f"only one side computes the gradient of {layer}" in proof.reason
    allowed = prove(windows(0.1, 6, quiet(0)), evidence, numerics_effect="more", consent=True)
    assert allowed.verdict == "rejected"
    assert f"{layer} is no longer updated" in allowed.reason


@pytest.mark.parametrize("factor", [0.0, 0.5, 0.98, 1.02])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_wrong_factor_of_one_gradient_is_rejected_by_name(precision: str, factor: float) -> None:
    proof = verdict_of(evidence_of(precision, Faults(factor=factor)))
    assert proof.verdict == "rejected"
    assert "gradient of first" in proof.reason
    assert proof.outputs[0].name == "gradient of first", "the least alike comes first"


def test_other_samples_are_not_rounding_even_if_nobody_counted_them() -> None:
    evidence = evidence_of("bf16", Faults(order_seed=5))
    steps = [step._replace(samples=None, real_tokens=None) for step in evidence.candidate.steps]
    proof = verdict_of(replace(evidence, candidate=Learning(steps)))
    assert proof.verdict == "rejected"
    assert [check.name for check in proof.checks if check.passed is False] == [AGREEMENT]


def test_another_rate_is_not_rounding() -> None:
    assert SAME.agreement is not None
    other = replace(SAME.agreement, differences=["lr of first is 0.0125 instead of 0.01"])
    proof = verdict_of(replace(SAME, agreement=other))
    assert proof.verdict == "rejected"
    assert "lr of first" in proof.reason


def test_unknown_samples_are_vouched_for_by_the_gradients() -> None:
    evidence = evidence_of("bf16")
    hidden = Learning([StepEvidence(step.loss) for step in evidence.candidate.steps])
    proof = verdict_of(replace(evidence, candidate=hidden))
    assert proof.verdict == "accepted"
    assert {check.name for check in proof.checks if check.passed is None} == {"samples", "real tokens"}


def test_nothing_is_accepted_without_evidence_or_with_too_few_states() -> None:
    assert prove(windows(0.5, 8, quiet(0)), None).verdict == "inconclusive"
    apart = verdict_of(replace(SAME, agreement=None))
    assert apart.verdict == "inconclusive"
    assert (apart.change, apart.outputs) == (None, [])
    assert verdict_of(replace(SAME, agreement=compare(steps=(1, 3, 5)))).verdict == "inconclusive"


def test_what_is_not_finite_is_rejected_in_all_mathematics() -> None:
    assert SAME.agreement is not None
    *others, last = SAME.agreement.states
    outputs = [last.outputs[0]._replace(candidate=math.nan, shift=math.nan), *last.outputs[1:]]
    agreement = replace(SAME.agreement, states=[*others, replace(last, outputs=outputs)])
    steps = [*SAME.candidate.steps[:-1], SAME.candidate.steps[-1]._replace(loss=math.nan)]
    evidence = Evidence(SAME.baseline, replace(SAME.candidate, steps=steps), agreement)
    for numerics_effect in get_args(NumericsEffect):
        proof = prove(windows(0.5, 8, quiet(0)), evidence, numerics_effect=numerics_effect, consent=True)
        assert proof.verdict == "rejected", numerics_effect
        assert "not finite" in proof.reason


# Another order within the epoch; of those steps the samples of the whole epoch are told.
OTHER_SAMPLES = Evidence(train(), replace(train(faults=Faults(order_seed=5)), steps=train().steps))


def test_other_mathematics_need_consent_or_a_longer_check() -> None:
    evidence, fast = OTHER_SAMPLES, windows(0.5, 8, quiet(0))
    assert "--allow approximate" in prove(fast, evidence, numerics_effect="more").reason
    assert prove(fast, evidence, numerics_effect="more", consent=True).verdict == "accepted"
    before = ends(0.30, 0.31, 0.29)
    verdicts = {
        "accepted": Quality(before, ends(0.301, 0.310, 0.290), 100),
        "rejected": Quality(before, ends(0.35, 0.36, 0.34), 100),
        "inconclusive": Quality(before, ends(0.25, 0.36, 0.29), 100),
    }
    for verdict, quality in verdicts.items():
        assert prove(fast, evidence, numerics_effect="more", quality=quality).verdict == verdict


def ends(*losses: float) -> list[SeedEnd]:
    return [SeedEnd(2.0, loss) for loss in losses]


def test_a_longer_check_completes_a_proof_that_lacks_nothing_else() -> None:
    evidence, quality = OTHER_SAMPLES, Quality(ends(0.3, 0.31, 0.29), ends(0.3, 0.31, 0.29), 100)
    fast = prove(windows(0.5, 8, quiet(0)), evidence, numerics_effect="more")
    assert (fast.verdict, lacks_only_quality(fast)) == ("inconclusive", True)
    whole = with_quality(fast, True, "as good", quality)
    assert whole.verdict == "accepted"
    assert Proof.from_json(json.loads(json.dumps(whole.to_json()))) == whole
    assert with_quality(fast, False, "worse", quality).reason == "quality: worse"
    slow = prove(windows(-0.1, 8, quiet(0)), evidence, numerics_effect="more")
    frozen = prove(windows(0.5, 8, quiet(0)), evidence_of(faults=Faults(frozen="first")), numerics_effect="more")
    assert not lacks_only_quality(slow)
    assert not lacks_only_quality(frozen)


def test_what_nobody_counted_is_vouched_for_by_a_longer_check_only() -> None:
    candidate, fast = OTHER_SAMPLES.candidate, windows(0.5, 8, quiet(0))
    steps = [step._replace(real_tokens=None) for step in candidate.steps]
    no_tokens = replace(OTHER_SAMPLES, candidate=replace(candidate, steps=steps))
    assert prove(fast, no_tokens, numerics_effect="more", consent=True).verdict == "accepted"
    bare = [StepEvidence(step.loss) for step in steps]
    uncounted = replace(OTHER_SAMPLES, candidate=replace(candidate, steps=bare))
    assert prove(fast, uncounted, numerics_effect="more", consent=True).verdict == "inconclusive"
    assert lacks_only_quality(prove(fast, uncounted, numerics_effect="more"))
    unnamed = replace(OTHER_SAMPLES, candidate=Learning(steps))
    assert not lacks_only_quality(prove(fast, unnamed, numerics_effect="more"))


@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_an_approximation_must_train_the_same_parameters(side: str) -> None:
    more = replace(OTHER_SAMPLES, **{side: replace(OTHER_SAMPLES.baseline, moved=frozenset({"first", "second", "x"}))})
    proof = prove(windows(0.5, 8, quiet(0)), more, numerics_effect="more", consent=True)
    assert proof.verdict == "rejected"
    assert f"x is {'no longer' if side == 'baseline' else 'now'} updated" in proof.reason
    assert proof.change == "approximation"


@pytest.mark.parametrize("evidence", [SAME, evidence_of("bf16", Faults(factor=1.1)), OTHER_SAMPLES, None])
def test_proofs_survive_json(evidence: Evidence | None) -> None:
    proof = prove(windows(0.1, 6, quiet(0)), evidence)
    assert Proof.from_json(json.loads(json.dumps(proof.to_json()))) == proof
