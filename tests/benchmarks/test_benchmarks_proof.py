"""A sample of the campaigns against the proof, and the arithmetic of its rates."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FAULTS = [
    ("gradient x 1.005 of one layer", "denoiser"),
    ("half of all gradients (mean over ranks twice)", "recommender"),
    ("a layer frozen", "pictures"),
    ("weight decay of one parameter lost", "denoiser"),
    ("stale weights of one layer", "recommender"),
    ("not clipped", "pictures"),
    ("dropout a quarter", "recommender"),
    ("last micro-batch dropped", "tagger"),
]
HONEST = [
    ("smaller micro-batches", "tagger"),
    ("activation checkpointing", "encoder"),
    ("bf16", "pictures"),
    ("another loader", "recommender"),
]
SAME = ["encoder", "pictures", "denoiser", "recommender"]


@pytest.fixture
def proof(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import proof

    yield proof
    for name in ("harness", "proof", "proof_cases"):
        sys.modules.pop(name, None)


def trial_of(proof: ModuleType, campaign: str, label: str, model: str) -> Any:
    """The first of a campaign."""
    found = proof.trials("cpu", seeds=1, same=len(proof.MODELS), compiled=False)
    return next(item for item in found if (item.campaign, item.label, item.model) == (campaign, label, model))


@pytest.mark.slow
@pytest.mark.parametrize(("label", "model"), FAULTS)
def test_planted_faults_are_refused(proof: ModuleType, label: str, model: str) -> None:
    verdict, _ = proof.compare(trial_of(proof, "faults", label, model), "cpu")
    assert verdict.passed is False, verdict.detail


@pytest.mark.slow
@pytest.mark.parametrize(("label", "model"), HONEST)
def test_honest_changes_are_accepted(proof: ModuleType, label: str, model: str) -> None:
    verdict, agreement = proof.compare(trial_of(proof, "honest", label, model), "cpu")
    assert verdict.passed is True, verdict.detail
    assert agreement.reference == "fp64"


@pytest.mark.slow
@pytest.mark.parametrize("model", SAME)
def test_nothing_is_not_taken_for_a_change(proof: ModuleType, model: str) -> None:
    verdict, _ = proof.compare(trial_of(proof, "same", "nothing changed", model), "cpu")
    assert verdict.passed is True, verdict.detail


def test_campaigns_hold_every_fault_and_some_of_everything(proof: ModuleType) -> None:
    on_cpu = list(proof.trials("cpu", seeds=2, same=6, compiled=False))
    on_gpu = list(proof.trials("cuda", seeds=2, same=6, compiled=True))
    assert {item.label for item in on_cpu if item.campaign == "faults"} == set(proof.FAULTS)
    assert {item.label for item in on_gpu if item.campaign == "honest"} == set(proof.HONEST)
    assert not {item.label for item in on_cpu} & {*proof.GPU_ONLY, *proof.COMPILED}
    assert {item.model for item in on_cpu if item.campaign == "same"} == set(proof.MODELS)
    seeds = [(item.model, item.seed, item.label) for item in on_gpu]
    assert len(set(seeds)) == len(seeds), "none is made twice"


def row(campaign: str, passed: bool | None, *, failed: bool = False) -> dict[str, Any]:
    wrong = failed or (passed is True) == (campaign == "faults")
    return {"campaign": campaign, "passed": passed, "failed": failed, "wrong": wrong}


def test_rates_are_counted_by_campaign(proof: ModuleType) -> None:
    rows = [row("faults", False)] * 3 + [row("faults", None, failed=True)] + [row("same", True), row("same", None)]
    assert proof.summarise(rows) == [("faults", 4, 0, 3, 0, 1), ("same", 2, 1, 0, 1, 0)]


@pytest.mark.parametrize(
    ("wrong", "too_high"),
    [
        ([], False),
        ([row("faults", True)], True),
        ([row("faults", None, failed=True)], True),
        ([row("honest", False)], False),  # one of a hundred
        ([row("honest", None)] * 4, True),
        ([row("same", False)] * 3, True),
    ],
)
def test_a_rate_that_is_too_high_fails_the_benchmark(proof: ModuleType, wrong: Any, too_high: bool) -> None:
    fine = [row("faults", False), row("honest", True), row("same", True)] * 100
    assert proof.too_high([*fine, *wrong]) is too_high
