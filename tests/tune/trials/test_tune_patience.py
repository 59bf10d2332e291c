"""How long trials and proofs may take, and what the shipped classifiers come to within that."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from classifier_gpu import CLASSIFIERS, ClassifierGpu, beside_fast, tune_classifier
from live_workloads import tricky_config
from simulated_gpu import GptGpu, tune_gpt_on

from frameworm.config.schema import Config
from frameworm.tune.knobs.context import apply_changes
from frameworm.tune.trials.outcomes import ProofRequest
from frameworm.tune.trials.patience import Limit, Patience
from frameworm.tune.trials.runner import TrialRunner


def with_gpu(**settings: object) -> Config:
    changes = {f"gpu.{key}": value for key, value in settings.items()}
    return apply_changes(tricky_config(), {"gpu.device": "cuda", **changes})


def test_the_first_that_compiles_gets_time_to_compile() -> None:
    patience = Patience(300.0)
    patience.learn(with_gpu(), 10.0)
    patience.learn(with_gpu(capture="step"), 16.0)
    assert patience.for_trial(with_gpu(compile_model=True), 120.0) == Limit(100.0, True)
    assert patience.for_trial(with_gpu(compile_model=True), 60.0) == Limit(60.0, True), "not more than is left"
    patience.learn(with_gpu(compile_model=True), 40.0)
    assert patience.for_trial(with_gpu(compile_model=True), 120.0).seconds == 80.0
    # How long another way to compile takes is not known from that.
    assert patience.for_trial(with_gpu(compile_model=True, compile_mode="max-autotune"), 400.0).seconds == 250.0
    assert patience.for_trial(with_gpu(compile_model=True, capture="step"), 120.0).seconds == 100.0
    assert patience.for_trial(with_gpu(compile_model=True, compile_scope="blocks"), 120.0).seconds == 100.0


def test_what_compiles_nothing_is_not_waited_for_for_long() -> None:
    patience = Patience(300.0)
    assert patience.for_trial(with_gpu(), None) == Limit(300.0, False)
    patience.learn(with_gpu(), 4.0)
    assert patience.for_trial(with_gpu(), 1000.0) == Limit(20.0, False)
    assert patience.for_trial(with_gpu(capture="step"), 1000.0) == Limit(250.0, True)


def test_a_proof_may_take_longer_than_it_should() -> None:
    config, patience = with_gpu(), Patience(300.0)

    def limit_s(expected_s: float, last: bool = False) -> float:
        request = ProofRequest("x", *[config] * 6, "nothing", (1e-7, 1e-7), False, "x", 100.0, last, expected_s)
        return patience.for_proof(request).seconds

    assert limit_s(20.0) == 50.0
    assert limit_s(50.0) == 75.0
    assert limit_s(90.0) == 100.0
    assert limit_s(0.0, last=True) == 100.0


@pytest.mark.parametrize("budget_s", [480.0, 330.0])
@pytest.mark.parametrize(("start_s", "compile_s"), [(6.0, 18.0), (10.0, 18.0), (14.0, 30.0)])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_the_shipped_classifiers_come_to_their_hand_made_configs(
    name: str, start_s: float, compile_s: float, budget_s: float
) -> None:
    model = CLASSIFIERS[name]
    gpu = ClassifierGpu(model, start_s, compile_s)
    result = tune_classifier(gpu, model, budget_s)
    assert beside_fast(model, result) >= 0.95, gpu.log
    assert result.total is not None
    assert result.total.verdict == "accepted"
    assert gpu.now_s <= budget_s


def test_another_precision_is_not_put_off() -> None:
    gpu = GptGpu(slower=2.0)
    result = tune_gpt_on(gpu, "gpu.mixed_precision=off", budget_s=480.0)  # one proof takes more than a tenth
    first = result.accepted[0]
    assert first.candidate.changes == {"gpu.mixed_precision": "bf16"}
    assert first.proved_alone
    assert not all(item.proved_alone for item in result.accepted)


def test_what_was_compiled_before_a_trial_was_killed_stays(tmp_path: Path) -> None:
    runner = TrialRunner(tmp_path)
    (runner.compiled / "fxgraph").mkdir()
    before, after = runner.compiled / "before", runner.compiled / "fxgraph" / "after"
    for path in (before, after):
        path.write_text("")
    since = time.time()
    os.utime(before, (since - 5, since - 5))
    os.utime(after, (since + 5, since + 5))
    runner.forget_compiled(since)
    assert before.exists()
    assert not after.exists()
    runner.close()
    assert not runner.compiled.exists()


def test_every_search_has_an_empty_compiler_cache_that_only_its_user_can_open(tmp_path: Path) -> None:
    first, resumed = TrialRunner(tmp_path), TrialRunner(tmp_path)
    assert first.compiled != resumed.compiled
    for runner in (first, resumed):
        assert runner.compiled.stat().st_mode & 0o777 == 0o700
        assert not runner.compiled.is_relative_to(tmp_path)
        assert not any(runner.compiled.iterdir())
        runner.close()


def test_the_compiler_cache_of_a_search_that_was_given_up_is_removed(tmp_path: Path) -> None:
    runner = TrialRunner(tmp_path)
    compiled = runner.compiled
    del runner
    assert not compiled.exists()
