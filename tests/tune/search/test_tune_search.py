from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from simulated_machine import BASE_S, Machine, config_of, model_of, planted, search

from frameworm.errors import RunFolderError
from frameworm.tune.search.journal import JOURNAL_NAME, SUMMARY_NAME
from frameworm.tune.search.result import Attempt, Progress, TuneResult
from frameworm.tune.trials.outcomes import Budget, Failure, TrialResult


def attempt_of(result: TuneResult, knob: str) -> Attempt:
    return next(item for item in result.attempts if item.knob == knob)


def switches(model: Mapping[str, Any], **factors: float) -> float:
    return math.prod(factor for name, factor in factors.items() if model.get(name))


def test_ten_percent_are_found_and_nothing_is_not_claimed() -> None:
    for seed in range(5):
        machine = Machine(lambda model: switches(model, real=1 / 1.1), seed=seed)
        knobs = [planted("real", True), *(planted(f"null{i}", True) for i in range(6))]
        start = {"real": False, **{f"null{i}": False for i in range(6)}}
        result = search(machine, knobs, config_of(**start))
        assert result.changes == {"model.real": (False, True)}
        assert result.speedup is not None
        assert result.speedup.low <= 1.1 <= result.speedup.high


@pytest.mark.parametrize("cheat", ["half_batch", "freeze"])
def test_a_knob_that_skips_work_is_rejected_by_the_proof(cheat: str) -> None:
    machine = Machine(lambda model: switches(model, **{cheat: 0.5}))
    result = search(machine, [planted(cheat, True)], config_of(**{cheat: False}))
    assert result.changes == {}
    told = attempt_of(result, cheat)
    assert told.status == "rejected"
    assert told.screened == pytest.approx(2, rel=0.1)
    assert told.reason.startswith("agreement: ")
    assert "gradient of" in told.reason


def test_what_skips_work_is_not_tried_again_in_combinations() -> None:
    def cost(model: Mapping[str, Any]) -> float:
        return switches(model, half_batch=0.5, even=0.995, real=0.9)

    names = ("half_batch", "even", "real")
    machine = Machine(cost)
    knobs = [planted(name, True, partners=names) for name in names]
    result = search(machine, knobs, config_of(**dict.fromkeys(names, False)))
    assert result.changes.keys() <= {"model.real", "model.even"}
    assert sum(model["half_batch"] for model in machine.tried) == 1


def test_failures_are_listed_with_their_reasons_and_the_search_goes_on() -> None:
    failures = {
        "eats": TrialResult(failure=Failure("oom", "CUDA out of memory")),
        "hangs": TrialResult(failure=Failure("hang", "no step for 60 s")),
        "graph": TrialResult(failure=Failure("capture_refused", "model.py:41")),
        "empty": TrialResult(),
    }

    def cost(model: Mapping[str, Any]) -> float:
        if model.get("raises"):
            raise ValueError("planted")
        return switches(model, real=0.8)

    def results(model: Mapping[str, Any]) -> TrialResult | None:
        return next((failures[name] for name in failures if model.get(name)), None)

    names = [*failures, "raises", "real"]
    machine = Machine(cost, results=results)
    result = search(machine, [planted(name, True) for name in names], config_of(**dict.fromkeys(names, False)))
    assert result.changes == {"model.real": (False, True)}
    told = {name: attempt_of(result, name) for name in names[:-1]}
    assert {name: item.failure for name, item in told.items()} == {
        "eats": "oom",
        "hangs": "hang",
        "graph": "capture_refused",
        "empty": "crash",
        "raises": "crash",
    }
    assert told["eats"].reason == "CUDA out of memory"
    assert told["raises"].reason == "ValueError: planted"
    assert all(item.status == "failed" for item in told.values())


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (Failure("crash", "no data"), "the config itself fails: no data"),
        (Failure("hang", "not done after 45 s"), "the config as it is was not done after 45 s; give a larger --budget"),
    ],
)
def test_a_config_that_fails_itself_ends_the_search_with_its_reason(failure: Failure, told: str) -> None:
    machine = Machine(lambda model: 1.0, results=lambda model: TrialResult(failure=failure))
    result = search(machine, [planted("real", True)], config_of(real=False))
    assert result.stopped.startswith(told)
    assert len(machine.trials) == 1


