"""In which order a search tries things, and what it does not try: gain for cost, pairs, and what they make possible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from simulated_gpu import BEST_S, TRIAL_S, Gpu, step_s, tune_on
from simulated_machine import Machine, config_of, planted, search

from frameworm.tune.knobs.context import Context
from frameworm.tune.search.order import cost_of, promise_of
from frameworm.tune.trials.outcomes import Failure, TrialRequest, TrialResult


def first_tries(machine: Machine, *names: str) -> list[str]:
    """Knobs in the order in which they were first tried, whatever else was on."""
    found = [name for model in machine.tried for name in names if model[name]]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("later", ["compute_bound", "host_bound", "input_bound", "padding_waste", "balanced"])
def test_a_model_of_launches_ends_at_its_best_within_the_budget(later: str) -> None:
    gpu = Gpu(later)
    result = tune_on(gpu, budget_s=480.0)
    assert step_s(result.best) == pytest.approx(BEST_S)
    assert gpu.reached is not None
    seconds, made = gpu.reached
    assert seconds <= 330
    assert made <= 18
    assert gpu.now_s <= 480
    assert result.total is not None, "the proof of all changes was kept budget for"
    assert [item.candidate.knob for item in result.accepted][:2] == ["capture+batching+compile", "combine_kernels"]
    tried = [item.knob for item in result.attempts if item.status != "skipped"]
    assert not [name for name in tried if "activation_checkpointing" in name]


@pytest.mark.parametrize("later", ["compute_bound", "host_bound", "padding_waste"])
def test_what_is_refused_alone_is_tried_at_once_with_what_makes_it_possible(later: str) -> None:
    gpu = Gpu(later, refuses=True)
    result = tune_on(gpu, budget_s=480.0, leaps=False)
    assert gpu.made[1:3] == ["trial gpu.capture=step", "trial data.batching=packed, gpu.capture=step"]
    assert step_s(result.best) == pytest.approx(BEST_S)
    assert gpu.now_s <= 480
    assert result.total is not None


def host_bound(model: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    remedies = [{"knob": f"model.{name}", "value": True, "text": ""} for name in ("costly", "cheap")]
    return "host_bound", [{"code": "host_bound", "share": 0.9, "remedies": remedies}]


def test_of_two_that_the_verdict_names_the_cheap_one_comes_first() -> None:
    machine = Machine(lambda model: 1.0, findings=host_bound)
    knobs = [planted("costly", True, setup_s=15.0), planted("cheap", True)]
    search(machine, knobs, config_of(costly=False, cheap=False))
    assert first_tries(machine, "costly", "cheap") == ["cheap", "costly"]


@pytest.mark.parametrize(("gain", "first"), [(0.3, "cheap"), (0.9, "costly")])
def test_a_costly_one_comes_first_if_it_promises_clearly_more(gain: float, first: str) -> None:
    machine = Machine(lambda model: 1.0)
    knobs = [planted("costly", True, setup_s=15.0, expected_gain=gain), planted("cheap", True, expected_gain=0.2)]
    search(machine, knobs, config_of(costly=False, cheap=False))
    assert first_tries(machine, "costly", "cheap")[0] == first


def test_a_knob_costs_its_trials_a_proof_and_a_start_for_each() -> None:
    assert cost_of(planted("plain", True), 3, trial_s=4.0, proof_s=12.0) == 3 * 4 + 12
    assert cost_of(planted("compiled", True, setup_s=15.0), 1, trial_s=4.0, proof_s=12.0) == 4 + 15 + 12 + 15
    assert cost_of(planted("unknown", True), 1, trial_s=0.0, proof_s=0.0) > 0


@pytest.mark.parametrize(("wanted", "named"), [(64, False), (8, True)])
def test_a_remedy_does_not_name_values_on_the_other_side_of_the_present(wanted: int, named: bool) -> None:
    knob = planted("size", 8, 16, ordered=True)
    context = Context(config_of(size=32))
    remedy = {"knob": "model.size", "value": wanted, "text": ""}
    result = TrialResult([1.0], 1.0, "host_bound", [{"code": "host_bound", "share": 0.5, "remedies": [remedy]}])
    promise = promise_of(knob, knob.candidates(context), context, result)
    assert promise.by_verdict == (2 if named else 0)


def test_what_a_pair_makes_possible_is_tried_before_anything_is_tried_again() -> None:
    def cost(model: Mapping[str, Any]) -> float:
        if model["pack"] != model["compile"]:
            return 1.05
        together = 0.7 if model["pack"] else 1.0
        return together * (0.8 if model["resident"] else 1.0) * (0.99 if model["even"] else 1.0)

    knobs = [
        planted("even", True),
        planted("pack", True, partners=("compile",)),
        planted("compile", True),
        planted("resident", True, applies=lambda context: context.config.model.model_dump()["pack"] or "needs pack"),
    ]
    machine = Machine(cost, noise=0.0)
    result = search(machine, knobs, config_of(even=False, pack=False, compile=False, resident=False))
    assert "model.resident" in result.changes
    pair = next(index for index, model in enumerate(machine.tried) if model["pack"] and model["compile"])
    assert machine.tried[pair + 1]["resident"]


def test_pairs_come_in_the_order_of_what_their_parts_were_alone() -> None:
    alone = {"bad": 1.2, "worse": 1.24, "even": 1.02}

    def cost(model: Mapping[str, Any]) -> float:
        return max((factor for name, factor in alone.items() if model[name]), default=1.0)

    machine = Machine(cost, noise=0.0)
    knobs = [planted(name, True, partners=tuple(alone)) for name in ("worse", "bad", "even")]
    search(machine, knobs, config_of(**dict.fromkeys(alone, False)))
    pairs = [{name for name in alone if model[name]} for model in machine.tried]
    assert [pair for pair in pairs if len(pair) == 2][:3] == [{"bad", "even"}, {"worse", "even"}, {"worse", "bad"}]


@pytest.mark.parametrize("short_of_memory", [False, True])
def test_what_only_saves_memory_is_paired_only_where_memory_is_short(short_of_memory: bool) -> None:
    def results(model: Mapping[str, Any]) -> TrialResult | None:
        full = short_of_memory and model["size"] == 64 and not model["recompute"]
        return TrialResult(failure=Failure("oom", "CUDA out of memory")) if full else None

    def cost(model: Mapping[str, Any]) -> float:
        return (1.1 if model["recompute"] else 1.0) * (0.8 if model["size"] == 64 and short_of_memory else 1.0)

    machine = Machine(cost, results=results)
    knobs = [
        planted("size", 64, partners=("recompute",)),
        planted("recompute", True, expected_gain=0.0, suggested_by=("memory_pressure",), partners=("size",)),
    ]
    result = search(machine, knobs, config_of(size=32, recompute=False))
    assert any(model["recompute"] for model in machine.tried) == short_of_memory
    assert set(result.changes) == ({"model.size", "model.recompute"} if short_of_memory else set())


def test_a_start_that_was_not_paid_back_in_a_pair_is_not_tried_again_alone() -> None:
    def cost(model: Mapping[str, Any]) -> float:
        compiled = 0.8 if model["pack"] and model["compile"] else 1.02 if model["pack"] or model["compile"] else 1.0
        return compiled * (0.9 if model["late"] else 1.0)

    # 180 s of training: compiling takes 118 s more than anything saves.
    machine = Machine(cost, noise=0.0, setup=lambda model: 120.0 if model["compile"] else 2.0)
    knobs = [
        planted("compile", True, setup_s=15.0, partners=("pack", "late"), expected_gain=0.9),
        planted("pack", True),
        planted("late", True),
    ]
    result = search(machine, knobs, config_of(compile=False, pack=False, late=False), samples_per_epoch=1_800)
    assert set(result.changes) == {"model.late"}
    compiled = [item for item in result.attempts if "compile" in item.knob]
    assert [item.knob for item in compiled] == ["compile", "pack+compile"]
    assert "its start takes 118.0 s more" in compiled[1].reason


class NoCompiler(Gpu):
    """A GPU machine on which nothing can be compiled."""

    def run_trial(self, request: TrialRequest) -> TrialResult:
        if request.config.gpu.compile_model:
            self.now_s += TRIAL_S
            self.made.append(f"trial {request.label}")
            return TrialResult(failure=Failure("crash", "no compiler"))
        return super().run_trial(request)


def test_where_not_all_can_be_had_at_once_the_quick_ones_are_tried_together() -> None:
    gpu = NoCompiler()
    result = tune_on(gpu)
    assert (
        gpu.made[1] == "trial gpu.capture=step, data.batching=packed, gpu.compile_model=true, gpu.compile_scope=model"
    )
    assert gpu.made[2] == "trial gpu.capture=step, data.batching=packed"
    assert not result.best.gpu.compile_model
    assert step_s(result.best) == pytest.approx(0.74e-3), "captured alone, which is faster here than packed"


class NoPacking(Gpu):
    """A GPU machine with a model that cannot take packed texts, which shows only when it runs."""

    def run_trial(self, request: TrialRequest) -> TrialResult:
        if request.config.data.batching == "packed":
            self.now_s += TRIAL_S
            self.made.append(f"trial {request.label}")
            return TrialResult(failure=Failure("not_applicable", "data.batching: the model cannot take it"))
        return super().run_trial(request)


def test_what_a_model_refuses_is_left_out_of_what_is_tried_together() -> None:
    gpu = NoPacking()
    result = tune_on(gpu, many_widths=False)
    assert gpu.made[1].startswith("trial gpu.capture=step, data.batching=packed, gpu.compile_model=true")
    assert gpu.made[2] == "trial gpu.capture=step, gpu.compile_model=true, gpu.compile_scope=model"
    assert not [label for label in gpu.made[3:5] if "packed" in label]
    assert result.best.gpu.capture == "step"


@pytest.mark.parametrize(("share", "tried"), [(0.004, False), (0.05, True)])
def test_a_knob_that_shortens_next_to_nothing_is_not_tried(share: float, tried: bool) -> None:
    phases = {"phases": {"data_wait": {"mean_s": share, "share": share}}}
    machine = Machine(lambda model: 1.0, results=lambda model: TrialResult([1.0] * 5, 1.0, details=phases))
    knobs = [planted("workers", True, shortens=("data_wait", "transfer")), planted("other", True)]
    result = search(machine, knobs, config_of(workers=False, other=False))
    assert first_tries(machine, "workers", "other") == (["workers", "other"] if tried else ["other"])
    if not tried:
        assert "data wait and transfer take 0.4% of a step" in {item.reason for item in result.attempts}


@pytest.mark.parametrize(("share", "tried"), [(0.0, False), (0.1, True), (None, True)])
def test_kernels_of_attention_are_not_tried_where_there_is_none(share: float | None, tried: bool) -> None:
    details = {"attention_share": share}
    machine = Machine(lambda model: 1.0, results=lambda model: TrialResult([1.0] * 5, 1.0, details=details))
    result = search(machine, [planted("flash", True, shortens=("attention",))], config_of(flash=False))
    assert first_tries(machine, "flash") == (["flash"] if tried else [])
    if not tried:
        assert "the model has no attention that torch computes" in {item.reason for item in result.attempts}
