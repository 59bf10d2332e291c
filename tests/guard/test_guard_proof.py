from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from statistics import median

import pytest
from small_training import exact, to_bf16, train

from frameworm.guard.drift import ROUNDING_UNITS, check_losses, push_of, step_noise
from frameworm.guard.gain import LEAST_PAIRS, Window, pair_windows, speedup_of
from frameworm.guard.proof import (
    Evidence,
    Learning,
    Mathematics,
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


def same_learning(unit: float = ROUNDING_UNITS["fp32"]) -> Evidence:
    side = train()
    return Evidence(side, side, [train(push=unit, push_seed=1), train(push=unit, push_seed=2)], unit)


SAME = same_learning()


def verdict_of(evidence: Evidence, mathematics: Mathematics = "rounding") -> Proof:
    return prove(windows(0.1, 6, quiet(0)), evidence, mathematics=mathematics)


def evidence_of(candidate: Learning, precision: str = "bf16") -> Evidence:
    unit = ROUNDING_UNITS[precision]
    references = [train(push=unit, push_seed=seed) for seed in (1, 2)]
    return Evidence(train(), candidate, references, unit)


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
def test_null_changes_are_accepted_in_at_most_five_of_a_hundred(
    make: Callable[[int], Callable[[], float]], pairs: int
) -> None:
    tries = 200
    accepted = sum(prove(windows(0.0, pairs, make(seed)), SAME).verdict == "accepted" for seed in range(tries))
    assert accepted <= 0.05 * tries


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
    for seed in range(3):
        unit = ROUNDING_UNITS["bf16"]
        references = [train(seed=seed, push=unit, push_seed=push) for push in (1, 2)]
        proof = verdict_of(Evidence(train(seed=seed), train(seed=seed, rounding=to_bf16), references, unit))
        assert proof.verdict == "accepted", proof.reason


def test_sums_in_another_order_are_accepted() -> None:
    candidate = train(reverse=True)
    assert candidate.losses != train().losses
    assert verdict_of(evidence_of(candidate, "fp32")).verdict == "accepted"


def test_a_precision_coarser_than_declared_is_rejected() -> None:
    proof = verdict_of(evidence_of(train(rounding=to_bf16), "fp32"))
    assert proof.verdict == "rejected"
    assert "loss" in proof.reason


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lie", [False, True])
def test_half_the_batch_is_rejected(precision: str, lie: bool) -> None:
    rounding = to_bf16 if precision == "bf16" else exact
    proof = verdict_of(evidence_of(train(kept=16, lie=lie, rounding=rounding), precision))
    assert proof.verdict == "rejected"
    failed = {check.name for check in proof.checks if check.passed is False}
    assert "loss" in failed
    assert lie or {"samples", "real tokens"} <= failed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layer", ["first", "second"])
def test_a_frozen_layer_is_rejected_by_name_and_by_loss(precision: str, layer: str) -> None:
    rounding = to_bf16 if precision == "bf16" else exact
    frozen = train(frozen=layer, rounding=rounding)
    proof = verdict_of(evidence_of(frozen, precision))
    assert proof.verdict == "rejected"
    assert f"{layer} is no longer updated" in proof.reason
    unnamed = verdict_of(evidence_of(Learning(frozen.steps, None), precision))
    assert unnamed.verdict == "rejected"
    assert unnamed.reason.startswith("loss")


def test_what_another_seed_does_is_not_rounding() -> None:
    for other in (train(order_seed=5), train(seed=5, order_seed=0), train(lr=0.0125)):
        hidden = Learning([step._replace(samples=None, real_tokens=None) for step in other.steps], None)
        assert verdict_of(evidence_of(hidden)).verdict == "rejected"


def test_unknown_samples_are_vouched_for_by_the_losses() -> None:
    candidate = train(rounding=to_bf16)
    hidden = Learning([StepEvidence(step.loss) for step in candidate.steps], None)
    proof = verdict_of(evidence_of(hidden))
    assert proof.verdict == "accepted"
    assert {check.name for check in proof.checks if check.passed is None} == {"samples", "real tokens", "parameters"}


def test_nothing_is_accepted_without_evidence_or_with_too_few_steps() -> None:
    assert prove(windows(0.5, 8, quiet(0)), None).verdict == "inconclusive"
    short = train(steps=4)
    proof = verdict_of(Evidence(short, short, [], ROUNDING_UNITS["fp32"]))
    assert proof.verdict == "inconclusive"


def test_a_loss_that_is_not_finite_is_rejected_in_all_mathematics() -> None:
    candidate = train()
    steps = [*candidate.steps[:-1], StepEvidence(math.nan, *candidate.steps[-1][1:])]
    for mathematics in ("rounding", "more"):
        proof = prove(
            windows(0.5, 8, quiet(0)),
            evidence_of(Learning(steps, candidate.updates)),
            mathematics=mathematics,
            consent=True,  # type: ignore[arg-type]
        )
        assert proof.verdict == "rejected"
        assert "not finite" in proof.reason


def test_other_mathematics_need_consent_or_a_longer_check() -> None:
    evidence, fast = evidence_of(train(lr=0.0115)), windows(0.5, 8, quiet(0))
    assert "--allow approximate" in prove(fast, evidence, mathematics="more").reason
    assert prove(fast, evidence, mathematics="more", consent=True).verdict == "accepted"
    before = ends(0.30, 0.31, 0.29)
    verdicts = {
        "accepted": Quality(before, ends(0.301, 0.310, 0.290), 100),
        "rejected": Quality(before, ends(0.35, 0.36, 0.34), 100),
        "inconclusive": Quality(before, ends(0.25, 0.36, 0.29), 100),
    }
    for verdict, quality in verdicts.items():
        assert prove(fast, evidence, mathematics="more", quality=quality).verdict == verdict


def ends(*losses: float) -> list[SeedEnd]:
    return [SeedEnd(2.0, loss) for loss in losses]


def test_a_longer_check_completes_a_proof_that_lacks_nothing_else() -> None:
    evidence, quality = evidence_of(train(lr=0.0115)), Quality(ends(0.3, 0.31, 0.29), ends(0.3, 0.31, 0.29), 100)
    fast = prove(windows(0.5, 8, quiet(0)), evidence, mathematics="more")
    assert (fast.verdict, lacks_only_quality(fast)) == ("inconclusive", True)
    whole = with_quality(fast, True, "as good", quality)
    assert whole.verdict == "accepted"
    assert Proof.from_json(json.loads(json.dumps(whole.to_json()))) == whole
    assert with_quality(fast, False, "worse", quality).reason == "quality: worse"
    slow = prove(windows(-0.1, 8, quiet(0)), evidence, mathematics="more")
    frozen = prove(windows(0.5, 8, quiet(0)), evidence_of(train(frozen="first")), mathematics="more")
    assert not lacks_only_quality(slow)
    assert not lacks_only_quality(frozen)


def test_what_nobody_counted_is_vouched_for_by_a_longer_check_only() -> None:
    candidate, fast = train(lr=0.0115), windows(0.5, 8, quiet(0))
    steps = [step._replace(real_tokens=None) for step in candidate.steps]
    no_tokens = evidence_of(Learning(steps, candidate.updates))
    assert prove(fast, no_tokens, mathematics="more", consent=True).verdict == "accepted"
    uncounted = evidence_of(Learning([StepEvidence(step.loss) for step in steps], candidate.updates))
    assert prove(fast, uncounted, mathematics="more", consent=True).verdict == "inconclusive"
    assert lacks_only_quality(prove(fast, uncounted, mathematics="more"))
    unnamed = evidence_of(Learning(steps, None))
    assert not lacks_only_quality(prove(fast, unnamed, mathematics="more"))


@pytest.mark.parametrize(
    ("factor", "as_rounding", "as_more"),
    [
        (1.2, "accepted", "accepted"),
        (1.6, "rejected", "accepted"),
        (2.5, "rejected", "rejected"),
        (0.0, *["rejected"] * 2),
    ],
)
def test_other_samples_in_each_step_may_move_parameters_a_little_otherwise(
    factor: float, as_rounding: str, as_more: str
) -> None:
    side = train()
    assert side.updates is not None
    name = next(iter(side.updates))
    evidence = evidence_of(Learning(side.steps, {**side.updates, name: factor * side.updates[name]}))
    pairs = windows(0.1, 6, quiet(0))
    assert prove(pairs, evidence, mathematics="rounding").verdict == as_rounding
    assert prove(pairs, evidence, mathematics="more", consent=True).verdict == as_more


def test_a_parameter_that_rounding_alone_moves_may_move_otherwise() -> None:
    side = train()
    noisy = {**side.updates, "key_bias": 1e-5}  # type: ignore[dict-item]
    still = {**side.updates, "key_bias": 0.0}  # type: ignore[dict-item]
    baseline, candidate = Learning(side.steps, noisy), Learning(side.steps, still)
    unit = ROUNDING_UNITS["fp32"]
    pushed = train(push=unit)
    steady = Evidence(baseline, candidate, [Learning(pushed.steps, noisy)], unit)
    assert verdict_of(steady).verdict == "rejected"
    fickle = Evidence(baseline, candidate, [Learning(pushed.steps, still)], unit)
    assert verdict_of(fickle).verdict == "accepted"


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (1e-5, 2e-2, "accepted"),  # shares of the median update: another precision moves it, but not as others are
        (1e-5, 1.5, "rejected"),
        (1e-5, 0.0, "rejected"),
        (5e-3, 0.5, "accepted"),  # BERT on a GPU, from fp32 to bf16
        (2e-2, 0.5, "rejected"),
        (0.5, 1e-5, "rejected"),
    ],
)
def test_a_parameter_without_a_gradient_may_be_moved_by_a_coarser_rounding(
    before: float, after: float, verdict: str
) -> None:
    side = train()
    assert side.updates is not None
    usual = median(side.updates.values())
    baseline, candidate = (
        Learning(side.steps, {**side.updates, "key_bias": share * usual}) for share in (before, after)
    )
    unit = ROUNDING_UNITS["bf16"]
    references = [Learning(train(push=unit).steps, baseline.updates)]
    assert verdict_of(Evidence(baseline, candidate, references, unit)).verdict == verdict


