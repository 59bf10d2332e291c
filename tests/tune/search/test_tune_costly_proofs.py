"""Where a proof takes much of the budget, changes are taken by their trials and proved together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from simulated_gpu import GptGpu, Gpu, gpt_sample_s, tune_gpt_on, tune_on
from simulated_machine import Machine, config_of, planted, search

from frameworm.tune.best_config import render_best
from frameworm.tune.search.result import TuneResult
from frameworm.tune.trials.outcomes import Budget, TrialResult


@pytest.mark.parametrize("slower", [0.7, 1.0, 1.5, 2.2])
def test_a_model_of_long_steps_comes_near_its_best_within_the_budget(slower: float) -> None:
    gpu = GptGpu(slower=slower)
    result = tune_gpt_on(gpu, budget_s=480.0)
    assert gpt_sample_s(result.start) / gpt_sample_s(result.best) > 1.3
    assert gpu.now_s <= 480
    assert result.total is not None
    assert result.total.verdict == "accepted"
    assert gpu.proved[-1].candidate == result.best
    assert gpu.proved[-1].last
    assert result.speedup is not None
    assert result.speedup.value == pytest.approx(gpt_sample_s(result.start) / gpt_sample_s(result.best), rel=0.02)


def test_what_has_no_proof_of_its_own_says_so() -> None:
    result = tune_gpt_on(GptGpu(slower=2.2))
    assert [item.proved_alone for item in result.accepted] == [False] * 3
    assert [item["proved_alone"] for item in result.to_json()["accepted"]] == [False] * 3
    for item in result.accepted:
        assert item.attempt.reason.endswith(" in its trial, proved with the rest")
        assert item.speedup.low > 1
    assert render_best(result, None).count("by its trial and proved with the rest") == 3


@pytest.mark.parametrize(("slower", "budget_s"), [(1.0, 480.0), (2.2, 480.0), (2.2, 700.0), (2.2, 1200.0)])
def test_what_learns_otherwise_does_not_stay(slower: float, budget_s: float) -> None:
    gpu = GptGpu(cheats=True, slower=slower)
    result = tune_gpt_on(gpu, budget_s=budget_s)
    assert "model.residual" not in result.changes
    cheat = next(item for item in result.attempts if item.label == "model.residual=half")
    assert cheat.status in ("rejected", "inconclusive")
    if result.accepted:
        assert result.best != result.start
        assert result.total is not None or result.accepted[0].proved_alone
    else:
        assert result.best == result.start
        assert result.final == result.baseline
        assert result.speedup is None


@pytest.mark.parametrize("slower", [2.6, 3.0, 4.0, 5.0])
def test_the_last_proof_takes_a_little_longer_before_all_is_lost(slower: float) -> None:
    gpu = GptGpu(slower=slower)
    result = tune_gpt_on(gpu, budget_s=480.0)
    assert 480 < gpu.now_s <= 1.15 * 480
    assert result.total is not None
    assert result.total.verdict == "accepted"
    assert gpt_sample_s(result.start) / gpt_sample_s(result.best) > 1.03


@pytest.mark.slow
def test_a_larger_budget_leaves_time_for_what_is_slow_to_start() -> None:
    """Proofs of single changes must not take the time that the largest gain needs."""
    gains = []
    for budget_s in (240.0, 300.0, 360.0, 480.0):
        result = tune_gpt_on(GptGpu(), budget_s=budget_s)
        assert "gpu.compile_model" in result.changes, budget_s
        gains.append(gpt_sample_s(result.start) / gpt_sample_s(result.best))
    assert gains == pytest.approx(sorted(gains))


def test_what_there_is_no_budget_to_prove_does_not_stay() -> None:
    gpu = GptGpu(slower=2.2, proof_s=400.0)
    result = tune_gpt_on(gpu)
    assert gpu.now_s <= 1.15 * 480
    assert result.best == result.start
    assert result.accepted == []
    taken = [item for item in result.attempts if item.gain is not None]
    assert taken
    assert {item.status for item in taken} == {"inconclusive"}
    assert all("budget" in item.reason for item in taken)


def test_such_a_search_that_was_killed_comes_to_the_same_end(tmp_path: Path) -> None:
    first = tune_gpt_on(GptGpu(slower=2.2), folder=tmp_path)
    again = GptGpu(slower=2.2)
    second = tune_gpt_on(again, folder=tmp_path)
    assert again.made == []
    assert second.to_json() == first.to_json()


def doubtful(budget_s: float, gains: bool = True) -> tuple[Machine, TuneResult]:
    """A search with one change, of which trials say that it gains 3%, or 1% less, or 7%."""

    def windows(model: Mapping[str, Any]) -> TrialResult:
        noise = (0.98, 1.02, 1.0, 0.99, 1.03) if model["a"] else (1.01, 0.99, 1.02, 1.0, 0.98)
        return TrialResult([1e-3 * (0.97 if model["a"] else 1.0) * item for item in noise], 1.0, "compute_bound", [])

    machine = Machine(lambda model: 0.97 if model["a"] and gains else 1.0, noise=0.002, results=windows)
    return machine, search(machine, [planted("a", True)], config_of(a=False), budget=Budget(time_s=budget_s))


@pytest.mark.parametrize("gains", [True, False])
def test_what_its_trial_left_in_doubt_is_proved_where_there_is_time_at_the_end(gains: bool) -> None:
    """A proof may take more of the budget than it should, and still be better than time that nobody uses."""
    machine, result = doubtful(150.0, gains)
    assert len(machine.trials) == 2, "its trial is not made again"
    assert len(machine.proofs) == 1
    assert [item.label for item in result.attempts] == ["model.a=true"]
    assert ("model.a" in result.changes) == gains
    assert result.attempts[0].status == ("accepted" if gains else "rejected")
    assert all(item.proved_alone for item in result.accepted)


def test_there_is_no_proof_at_the_end_without_time_for_it() -> None:
    machine, result = doubtful(60.0)
    assert machine.proofs == []
    assert result.changes == {}
    assert "may be noise" in result.attempts[0].reason


@pytest.mark.parametrize("budget_s", [60.0, 70.0, 80.0])
def test_the_first_proof_makes_do_with_what_is_left(budget_s: float) -> None:
    """It is taken for three trials and the start of what is compiled; that guess must not lose what is far faster."""
    gpu = Gpu()
    result = tune_on(gpu, budget_s=budget_s)
    assert "gpu.compile_model" in result.changes
    assert gpu.now_s <= budget_s
