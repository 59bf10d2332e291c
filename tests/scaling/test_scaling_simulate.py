"""The simulator against schedules worked out by hand, and laws that no schedule may break."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frameworm.scaling.fabrics import FABRICS, GIGABIT, Link, LinkNetwork, MeasuredNetwork, NodesNetwork
from frameworm.scaling.network import NetworkModel, NetworkPoint
from frameworm.scaling.simulate import (
    Setting,
    StepProfile,
    Timeline,
    expected_maximum,
    simulate_step,
)
from frameworm.scaling.traffic import Codec, Gradient, divide_into_buckets

MB = 2**20
# Two ranks: an all_reduce of S bytes takes S / rate and twice the latency. 100 MB/s: 10 ms per MB.
SLOW = LinkNetwork(Link("hand", 100.0 * MB, 0.0, (1.0, 1.0, 1.0)))


def profile(*gradients: tuple[float, float], **more: float) -> StepProfile:
    """Forward 50 ms, backward 100 ms, optimizer 10 ms; gradients as (MB, ready in ms)."""
    values = {"forward_s": 0.05, "backward_s": 0.1, "optimizer_s": 0.01, **more}
    return StepProfile(tuple(Gradient.of(int(size * MB), ready / 1e3) for size, ready in gradients), **values)


def simulate(one: StepProfile, world_size: int = 2, **setting: float) -> Timeline:
    return simulate_step(one, Setting(**{"bucket_cap_mb": 1.0, "first_bucket_mb": 1.0, **setting}), SLOW, world_size)


def test_one_bucket_is_sent_after_backward() -> None:
    found = simulate(profile((2, 100)))
    assert found.step_s == pytest.approx(0.05 + 0.1 + 0.02 + 0.01)
    assert found.exposed_s == pytest.approx(0.02)
    assert found.communication_s == pytest.approx(0.02)


def test_one_bucket_that_is_early_is_hidden() -> None:
    found = simulate(profile((2, 30)))
    assert found.step_s == pytest.approx(0.16)
    assert found.exposed_s == pytest.approx(0.0)
    assert [(item.ready_s, item.start_s, item.end_s) for item in found.buckets] == [pytest.approx((0.03, 0.03, 0.05))]


def test_two_buckets_the_second_waits_for_the_first() -> None:
    # 40..90, and the second, there at 60, from 90 to 130: 30 ms beyond backward.
    found = simulate(profile((5, 40), (4, 60)))
    assert [(item.start_s, item.end_s) for item in found.buckets] == [
        pytest.approx((0.04, 0.09)),
        pytest.approx((0.09, 0.13)),
    ]
    assert found.step_s == pytest.approx(0.05 + 0.13 + 0.01)


def test_three_buckets_with_a_gap_between() -> None:
    # 10..30, 80..100 (the wire was idle from 30 on), 100..115 with the last one.
    found = simulate(profile((2, 10), (2, 80), (1.5, 100)))
    ends = [item.end_s for item in found.buckets]
    assert ends == pytest.approx([0.03, 0.1, 0.115])
    assert found.exposed_s == pytest.approx(0.015)
    assert found.sent_bytes == pytest.approx(5.5 * MB)  # 2 (n-1) / n of it


def test_three_buckets_of_four_ranks_with_latency() -> None:
    # A ring of 4: 6 messages and 1.5 times the bytes: 6 ms + 15 ms per MB.
    network = LinkNetwork(Link("hand", 100.0 * MB, 1e-3, (1.0, 1.0, 1.0)))
    one = profile((1, 20), (1, 30), (1, 100))
    found = simulate_step(one, Setting(bucket_cap_mb=1.0, first_bucket_mb=1.0), network, 4)
    assert [item.end_s for item in found.buckets] == pytest.approx([0.041, 0.062, 0.121])
    assert found.step_s == pytest.approx(0.05 + 0.121 + 0.01)


def test_accumulation_sends_in_the_last_backward_only() -> None:
    one = replace(profile((2, 100)), accumulation=4)
    assert simulate(one).step_s == pytest.approx(4 * 0.15 + 0.02 + 0.01)


def test_a_codec_works_on_one_bucket_while_another_is_sent() -> None:
    # Coding 4 ms and decoding 4 ms per MB of floats; half the bytes: 5 ms per MB on the wire.
    one = profile((1, 90), (1, 100))
    codec = Codec("bf16", {"bf16": 8e-3 / (MB / 4)})
    found = simulate(one, codec=codec)
    # 90 coded 94 sent 99 decoded 103; 100 coded 104 sent 109 decoded 113.
    assert [item.end_s for item in found.buckets] == pytest.approx([0.103, 0.113])
    assert found.communication_s == pytest.approx(2 * 0.013)


def test_without_a_core_to_spare_sending_delays_computing() -> None:
    points = tuple(NetworkPoint(size * MB, size * 0.01, size * 0.01, size * 0.01, 5, size * 0.004) for size in (1, 2))
    network = MeasuredNetwork(NetworkModel({"all_reduce": points}, world_size=2, backend="gloo"))
    one = profile((1, 20), (1, 60), (1, 100))
    setting = Setting(bucket_cap_mb=1.0, first_bucket_mb=1.0, busy_host=1.0)
    found = simulate_step(one, setting, network, 2)
    assert [item.ready_s for item in found.buckets] == pytest.approx([0.02, 0.064, 0.108])
    assert found.exposed_s == pytest.approx(0.018)
    assert simulate_step(one, replace(setting, busy_host=0.0), network, 2).exposed_s == pytest.approx(0.01)


def test_zero_stages_by_hand() -> None:
    # One unit of 2 MB between 2 ranks: gathered in 10 ms, scattered in 10 ms, reduced to all in 20 ms.
    one = profile((2, 100))
    assert simulate(one, strategy="zero1").step_s == pytest.approx(0.05 + 0.1 + 0.02 + 0.005 + 0.01)
    assert simulate(one, strategy="zero2").step_s == pytest.approx(0.01 + 0.05 + 0.1 + 0.01 + 0.005)
    assert simulate(one, strategy="zero3").step_s == pytest.approx(0.02 + 0.05 + 0.1 + 0.01 + 0.005)
    # Two equal units: the second is gathered while the first computes, in forward and in backward.
    two = profile((1, 50), (1, 100))
    assert simulate(two, strategy="zero3").step_s == pytest.approx(0.005 + 0.05 + 0.005 + 0.1 + 0.005 + 0.005)


def test_gradients_fill_buckets_as_ddp_fills_them() -> None:
    gradients = [Gradient.of(int(size * MB), ready) for size, ready in ((0.6, 3.0), (0.6, 1.0), (3, 2.0), (0.5, 4.0))]
    buckets = divide_into_buckets(gradients, 1 * MB, 4 * MB)
    assert [round(bucket.size_bytes / MB, 1) for bucket in buckets] == [3.6, 1.1]
    assert [bucket.ready_s for bucket in buckets] == [2.0, 4.0]


def test_the_slowest_rank_is_an_expected_maximum() -> None:
    assert expected_maximum([1.0, 2.0], 1) == pytest.approx(1.5)
    assert expected_maximum([1.0, 2.0], 2) == pytest.approx(1.75)
    assert expected_maximum([1.0, 2.0, 3.0], 2) == pytest.approx((1 * 1 + 2 * 3 + 3 * 5) / 9)
    one = replace(profile((2, 30)), step_times_s=(0.1, 0.3))
    assert simulate(one).straggler_s == pytest.approx(0.16 * 0.25)  # the larger of two draws is 0.25 in the mean


def test_nodes_are_fast_inside_and_slow_between() -> None:
    fast, slow = Link("in", 1000.0 * MB, 0.0, (1.0, 1.0, 1.0)), Link("out", 100.0 * MB, 0.0, (1.0, 1.0, 1.0))
    nodes = NodesNetwork(LinkNetwork(fast), LinkNetwork(slow), 4)
    assert nodes.seconds("all_reduce", 4 * MB, 4) == pytest.approx(1.5 * 4 / 1000)
    # Two nodes: 3/4 S inside, S between (2 * 1/2), 3/4 S inside.
    assert nodes.seconds("all_reduce", 4 * MB, 8) == pytest.approx(3 / 1000 + 4 / 100 + 3 / 1000)
    flat = LinkNetwork(slow).seconds("all_reduce", 4 * MB, 8)
    assert nodes.seconds("all_reduce", 4 * MB, 8) < flat


def test_bytes_of_the_methods() -> None:
    bucket = divide_into_buckets([Gradient(4 * 10**6, 0.0, 10**6, (1000, 1000))], 1, 1)[0]
    sent = {
        method: Codec(method).send(bucket, SLOW, 2).sent_bytes for method in ("off", "bf16", "int8", "int4", "topk")
    }
    assert sent["off"] == 4e6
    assert sent["bf16"] == 2e6
    assert sent["int8"] == pytest.approx(4e6 * 0.254, rel=0.01)
    assert sent["int4"] == pytest.approx(4e6 * 0.133, rel=0.01)
    assert sent["topk"] == pytest.approx(4e6 * 0.0075, rel=0.01)
    assert Codec("powersgd").send(bucket, SLOW, 2).sent_bytes == 4 * 2000


def test_thousands_of_ranks_cost_nothing() -> None:
    one = profile(*((0.5, index) for index in range(100)))
    found = simulate_step(one, Setting(), LinkNetwork(FABRICS["infiniband-ndr"]), 16_384)
    assert found.step_s > one.compute_s


gradient_lists = st.lists(st.tuples(st.floats(0.001, 50), st.floats(0, 100)), min_size=1, max_size=12)
strategies = st.sampled_from(["ddp", "zero1", "zero2", "zero3"])
methods = st.sampled_from(["off", "bf16", "int8", "int4", "topk", "powersgd"])


@settings(max_examples=200, deadline=None)
@given(
    gradients=gradient_lists,
    world_size=st.integers(1, 5000),
    gbps=st.floats(0.01, 1000),
    latency_us=st.floats(0, 1000),
    strategy=strategies,
    method=methods,
    per_value_ns=st.floats(0, 100),
    accumulation=st.integers(1, 8),
    per_node=st.integers(1, 8),
    cap=st.floats(0.1, 100),
    times=st.lists(st.floats(0.05, 1.0), max_size=8),
)
@pytest.mark.slow
def test_laws(
    gradients: list[tuple[float, float]],
    world_size: int,
    gbps: float,
    latency_us: float,
    strategy: str,
    method: str,
    per_value_ns: float,
    accumulation: int,
    per_node: int,
    cap: float,
    times: list[float],
) -> None:
    one = replace(profile(*gradients), accumulation=accumulation, step_times_s=tuple(times))
    link = LinkNetwork(Link("given", gbps * GIGABIT, latency_us * 1e-6))
    network = link if per_node == 1 else NodesNetwork(LinkNetwork(FABRICS["nvlink4"]), link, per_node)
    codec = Codec(method if strategy == "ddp" else "off", {method: per_value_ns * 1e-9})
    setting = Setting(strategy, codec, bucket_cap_mb=cap, first_bucket_mb=min(1.0, cap))
    found = simulate_step(one, setting, network, world_size)
    slack = 1e-9 * found.step_s
    assert math.isfinite(found.step_s)
    assert found.step_s >= found.compute_s - slack, "faster than computing alone"
    assert found.step_s <= found.compute_s + found.communication_s + slack, "slower than one after the other"
    assert 0 <= found.exposed_s <= found.communication_s + slack
    quicker = simulate_step(one, setting, network.faster(2.0), world_size)
    assert quicker.step_s <= found.step_s + slack, "more bandwidth made it slower"
    if world_size == 1:
        assert found.step_s == one.compute_s
    if strategy in ("ddp", "zero1"):
        more = simulate_step(one, setting, network, world_size * 2)
        assert more.straggler_s >= found.straggler_s - slack


@settings(max_examples=100, deadline=None)
@given(gradients=gradient_lists, busy=st.floats(0, 1), cpu_share=st.floats(0, 1), world_size=st.integers(2, 64))
def test_laws_hold_without_a_core_to_spare(
    gradients: list[tuple[float, float]], busy: float, cpu_share: float, world_size: int
) -> None:
    points = tuple(
        NetworkPoint(size, 1e-4 + size * 1e-8, 1e-4, 1e-4, 5, (1e-4 + size * 1e-8) * cpu_share)
        for size in (10**3, 10**7)
    )
    network = MeasuredNetwork(NetworkModel({"all_reduce": points}, world_size=2, backend="gloo"))
    one = profile(*gradients)
    found = simulate_step(one, Setting(busy_host=busy), network, world_size)
    slack = 1e-9 * found.step_s
    assert one.compute_s - slack <= found.step_s <= one.compute_s + found.communication_s + slack
    assert simulate_step(one, Setting(busy_host=busy), network.faster(3.0), world_size).step_s <= found.step_s + slack