def test_references_are_moved_by_what_sums_differ_by() -> None:
    assert push_of(ROUNDING_UNITS["fp32"]) > 10 * ROUNDING_UNITS["fp32"]
    for precision in ("tf32", "fp16", "bf16"):
        assert push_of(ROUNDING_UNITS[precision]) == pytest.approx(ROUNDING_UNITS[precision], rel=0.01)


def test_noise_of_steps_ignores_the_trend() -> None:
    draw = random.Random(0)
    trend = [5 - 0.1 * step for step in range(200)]
    assert step_noise(trend) == pytest.approx(0, abs=1e-9)
    assert step_noise([value + draw.gauss(0, 0.1) for value in trend]) == pytest.approx(0.1, rel=0.25)


def test_curves_stop_counting_once_rounding_has_grown_to_the_noise_of_steps() -> None:
    draw = random.Random(0)
    curve = [2 + draw.gauss(0, 0.1) for _ in range(60)]
    wild = [value + 1e-6 * 2**step for step, value in enumerate(curve)]
    check = check_losses(curve, wild, [wild], ROUNDING_UNITS["fp32"])
    assert check.passed is True
    assert 8 <= check.counted_steps <= 16


def test_proofs_survive_json() -> None:
    proof = verdict_of(SAME)
    assert Proof.from_json(json.loads(json.dumps(proof.to_json()))) == proof