def test_the_verdict_picks_the_next_knob() -> None:
    def findings(model: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
        remedy = {"knob": "model.named", "value": True, "text": ""}
        if not model["named"]:
            return "input_bound", [{"code": "input_bound", "share": 0.3, "remedies": [remedy]}]
        return "host_bound", [{"code": "host_bound", "share": 0.2, "remedies": []}]

    machine = Machine(lambda model: switches(model, named=0.8, suggested=0.9, usual=0.95), findings=findings)
    knobs = [
        planted("usual", True, expected_gain=0.9),
        planted("suggested", True, suggested_by=("host_bound",)),
        planted("named", True),
    ]
    result = search(machine, knobs, config_of(named=False, suggested=False, usual=False))
    assert [item.candidate.knob for item in result.accepted] == ["named", "suggested", "usual"]
    assert [item.attempt.why for item in result.accepted] == ["input_bound", "host_bound", "usual gain"]


def test_a_knob_without_a_gain_of_its_own_needs_a_finding() -> None:
    machine = Machine(lambda model: 1.0)
    knob = planted("recompute", True, expected_gain=0.0, suggested_by=("memory_pressure",))
    result = search(machine, [knob], config_of(recompute=False))
    assert len(machine.trials) == 1
    assert attempt_of(result, "recompute").reason == "no finding asks for it"


def test_a_clearly_worse_candidate_is_stopped_after_its_first_window() -> None:
    machine = Machine(lambda model: switches(model, slow=1.5))
    result = search(machine, [planted("slow", True)], config_of(slow=False))
    assert machine.windows == 3 + 1
    assert "clearly slower" in attempt_of(result, "slow").reason


def test_values_beyond_the_peak_are_not_tried() -> None:
    times = {2: 1.0, 4: 0.8, 8: 0.7, 16: 0.9, 32: 1.2, 64: 1.5, 1: 1.1}
    machine = Machine(lambda model: times[model["size"]])
    result = search(machine, [planted("size", *times, ordered=True)], config_of(size=2))
    assert result.changes == {"model.size": (2, 8)}
    assert {model["size"] for model in machine.tried} == {2, 4, 8, 16}, "1 lies on the other side"
    assert len(machine.proofs) == 1


def test_pairs_that_work_only_together_are_found() -> None:
    def cost(model: Mapping[str, Any]) -> float:
        both = model["compile"] and model["capture"]
        return 0.6 if both else 1.05 if model["compile"] else 1.0

    def results(model: Mapping[str, Any]) -> TrialResult | None:
        refused = model["capture"] and not model["compile"]
        return TrialResult(failure=Failure("capture_refused", "a value is asked for")) if refused else None

    knobs = [planted("compile", True, partners=("capture",)), planted("capture", True, partners=("compile",))]
    result = search(Machine(cost, results=results), knobs, config_of(compile=False, capture=False))
    assert set(result.changes) == {"model.compile", "model.capture"}
    assert len(result.accepted) == 1


def test_a_change_that_hurts_together_with_a_later_one_is_taken_back() -> None:
    def cost(model: Mapping[str, Any]) -> float:
        if model["late"]:
            return 0.8 if model["early"] else 0.7
        return 0.9 if model["early"] else 1.0

    knobs = [planted("early", True, expected_gain=0.5), planted("late", True, expected_gain=0.1)]
    result = search(Machine(cost), knobs, config_of(early=False, late=False))
    assert result.changes == {"model.late": (False, True)}
    assert model_of(result.best) == {"early": False, "init_from": None, "late": True}
    assert "taken back" in attempt_of(result, "early").reason


def test_a_start_that_does_not_pay_is_rejected_with_that_reason() -> None:
    machine = Machine(
        lambda model: switches(model, compile=0.5), setup=lambda model: 120.0 if model["compile"] else 2.0
    )
    # 180 s of training: 90 s are saved, 118 s are lost.
    short = search(machine, [planted("compile", True)], config_of(compile=False), samples_per_epoch=1_800)
    assert short.changes == {}
    assert "start takes 118.0 s more" in attempt_of(short, "compile").reason
    long = search(machine, [planted("compile", True)], config_of(compile=False), samples_per_epoch=18_000)
    assert set(long.changes) == {"model.compile"}
    before_s, after_s = long.run_s(long.baseline), long.run_s(long.final)
    assert before_s is not None
    assert after_s is not None
    assert before_s - after_s == pytest.approx(900 - 118, rel=0.1)


def test_what_takes_longer_to_start_than_the_whole_run_is_not_even_tried() -> None:
    machine = Machine(lambda model: 1.0)
    knob = planted("compile", True, setup_s=60.0)
    result = search(machine, [knob], config_of(compile=False), samples_per_epoch=100)
    assert len(machine.trials) == 1
    assert "the whole run takes" in attempt_of(result, "compile").reason


def test_a_value_that_starts_sooner_than_its_knob_is_tried() -> None:
    machine = Machine(lambda model: 1.0)
    knob = planted("compile", True, setup_s=60.0, value_setup_s=lambda value: 1.0)
    search(machine, [knob], config_of(compile=False), samples_per_epoch=100)
    assert len(machine.trials) == 2


@pytest.mark.parametrize(("time_s", "tried"), [(130.0, False), (300.0, True)])
def test_what_cannot_start_in_time_is_not_begun(time_s: float, tried: bool) -> None:
    """It would be stopped before it has measured anything, and the time be lost."""
    machine = Machine(lambda model: switches(model, a=0.8, autotune=0.9))
    knobs = [planted("a", True), planted("autotune", True, setup_s=100.0, expected_gain=0.01)]
    result = search(machine, knobs, config_of(a=False, autotune=False), budget=Budget(time_s=time_s))
    assert "model.a" in result.changes
    assert ("model.autotune" in result.changes) == tried
    if not tried:
        assert "takes about 100 s to start, and" in attempt_of(result, "autotune").reason
        assert result.stopped.startswith("all was tried that the budget has time for; model.autotune")


def test_other_mathematics_need_consent() -> None:
    knobs = [planted("sparse", True, numerics_effect="more")]
    refused = search(Machine(lambda model: switches(model, sparse=0.5)), knobs, config_of(sparse=False))
    assert refused.changes == {}
    assert "--allow approximate" in attempt_of(refused, "sparse").reason
    machine = Machine(lambda model: switches(model, sparse=0.5))
    allowed = search(machine, knobs, config_of(sparse=False), allow_approximate=True)
    assert set(allowed.changes) == {"model.sparse"}
    assert machine.proofs[0].consent


def test_budgets_hold_and_what_is_left_is_listed() -> None:
    names = [f"k{i}" for i in range(8)]
    knobs = [planted(name, True) for name in names]
    for budget in (Budget(trials=6), Budget(time_s=95.0)):
        machine = Machine(lambda model: switches(model, **dict.fromkeys(names, 0.9)))
        result = search(machine, knobs, config_of(**dict.fromkeys(names, False)), budget=budget)
        assert "budget" in result.stopped
        assert result.trials == len(machine.trials) + len(machine.proofs) <= 6
        assert machine.now_s <= 95.0
        assert len(result.accepted) == 2
        # Budget was kept for the proof of all changes.
        assert result.total is not None
        assert sum("budget" in item.reason for item in result.attempts) >= 5


def test_progress_is_told_with_the_best_so_far() -> None:
    told: list[tuple[str, int]] = []

    def tell(progress: Progress) -> None:
        told.append((progress.doing, len(progress.result.accepted)))

    search(Machine(lambda model: switches(model, a=0.8)), [planted("a", True)], config_of(a=False), tell=tell)
    assert told[0] == ("trying the config as it is", 0)
    assert ("proving model.a=true", 0) in told
    assert told[-1] == ("everything was tried", 1)


def three_knobs() -> tuple[Machine, list[Any], Any]:
    machine = Machine(lambda model: switches(model, a=0.8, b=1.02, c=0.9))
    return machine, [planted(name, True) for name in "abc"], config_of(a=False, b=False, c=False)


@pytest.mark.parametrize("die_after", range(8))
def test_a_killed_search_goes_on_and_repeats_nothing(tmp_path: Path, die_after: int) -> None:
    whole, knobs, start = three_knobs()
    uninterrupted = search(whole, knobs, start)
    first, _, _ = three_knobs()
    first.die_after = die_after
    with pytest.raises(KeyboardInterrupt):
        search(first, knobs, start, folder=tmp_path)
    # kill -9 in the middle of a line
    with (tmp_path / JOURNAL_NAME).open("ab") as file:
        file.write(b'{"event": "end", "ki')
    second, _, _ = three_knobs()
    result = search(second, knobs, start, folder=tmp_path)
    assert not set(first.trials) & set(second.trials)
    assert not {item.id for item in first.proofs} & {item.id for item in second.proofs}
    assert result.trials == uninterrupted.trials == die_after + len(second.trials) + len(second.proofs)
    assert result.changes == uninterrupted.changes
    assert result.spent_s == uninterrupted.spent_s
    third, _, _ = three_knobs()
    assert search(third, knobs, start, folder=tmp_path).changes == result.changes
    assert third.trials == []
    stored = json.loads((tmp_path / SUMMARY_NAME).read_text())
    assert set(stored["changes"]) == {"model.a", "model.c"}


def test_a_trial_that_kills_the_search_twice_is_not_made_a_third_time(tmp_path: Path) -> None:
    _, knobs, start = three_knobs()
    for _ in range(2):
        machine, _, _ = three_knobs()
        machine.die_after = 1 if not machine.trials and (tmp_path / JOURNAL_NAME).exists() is False else 0
        with pytest.raises(KeyboardInterrupt):
            search(machine, knobs, start, folder=tmp_path)
    machine, _, _ = three_knobs()
    result = search(machine, knobs, start, folder=tmp_path)
    deadly = [item for item in result.attempts if item.failure == "crash"]
    assert len(deadly) == 1
    assert "died 2 times" in deadly[0].reason
    assert deadly[0].trial not in machine.trials


def test_a_folder_of_another_search_is_refused(tmp_path: Path) -> None:
    machine, knobs, start = three_knobs()
    search(machine, knobs, start, folder=tmp_path)
    with pytest.raises(RunFolderError, match="another config"):
        search(machine, knobs, config_of(a=False, b=False, c=False, d=1), folder=tmp_path)


def random_space(seed: int) -> tuple[dict[str, list[Any]], dict[str, Any], Any]:
    """Settings with gains, losses, scales with a peak, interactions between pairs, and a pair that works together."""
    draw = random.Random(seed)
    values: dict[str, list[Any]] = {
        "one": [False, True],
        "two": [False, True],
        "three": ["x", "y", "z"],
        "pair_a": [False, True],
        "pair_b": [False, True],
        "scale": [1, 2, 4, 8],
    }
    alone = {
        (name, value): draw.choice([0.75, 0.85, 0.95, 1.0, 1.05, 1.2])
        for name in ("one", "two", "three")
        for value in values[name][1:]
    }
    peak, steep = draw.choice([1, 2, 4, 8]), draw.uniform(0.05, 0.2)
    together = draw.uniform(0.5, 0.8)
    names = list(values)
    crossed = {
        (one, other): draw.choice([0.9, 1.0, 1.0, 1.0, 1.1]) for one, other in itertools.combinations(names[:3], 2)
    }

    def cost(model: Mapping[str, Any]) -> float:
        found = math.prod(alone.get((name, model[name]), 1.0) for name in ("one", "two", "three"))
        for (one, other), factor in crossed.items():
            if model[one] not in (False, "x") and model[other] not in (False, "x"):
                found *= factor
        found *= 1 + steep * abs(math.log2(model["scale"] / peak))
        if model["pair_a"] and model["pair_b"]:
            return found * together
        return found * (1.04 if model["pair_a"] or model["pair_b"] else 1.0)

    return values, {name: items[0] for name, items in values.items()}, cost


@pytest.mark.slow
def test_regret_against_exhaustive_search_over_many_spaces() -> None:
    regrets = []
    for seed in range(10):
        values, start, cost = random_space(seed)
        everything = [dict(zip(values, chosen)) for chosen in itertools.product(*values.values())]
        best = min(cost(model) for model in everything)
        more = {"pair_a": {"partners": ("pair_b",)}, "scale": {"ordered": True}}
        machine = Machine(cost, seed=seed)
        knobs = [planted(name, *items, **more.get(name, {})) for name, items in values.items()]
        result = search(machine, knobs, config_of(**start), budget=Budget(trials=len(everything) // 5))
        assert result.trials == len(machine.trials) + len(machine.proofs) <= 0.2 * len(everything)
        regrets.append(cost(model_of(result.best)) / best - 1)
    assert max(regrets) <= 0.05
    assert sum(regrets) / len(regrets) <= 0.01


def test_windows_of_the_baseline_are_those_of_the_machine() -> None:
    result = search(Machine(lambda model: 1.0, noise=0.0), [], config_of())
    assert result.baseline.sample_s == BASE_S
    assert result.best == result.start
    assert result.stopped == "everything was tried"


@pytest.mark.parametrize("start_s", [21.0, 1.0, 0.5])
def test_a_search_says_after_how_many_steps_it_pays_and_what_memory_it_takes(start_s: float) -> None:
    def results(model: Mapping[str, Any]) -> TrialResult:
        fast = model["a"]
        windows = [(0.5e-3 if fast else 1e-3) / 10] * 5
        return TrialResult(windows, start_s if fast else 1.0, details={"peak_bytes": 3e9 if fast else 2e9})

    machine = Machine(lambda model: 0.5 if model["a"] else 1.0, noise=0.0, results=results)
    result = search(machine, [planted("a", True)], config_of(a=False))
    assert result.global_batch is not None
    told = result.to_json()
    assert told["accepted"][0]["peak_bytes"] == {"before": 2e9, "after": 3e9}
    saved_s = result.global_batch * 1e-4 / 2
    assert told["pays_after_steps"] == pytest.approx(max(0.0, start_s - 1.0) / saved_s, abs=1)
