"""The arithmetic of memory plans."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Literal

import pytest

from frameworm.distributed import calculate_zero_savings
from frameworm.errors import ConfigError
from frameworm.scaling.memory import MemoryReport, largest_micro_batch, plan_of_count, ways_to_fit
from frameworm.scaling.memory_model import (
    COMPONENTS,
    LIBRARY_BYTES,
    ActivationProfile,
    MemoryPlan,
    Peak,
    Setting,
    StepMemory,
    capacity,
    plan_step,
)
from frameworm.scaling.memory_shapes import ModelShapes, largest_partition

GB = 1e9
MODEL = ModelShapes((((1000, 100), (100,)), ((1000, 100), (100,)), ((5000, 100),)), fixed_bytes=4096)
LAYER = 4 * 100_100
WHOLE = 2 * LAYER + 4 * 500_000


def step(micro_batch: int) -> StepMemory:
    size = 1000 * micro_batch
    peak = Peak(activations=size, loss=size / 10, workspace=500)
    return StepMemory(micro_batch, size, replace(peak, gradients=200), peak, 0, 8 * micro_batch)


def planned(setting: Setting) -> MemoryPlan:
    return plan_step(MODEL, setting, step(setting.micro_batch))


CPU = Setting(device="cpu", micro_batch=4)


def test_savings_are_those_of_the_contract() -> None:
    savings = calculate_zero_savings(175e9, 64)
    assert [savings["fp32"][name] / GB for name in ("ddp", "zero1", "zero2", "zero3")] == [
        2800,
        1421.875,
        732.8125,
        43.75,
    ]
    assert [savings["mixed"][name] / GB for name in ("ddp", "zero1", "zero2", "zero3")] == [
        2800,
        175 * (4 + 12 / 64),
        175 * (2 + 14 / 64),
        43.75,
    ]


@pytest.mark.parametrize(("params", "world_size"), [(0, 4), (-1.0, 4), (float("nan"), 1), (1e9, 0)])
def test_savings_of_nothing_are_refused(params: float, world_size: int) -> None:
    with pytest.raises(ConfigError, match="give"):
        calculate_zero_savings(params, world_size)


def test_on_one_device_no_stage_saves() -> None:
    assert len(set(calculate_zero_savings(1e9, 1)["fp32"].values())) == 1


def test_components_add_up() -> None:
    plan = planned(CPU)
    assert plan.allocated == sum(getattr(plan, name) for name in COMPONENTS)
    assert plan.parameters == WHOLE + 4096
    assert plan.optimizer == 2 * WHOLE + 4 * len(MODEL.shapes)
    assert plan.total == plan.allocated + plan.allocator
    assert json.loads(json.dumps(plan.to_dict()))["allocated"] == plan.allocated


def test_one_device_holds_gradients_as_they_come() -> None:
    small = planned(CPU)
    assert (small.moment, small.gradients) == ("optimizer", WHOLE), "few activations: the update has all gradients"
    large = planned(replace(CPU, micro_batch=4000))
    assert (large.moment, large.gradients) == ("forward_backward", 200)
    accumulated = planned(replace(CPU, micro_batch=4000, accumulation=2))
    assert accumulated.gradients == WHOLE


def test_sgd_keeps_less() -> None:
    assert planned(replace(CPU, optimizer="sgd")).optimizer == WHOLE
    assert planned(replace(CPU, optimizer="sgd", momentum=0.0)).optimizer == 0


def test_an_unfused_update_needs_space() -> None:
    fused, unfused = planned(CPU), planned(replace(CPU, fused=False))
    assert unfused.workspace - fused.workspace == pytest.approx(WHOLE, rel=1e-3)


def test_zero1_deals_out_whole_tensors() -> None:
    ddp = planned(replace(CPU, strategy="ddp", world_size=4))
    zero1 = planned(replace(CPU, strategy="zero1", world_size=4))
    assert (ddp.parameters, ddp.optimizer) == (zero1.parameters, 2 * WHOLE + 4 * 5)
    assert zero1.optimizer == 2 * 4 * 500_000 + 5, "one rank has the embedding alone"


def test_largest_partition() -> None:
    assert largest_partition([5, 4, 3, 3, 3], 2) == 10
    assert largest_partition([7], 3) == 7
    for sizes in itertools.combinations_with_replacement([1, 3, 8], 4):
        assert max(max(sizes), sum(sizes) / 2) <= largest_partition(sizes, 2) <= sum(sizes)


def test_sharded_strategies_hold_shards_and_what_is_gathered() -> None:
    zero2 = planned(replace(CPU, strategy="zero2", world_size=4))
    zero3 = planned(replace(CPU, strategy="zero3", world_size=4))
    shard = 4 * (2 * (250 * 100 + 25) + 1250 * 100)
    for plan in (zero2, zero3):
        assert plan.parameters == shard + 4096
        assert plan.optimizer == 2 * shard + 4 * 5
        assert plan.gradients == shard + 4 * 500_000, "the largest unit's are whole until they are scattered"
    assert zero2.communication - zero3.communication == 0, "a root this large makes both gather everything"
    deep = ModelShapes((*(((100, 100),),) * 20, ((10, 100),)))
    two, three = (
        plan_step(deep, replace(CPU, strategy=name, world_size=4), step(400))  # type: ignore[arg-type]
        for name in ("zero2", "zero3")
    )
    assert two.communication - three.communication == 4 * 18 * 100 * 100


def test_accumulation_keeps_unreduced_gradients_under_sharding() -> None:
    large = replace(CPU, strategy="zero3", world_size=4, micro_batch=4000)
    once, often = (planned(replace(large, accumulation=n)) for n in (1, 2))
    assert once.gradients == LAYER + 200 / 4, "one layer's, and what is reduced by then is divided"
    assert often.gradients == WHOLE


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_layers_are_gathered_in_half_precision(strategy: Literal["zero2", "zero3"]) -> None:
    full = replace(CPU, strategy=strategy, world_size=4, micro_batch=4000)
    half = replace(full, precision="bf16")
    assert (half.half_layers, full.half_layers, replace(half, strategy="zero1").half_layers) == (True, False, False)
    one, other = planned(full), planned(half)
    assert one.moment == other.moment == "forward_backward"
    # Two layers, and the buffer that one arrives in, at half the size; the root and the buffer that gradients leave in
    # are as before, and so is all that lies in shards.
    assert one.communication == 4 * 500_000 + 2 * LAYER + LAYER + LAYER
    assert other.communication == 4 * 500_000 + LAYER + LAYER / 2 + LAYER
    assert (one.parameters, one.optimizer) == (other.parameters, other.optimizer)
    waiting = planned(replace(half, accumulation=2))
    assert waiting.gradients == WHOLE + LAYER / 2, "those that wait are in float32, the newest layer's are not yet"


def test_offloading_leaves_nothing_in_shards_on_the_device() -> None:
    here = replace(CPU, strategy="zero3", world_size=4, micro_batch=4000)
    plan, away = planned(here), planned(replace(here, offload_optimizer=True))
    assert (away.parameters, away.optimizer) == (4096, 0)
    assert (away.gradients, plan.gradients) == (LAYER, LAYER + 50)
    assert away.communication == plan.communication
    small = planned(replace(here, micro_batch=1, offload_optimizer=True))
    assert (small.moment, small.gradients) == ("reduction", 4 * 500_000)


def test_one_device_that_shards_holds_a_copy_and_sends_nothing() -> None:
    alone = replace(CPU, strategy="zero3", micro_batch=4000)
    plan = planned(alone)
    assert plan.parameters == WHOLE + 4096
    assert plan.communication == 4 * 500_000 + 2 * LAYER
    assert planned(replace(alone, offload_optimizer=True)).allocated < planned(replace(CPU, micro_batch=4000)).allocated


def test_a_model_without_layers_is_one_unit() -> None:
    shapes = ModelShapes((((1000, 100),),))
    plan = plan_step(shapes, replace(CPU, strategy="zero3", world_size=4, precision="bf16"), step(4000))
    assert plan.communication == 400_000, "outside of layers nothing is gathered in bf16"


def test_buckets_that_are_copies_and_residuals_cost_a_gradient_each() -> None:
    ddp = replace(CPU, strategy="ddp", world_size=2, micro_batch=10_000)
    assert planned(replace(ddp, bucket_views=False)).allocated - planned(ddp).allocated == WHOLE
    assert planned(replace(ddp, residuals=True)).allocated - planned(ddp).allocated == WHOLE


def test_few_activations_let_ddps_first_step_decide() -> None:
    assert planned(replace(CPU, strategy="ddp", world_size=2)).moment == "rebuild"


def test_validation_may_need_most() -> None:
    plan = plan_step(MODEL, CPU, replace(step(4), validation=1e9))
    assert (plan.moment, plan.activations, plan.gradients) == ("validation", 10**9, 0)


def test_gpu_blocks_and_libraries() -> None:
    plan = plan_step(ModelShapes((((3,),),)), Setting(device="cuda"), StepMemory(1, 0, Peak(), Peak()))
    assert plan.parameters == 512
    assert plan.workspace == LIBRARY_BYTES["cuda"]
    assert plan.context > 0
    assert plan.context not in (plan.allocated, plan.total)


def test_capacity_respects_the_fraction_and_the_context() -> None:
    assert capacity(100 * 2**30, 0.9, "cuda") == 90 * 2**30
    assert capacity(100 * 2**30, 1.0, "cuda") < 100 * 2**30
    assert capacity(100, 1.0, "cpu") == 100


def test_between_dry_runs_memory_is_linear() -> None:
    profile = ActivationProfile((step(2), step(4)))
    for size in (1, 2, 3, 4, 7):
        assert profile.at(size).fresh == step(size).fresh
        assert profile.at(size).kept == step(size).kept
    assert (profile.per_sample_bytes, profile.fixed_bytes) == (1000, 0)
    bent = profile.with_point(replace(step(8), kept=20_000))
    assert bent.at(8).kept == 20_000
    assert bent.at(6).kept == 12_000
    assert bent.at(3).kept == 3_000


def test_the_largest_micro_batch_is_the_largest() -> None:
    for setting in (CPU, replace(CPU, strategy="ddp", world_size=2)):
        for memory in (3 * WHOLE, 5 * WHOLE, 10 * WHOLE):
            size = largest_micro_batch(setting, memory, 1.0, planned)
            if size:
                assert planned(replace(setting, micro_batch=size)).fits(memory)
            assert not planned(replace(setting, micro_batch=size + 1)).fits(memory)


def test_ways_to_fit_come_in_order_and_fit() -> None:
    def plan_for(setting: Setting) -> MemoryPlan:
        found = step(setting.micro_batch)
        share = {"off": 1.0, "selective": 0.6, "full": 0.1}[setting.checkpointing]
        return plan_step(MODEL, setting, replace(found, repeat=replace(found.repeat, activations=found.kept * share)))

    setting = replace(CPU, strategy="ddp", world_size=4, micro_batch=12_000, accumulation=1)
    memory = plan_for(replace(setting, checkpointing="full")).total + 1
    ways = ways_to_fit(setting, memory, 1.0, plan_for, most=10)
    assert all(way.plan.fits(memory) for way in ways)
    assert ways[0].overrides == ("training.micro_batch=2400",), "the largest divisor that fits"
    assert ways[0].plan.setting.accumulation == 5
    assert ways[1].overrides == ("memory.activation_checkpointing=full",)
    assert "third more compute" in ways[1].cost
    for way in ways:
        found = way.plan.setting
        assert found.micro_batch * found.accumulation == 12_000
    assert ways_to_fit(setting, 1000, 1.0, plan_for) == []


def test_sharding_comes_last() -> None:
    deep = ModelShapes((*(((100, 100),),) * 20, ((10, 100),)))
    setting = replace(CPU, strategy="ddp", world_size=4, micro_batch=8)
    ways = ways_to_fit(setting, 1_300_000, 1.0, lambda item: plan_step(deep, item, step(item.micro_batch)))
    assert ways[0].overrides == ("parallel.strategy=zero3",)
    assert "half as many bytes again" in ways[0].cost


def test_one_device_is_not_told_to_shard() -> None:
    ways = ways_to_fit(replace(CPU, micro_batch=8000), 5 * WHOLE, 1.0, planned, most=10)
    assert ways
    assert not any("strategy" in item for way in ways for item in way.overrides)


def test_count_only() -> None:
    plan = plan_of_count(1_000_000, replace(CPU, strategy="zero1", world_size=8))
    assert plan.optimizer == pytest.approx(1e6, rel=1e-3)


def test_report_as_data() -> None:
    plan = planned(CPU)
    report = MemoryReport("x", 1, plan, (plan,), 0.9, 1000.0, 0.0, memory_bytes=10**9)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["fits"] is True
    assert data["usable_bytes"] == 9 * 10**8
    assert data["strategies"]["single"] == data["plan"]
    unknown = replace(report, memory_bytes=None)
    assert unknown.fits is None
    assert unknown.to_dict()["usable_bytes"] is None
