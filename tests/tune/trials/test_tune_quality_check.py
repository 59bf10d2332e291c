"""Changes of numerics without consent: when a quality check is made, what it decides, and what is repeated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from live_workloads import learnable_config, trick_knob
from simulated_machine import Machine, config_of, planted, search
from test_tune_runner import QUICK

from frameworm.config.load import load_config
from frameworm.guard.quality import Margin, judge_quality
from frameworm.tune.knobs.context import Context, WorkloadFacts, apply_changes
from frameworm.tune.search.result import TuneResult
from frameworm.tune.trials.outcomes import Budget, QualityCheckRequest, TrialResult
from frameworm.tune.trials.quality_check import QualityChecker
from frameworm.tune.trials.runner import TrialRunner
from frameworm.tune.tuner import tune


def cost(model: Mapping[str, Any]) -> float:
    fast = {"a": 0.5, "b": 0.7}.get(model.get("sparse") or "", 1.0)
    return fast * (0.9 if model.get("plain") else 1.0)


def sparse(*values: str, **more: Any) -> Any:
    return planted("sparse", *values, numerics_effect="more", **more)


def reasons(result: TuneResult) -> dict[str, str]:
    return {item.label: item.reason for item in result.attempts}


def checked(machine: Machine, knobs: list[Any], start: Any, **more: Any) -> TuneResult:
    more.setdefault("validation", True)
    return search(machine, knobs, start, check_quality=machine.check_quality, **more)


def test_a_longer_check_speaks_for_other_mathematics() -> None:
    machine = Machine(cost)
    result = checked(machine, [sparse("a"), planted("plain", True)], config_of(sparse="", plain=False))
    assert set(result.changes) == {"model.sparse", "model.plain"}
    assert len(machine.checks) == 1, "the whole needs no check of its own"
    assert not machine.proofs[0].consent
    (sparse_one,) = [item for item in result.accepted if item.candidate.knob == "sparse"]
    assert sparse_one.checked == {"seeds": len(sparse_one.attempt.proof.quality.baseline), "steps": 1563}  # type: ignore[union-attr]
    assert result.total is not None
    assert result.total.verdict == "accepted"
    (told,) = [check.detail for check in result.total.checks if check.name == "quality"]
    assert "validation loss" in told
    stored = result.to_json()
    assert stored["total"]["quality"]["steps"] == 1563
    assert [item["checked"] is not None for item in stored["accepted"]] == [True, False]


def test_what_harms_is_rejected_and_the_next_value_is_proved() -> None:
    machine = Machine(cost)
    harmful = {"model.sparse": "a", "model.harm": 0.1}
    knob = planted("sparse", harmful, "b", numerics_effect="more")
    result = checked(machine, [knob], config_of(sparse="", harm=0.0))
    assert result.changes == {"model.sparse": ("", "b")}
    (refused,) = [item for item in result.attempts if item.changes == harmful]
    assert refused.status == "rejected"
    assert refused.reason.startswith("quality: validation loss 0.5")
    assert len(machine.checks) == 2
    assert sum(model["sparse"] == "a" for model in machine.tried) == 1, "it is not tried again"


def test_what_cannot_be_shown_to_learn_as_well_is_offered_with_both_figures() -> None:
    machine = Machine(cost, seed=1)
    blurred = {"model.sparse": "a", "model.blur": 0.05}
    knob = planted("sparse", blurred, numerics_effect="more")
    result = checked(machine, [knob], config_of(sparse="", blur=0.0))
    assert result.changes == {}
    (offer,) = result.to_json()["trade_offs"]
    assert (offer["changes"], offer["before"]) == (blurred, {"model.sparse": "", "model.blur": 0.0})
    assert offer["switch_on"] == "--set model.sparse=a --set model.blur=0.05"
    assert offer["speedup"]["value"] == pytest.approx(2, rel=0.05)
    assert offer["loss"]["low"] < 0.0045 < offer["loss"]["high"]
    assert offer["seeds"] == 4, "no number of seeds in reach would show it, so it stops at the first look"
    assert offer["seeds_needed"] > 12
    before_s, after_s = offer["same_loss_s"]
    assert before_s == pytest.approx(1563 * 64 * 1e-3, rel=0.05)
    assert after_s < before_s


def test_after_a_trade_off_the_next_value_of_the_knob_is_proved() -> None:
    def numerics_effect(value: Any) -> str:
        return "rounding" if value == "b" else "more"

    knob = planted("sparse", {"model.sparse": "a", "model.blur": 0.05}, "b", numerics_effect=numerics_effect)
    result = checked(Machine(cost, seed=1), [knob], config_of(sparse="", blur=0.0))
    assert result.changes == {"model.sparse": ("", "b")}
    assert [item.changes["model.sparse"] for item in result.trade_offs] == ["a"]


def test_what_is_worse_is_offered_only_if_it_gets_to_the_same_loss_sooner() -> None:
    for harm, count in ((0.02, 1), (1.6, 0)):
        knob = planted("sparse", {"model.sparse": "a", "model.harm": harm}, numerics_effect="more")
        result = checked(Machine(cost), [knob], config_of(sparse="", harm=0.0))
        assert result.changes == {}
        assert len(result.trade_offs) == count, harm


def test_a_wider_margin_accepts_what_costs_more() -> None:
    knob = planted("sparse", {"model.sparse": "a", "model.harm": 0.02}, numerics_effect="more")
    result = checked(Machine(cost), [knob], config_of(sparse="", harm=0.0), longer=QualityChecker(margin=Margin(0.03)))
    assert set(result.changes) == {"model.sparse", "model.harm"}
    assert result.trade_offs == []


def test_only_a_gain_is_checked_for_longer() -> None:
    machine = Machine(lambda model: 1.0 if model.get("sparse") == "" else 1.002, noise=0.02, seed=3)
    checked(machine, [sparse("a", "b")], config_of(sparse=""))
    assert machine.checks == []


def test_two_such_changes_are_checked_together() -> None:
    def cost_of_two(model: Mapping[str, Any]) -> float:
        return (0.5 if model["one"] else 1.0) * (0.7 if model["two"] else 1.0)

    machine = Machine(cost_of_two)
    knobs = [planted(name, True, numerics_effect="more") for name in ("one", "two")]
    result = checked(machine, knobs, config_of(one=False, two=False))
    assert len(result.accepted) == 2
    assert [item.baseline == result.start for item in machine.checks] == [True, False, True]
    assert machine.checks[-1].candidate == result.best


def test_the_users_own_setting_again_needs_no_check() -> None:
    def cost_with(model: Mapping[str, Any]) -> float:
        if model["late"]:
            return 0.8 if model["early"] else 0.7
        return 0.9 if model["early"] else 1.0

    early = planted("early", True, expected_gain=0.5, numerics_effect="more")
    machine = Machine(cost_with)
    result = checked(machine, [early, planted("late", True, expected_gain=0.1)], config_of(early=False, late=False))
    assert result.changes == {"model.late": (False, True)}
    assert len(machine.checks) == 1


def test_with_consent_there_is_no_longer_check() -> None:
    machine = Machine(cost)
    result = checked(machine, [sparse("a")], config_of(sparse=""), allow_approximate=True)
    assert set(result.changes) == {"model.sparse"}
    assert machine.checks == []
    assert result.accepted[0].checked is None


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"validation": False}, "needs validation data for a quality check, or --allow approximate"),
        ({"budget": Budget(time_s=300.0)}, "needs a quality check of about 1940 s, or --allow approximate"),
    ],
)
def test_what_cannot_be_checked_is_not_tried_and_says_why(more: dict[str, Any], reason: str) -> None:
    machine = Machine(cost, noise=0.0)
    result = checked(machine, [sparse("a")], config_of(sparse=""), **more)
    assert result.changes == {}
    assert len(machine.trials) == 1
    assert reasons(result)["model.sparse=a"] == f"changes more than rounding: {reason}"


def test_a_check_that_takes_most_of_the_budget_waits_for_the_rest() -> None:
    machine = Machine(cost, noise=0.001)
    # 1940 s would leave little of 2500 s, but all else takes 60 s.
    knobs = [planted("sparse", "a", numerics_effect="more", expected_gain=0.9), planted("plain", True)]
    result = checked(machine, knobs, config_of(sparse="", plain=False), budget=Budget(time_s=2500.0))
    assert [item.candidate.knob for item in result.accepted] == ["plain", "sparse"]
    assert result.total is not None


def test_a_value_that_could_not_be_checked_is_listed_beside_one_that_was_accepted() -> None:
    knob = planted("sparse", "a", "b", numerics_effect=lambda value: "more" if value == "a" else "rounding")
    result = checked(Machine(cost), [knob], config_of(sparse=""), budget=Budget(time_s=300.0))
    assert result.changes == {"model.sparse": ("", "b")}
    assert "needs a quality check of about" in reasons(result)["model.sparse=a"]
    assert result.stopped == "all was tried that the budget has time for; model.sparse=a needs a quality check"


def test_a_check_for_which_too_little_is_left_is_not_begun() -> None:
    machine = Machine(cost, noise=0.0, setup=lambda model: 200.0 if model["sparse"] else 1.0)
    budget = Budget(time_s=2800.0)  # its start takes longer than anybody knew
    result = checked(machine, [sparse("a")], config_of(sparse=""), budget=budget)
    assert machine.checks == []
    told = reasons(result)["model.sparse=a"]
    assert result.attempts[0].status == "inconclusive"
    assert told.startswith("quality: changes more than rounding: needs a quality check of about 3")
    assert "its gain is proved: 2.000 x" in told


@pytest.mark.parametrize("die_after", range(6))
def test_a_killed_search_repeats_no_finished_check(tmp_path: Path, die_after: int) -> None:
    def start() -> tuple[Machine, list[Any], Any]:
        return Machine(cost), [sparse("a"), planted("plain", True)], config_of(sparse="", plain=False)

    machine, knobs, config = start()
    whole = checked(machine, knobs, config)
    assert whole.trials == 7
    first, _, _ = start()
    first.die_after = die_after
    with pytest.raises(KeyboardInterrupt):
        checked(first, knobs, config, folder=tmp_path)
    second, _, _ = start()
    result = checked(second, knobs, config, folder=tmp_path)
    assert len(first.checks) + len(second.checks) == 1
    assert result.changes == whole.changes
    assert result.trials == whole.trials
    third, _, _ = start()
    again = checked(third, knobs, config, folder=tmp_path)
    assert (third.trials, third.proofs, third.checks) == ([], [], [])
    assert again.to_json()["accepted"] == result.to_json()["accepted"]


def test_a_check_is_a_share_of_the_run_but_not_too_short() -> None:
    def steps(samples: int | None) -> int:
        config = config_of()
        config.training.epochs = 1
        return QualityChecker().steps(Context(config, workload=WorkloadFacts(samples_per_epoch=samples)))

    assert [steps(64 * count) for count in (50, 400, 5000)] == [50, 100, 500]
    assert steps(None) == 100
    context = Context(config_of(), workload=WorkloadFacts(samples_per_epoch=640, validation_samples=300))
    trial, faster = TrialResult((0.01,), 0.5), TrialResult((0.005,), 0.5)
    # 100 steps are ten epochs, each with its validation, and two more on the way; eight seeds, a fifth more to be safe.
    assert QualityChecker().seconds(context, trial, faster) == pytest.approx(1.2 * 8 * ((6400 + 1200) * 0.015 + 1.0))


# Real trainings

SHORT = QualityChecker(share=0.01, least_steps=64, looks=(3, 6))


@pytest.mark.slow
@pytest.mark.timing
def test_real_trainings_tell_what_harms_from_what_does_not(tmp_path: Path) -> None:
    knob = trick_knob("half", "good", numerics_effect="more")
    # A run so long that no start, however slow, is worth more than what its steps save; a hundredth of it is 64 steps.
    start = apply_changes(learnable_config(pause_s=1.5e-3), {"training.epochs": 100})
    result = tune(start, tmp_path, budget=Budget(200.0), knobs=[knob], effort=QUICK, longer=SHORT)
    told = {item.label: item for item in result.attempts}
    assert told["model.trick=half"].status in ("rejected", "inconclusive"), told["model.trick=half"].reason
    assert told["model.trick=half"].reason.startswith("quality: validation loss")
    assert result.changes == {"model.trick": ("none", "good")}, told["model.trick=good"].reason
    assert result.accepted[0].checked == {"seeds": 3, "steps": 64}
    text = (tmp_path / "best.yaml").read_text()
    assert "paired trainings show that it learns as well" in text
    assert "learns as well in 3 paired trainings of 64 steps" in " ".join(text.replace("#", "").split())
    assert load_config(tmp_path / "best.yaml", []) == result.best
    page = (tmp_path / "report.html").read_text()
    assert "Validation at the end of the paired trainings" in page
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines if line["event"] == "end"].count("check") == 2


@pytest.mark.slow
def test_real_trainings_find_a_frozen_layer_and_half_the_learning_rate(tmp_path: Path) -> None:
    runner, start = TrialRunner(tmp_path), learnable_config()
    for name, other in (
        ("freeze", learnable_config("freeze")),
        ("slower", apply_changes(start, {"training.lr": start.training.lr / 2})),
    ):
        result = runner.check_quality(QualityCheckRequest(name, start, other, 64, (3,), 20.0, name, timeout_s=120.0))
        assert result.failure is None
        assert result.quality is not None
        judged = judge_quality(result.quality)
        assert judged.passed is False, judged.detail
        assert {end.samples for end in (*result.quality.baseline, *result.quality.candidate)} == {1024}


def test_a_check_that_takes_too_long_ends_in_time(tmp_path: Path) -> None:
    slow = learnable_config(pause_s=0.01)
    request = QualityCheckRequest("slow", slow, learnable_config(), 64, (4,), 1.0, "slow", timeout_s=2.0)
    result = TrialRunner(tmp_path).check_quality(request)
    assert result.quality is None
    assert result.failure is not None
    assert result.failure.kind == "hang"
