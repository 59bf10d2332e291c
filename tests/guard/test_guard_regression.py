"""The verdict of the guard: few false alarms, few misses, and a reason for everything else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from synthetic_runs import CORRELATED, LIVELY, MACHINE, QUIET, Noise, figures, times

from frameworm.errors import BaselineError, ConfigError
from frameworm.guard.comparison import compare_runs
from frameworm.guard.limits import Limits, parse_limit
from frameworm.guard.regression import GuardVerdict, check_fit, judge
from frameworm.guard.run_metrics import Work
from frameworm.records.estimate import Estimate

CASES = pytest.mark.parametrize(
    ("noise", "steps"), [(QUIET, 60), (QUIET, 300), (LIVELY, 400), (CORRELATED, 1000)], ids=str
)


def _verdicts(noise: Noise, steps: int, factor: float, baseline_runs: int = 1) -> list[str]:
    found = []
    for seed in range(20):
        before = [figures(times(1000 * seed + index, noise, steps)) for index in range(baseline_runs)]
        after = figures([value * factor for value in times(1000 * seed + 500, noise, steps)])
        found.append(judge(before, [after]).verdict)
    return found


@CASES
def test_the_same_program_raises_no_alarm(noise: Noise, steps: int) -> None:
    verdicts = _verdicts(noise, steps, 1.0)
    assert verdicts.count("regression") <= 1
    assert verdicts.count("ok") >= 16, "a guard that never says ok is of no use"


@CASES
def test_a_tenth_slower_is_caught(noise: Noise, steps: int) -> None:
    assert _verdicts(noise, steps, 1.1).count("regression") >= 19


def test_several_baseline_runs_serve_as_well() -> None:
    assert _verdicts(QUIET, 120, 1.0, baseline_runs=4).count("regression") == 0
    assert _verdicts(QUIET, 120, 1.1, baseline_runs=4).count("regression") == 20


def test_runs_that_differ_by_themselves_need_more_to_alarm() -> None:
    unsteady = replace(QUIET, between=0.08)
    before = [figures(times(seed, unsteady, 200)) for seed in range(5)]
    after = figures([value * 1.06 for value in times(0, replace(QUIET, between=0.0), 200)])
    judgement = judge(before, [after])
    assert judgement.verdict == "inconclusive"
    assert judgement.spread_learned
    assert judgement.run_spread is not None
    assert judgement.run_spread > 0.04


def test_stalls_are_a_regression_even_if_the_typical_step_is_not() -> None:
    before = times(1, QUIET, 3000)
    after = [value * 10 if index % 100 == 7 else value for index, value in enumerate(times(2, QUIET, 3000))]
    checks = {check.name: check for check in judge([figures(before)], [figures(after)]).checks}
    assert checks["typical_step"].verdict == "ok"
    assert checks["mean_step"].verdict == "regression"
    assert checks["mean_step"].change == pytest.approx(0.09, abs=0.03)


def test_slower_checkpoints_are_a_regression() -> None:
    before, after = figures(times(1, QUIET, 300)), figures(times(2, QUIET, 300))
    before.phases["checkpoint"] = Estimate(0.001, 0.0001)
    after.phases["checkpoint"] = Estimate(0.009, 0.0003)
    judgement = judge([before], [after])
    assert {check.name for check in judgement.checks if check.verdict == "regression"} == {"pauses"}
    assert judgement.explanation is not None
    assert judgement.explanation.phase == "checkpoint"
    after.phases["checkpoint"] = Estimate(0.009, 0.0045)  # there was one, and it may have been bad luck
    assert judge([before], [after]).verdict == "inconclusive"
    after.steps += 100
    assert judge([before], [after]).verdict == "ok"


def test_one_hiccup_is_no_regression() -> None:
    after = times(2, QUIET, 300)
    after[150] = 3.0  # a quarter of the whole run
    assert judge([figures(times(1, QUIET, 300))], [figures(after)]).verdict == "inconclusive"


def test_what_cannot_be_judged_hides_no_regression() -> None:
    before = figures(times(1, QUIET, 300), quality={"val_accuracy": 0.96})
    hiccup = times(2, QUIET, 300)
    hiccup[150] += 3.0
    judgement = judge([before], [figures(hiccup, quality={"val_accuracy": 0.5})])
    assert {"inconclusive", "regression"} <= {check.verdict for check in judgement.checks}
    assert judgement.verdict == "regression"
    assert judgement.exit_code == 1


def test_faster_is_ok() -> None:
    after = [value * 0.5 for value in times(2, QUIET, 300)]
    assert judge([figures(times(1, QUIET, 300))], [figures(after)]).verdict == "ok"


def test_a_limit_that_cannot_be_seen_is_not_ok() -> None:
    noisy = Noise(scatter=0.3, memory=0.98, white=0.1, outliers=0.0, outlier_size=2.0, drift=0.0, between=0.0)
    judgement = judge([figures(times(3, noisy, 100))], [figures(times(4, noisy, 100))])
    assert judgement.verdict == "inconclusive"
    assert judgement.exit_code == 3


def _judge_changed(**values: object) -> GuardVerdict:
    limits = values.pop("limits", None)
    assert limits is None or isinstance(limits, Limits)
    return judge([figures(times(1, QUIET, 300))], [figures(times(2, QUIET, 300), "new", **values)], limits)


def test_another_machine_is_inconclusive_unless_told() -> None:
    other = {**MACHINE, "cpu_model": "Another CPU"}
    before, after = [figures(times(1, QUIET, 300))], [figures(times(2, QUIET, 300), environment=other)]
    judgement = judge(before, after)
    assert judgement.exit_code == 3
    assert "cpu_model is Another CPU" in judgement.reasons[0]
    assert judge(before, after, allow_different_hardware=True).verdict == "ok"
    assert _judge_changed(world_size=2).verdict == "inconclusive"


def test_other_versions_are_told_and_not_refused() -> None:
    judgement = _judge_changed(environment={**MACHINE, "torch": "9.9"})
    assert judgement.verdict == "ok"
    assert [item.name for item in judgement.environment] == ["torch"]


@pytest.mark.parametrize(("size", "verdict"), [(400, "ok"), (430, "ok"), (480, "regression")])
def test_memory(size: int, verdict: str) -> None:
    assert _judge_changed(memory={"host_bytes": size * 2**20}).verdict == verdict


@pytest.mark.parametrize(("mfu", "verdict"), [(0.41, "ok"), (0.39, "ok"), (0.36, "regression"), (None, "not judged")])
def test_mfu_may_drop_by_so_much_and_rise_at_will(mfu: float | None, verdict: str) -> None:
    before = [figures(times(1, QUIET, 300), mfu=0.4)]
    after = [figures(times(2, QUIET, 300), mfu=mfu)]
    checks = {check.name: check.verdict for check in judge(before, after, Limits(mfu_drop=0.05)).checks}
    assert checks["mfu"] == verdict
    assert "mfu" not in {check.name for check in judge(before, after).checks}


def test_device_memory_has_its_own_check() -> None:
    before = [figures(times(1, QUIET, 300), memory={"device_bytes": 10 * 2**30, "host_bytes": 2**30})]
    after = [figures(times(2, QUIET, 300), memory={"device_bytes": 12 * 2**30, "host_bytes": 2**30})]
    checks = {check.name: check.verdict for check in judge(before, after).checks}
    assert checks["device_memory"] == "regression"
    assert checks["host_memory"] == "ok"
    assert judge(before, after, Limits(memory=0.25)).verdict == "ok"
    assert judge(before, after, Limits(memory=None)).verdict == "ok"


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("val_accuracy", 0.96, "ok"),
        ("val_accuracy", 0.94, "regression"),
        ("val_accuracy", 0.99, "ok"),
        ("val_loss", 0.20, "regression"),
        ("train_loss", 0.20, "regression"),
        ("train_loss", 0.10, "ok"),
        ("train_loss", math.nan, "regression"),
        ("val_accuracy", math.nan, "regression"),
    ],
)
def test_quality(name: str, value: float, verdict: str) -> None:
    quality = {"val_accuracy": 0.964, "val_loss": 0.164, "train_loss": 0.153, name: value}
    assert _judge_changed(quality=quality).verdict == verdict


def test_quality_of_another_length_is_not_judged() -> None:
    judgement = _judge_changed(steps=999, quality={"val_accuracy": 0.1})
    assert judgement.verdict == "ok"
    assert {check.verdict for check in judgement.checks if check.name == "val_accuracy"} == {"not judged"}


def test_quality_that_varies_in_the_baseline_needs_more() -> None:
    before = [
        figures(times(seed, QUIET, 300), quality={"val_accuracy": value})
        for seed, value in enumerate((0.90, 0.96, 0.93, 0.98))
    ]
    after = figures(times(9, QUIET, 300), quality={"val_accuracy": 0.92})
    assert judge(before, [after]).verdict == "inconclusive"
    assert judge(before, [figures(times(9, QUIET, 300), quality={"val_accuracy": 0.5})]).verdict == "regression"


@pytest.mark.parametrize("status", ["failed", "interrupted", "preempted", "unfinished"])
def test_only_completed_runs_are_judged(status: str) -> None:
    judgement = _judge_changed(status=status)
    assert judgement.exit_code == 3
    assert status in judgement.reasons[0]
    run = figures(times(1, QUIET, 300), status=status)
    with pytest.raises(BaselineError, match=status):
        judge([run], [figures(times(2, QUIET, 300))])
    with pytest.raises(BaselineError, match=status):
        check_fit([run])


def test_a_few_steps_are_inconclusive() -> None:
    judgement = judge([figures(times(1, QUIET, 300))], [figures(times(2, QUIET, 8))])
    assert judgement.exit_code == 3
    assert "too short: 8 steps" in judgement.reasons[0]


@pytest.mark.parametrize(
    "work",
    [
        Work("text_classifier", "generated", 32, 127_364),
        Work("text_classifier", "generated", 64, 99),
        Work("text_classifier", "imdb", 64, 127_364),
        Work("text_classifier", "generated", 64, 127_364, tokens_per_step=650.0),
    ],
)
def test_other_work_is_refused(work: Work) -> None:
    with pytest.raises(BaselineError, match="other work"):
        _judge_changed(work=work)


def test_the_phase_that_grew_explains_it() -> None:
    after = figures([value * 1.3 for value in times(2, QUIET, 300)])
    whole = after.mean_step_s
    assert whole is not None
    after.phases = {"forward": Estimate(0.01, 1e-5), "backward": Estimate(whole - 0.01, 1e-4)}
    judgement = judge([figures(times(1, QUIET, 300))], [after])
    assert judgement.verdict == "regression"
    assert judgement.explanation is not None
    assert judgement.explanation.phase == "backward"
    assert judgement.explanation.share > 0.9


def test_a_crowded_machine_raises_no_alarm() -> None:
    """Two real runs of one program at once on two cores: each twice as slow as alone."""
    slow = [value * 1.4 for value in times(2, QUIET, 300)]
    assert judge([figures(times(1, QUIET, 300))], [figures(slow)]).verdict == "regression"
    judgement = judge([figures(times(1, QUIET, 300))], [figures(slow, crowding=0.5)])
    assert judgement.verdict == "inconclusive"
    assert any("itself" in note for note in judgement.notes)


def test_other_batches_are_compared_by_sample() -> None:
    before = figures(times(1, QUIET, 300))
    after = figures([value * 2 for value in times(2, QUIET, 300)])
    after.work = Work("text_classifier", "generated", 128, 127_364, 2600.0, 128.0)
    comparison = compare_runs(before, after)
    assert comparison.per_sample
    assert comparison.typical is not None
    assert comparison.typical.value == pytest.approx(1.0, abs=0.05)
    assert {item.name for item in comparison.work} == {"global_batch", "tokens_per_step"}


@pytest.mark.parametrize(("text", "value"), [("5%", 0.05), ("0.05", 0.05), (0.1, 0.1), ("off", None), ("150%", 1.5)])
def test_limits(text: str | float, value: float | None) -> None:
    assert parse_limit(text, "--max") == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize("text", ["5", "-1%", "fast", "", "nan", "%"])
def test_limits_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(ConfigError, match="--max"):
        parse_limit(text, "--max")
