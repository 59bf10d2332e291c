"""Clocks of several hosts, and who is waited for."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from frameworm.observe.clocks.communication import Meeting, StepCommunication
from frameworm.observe.clocks.ranks import MOST_STEPS, RankClocks, RankWatch, Stragglers
from frameworm.records.observations import Bucket
from frameworm.records.schema import StepRecord

NAN = float("nan")


def _meetings(offsets: list[float], late_s: list[float], rounds: int = 20) -> tuple[Any, Any]:
    """When ranks with these clocks come to meetings and leave them; a meeting takes up to 0.3 ms."""
    chance = random.Random(1)
    ready: list[list[float]] = [[] for _ in offsets]
    end: list[list[float]] = [[] for _ in offsets]
    for number in range(rounds):
        came = [number + late + chance.random() * 1e-4 for late in late_s]
        for rank, offset in enumerate(offsets):
            ready[rank].append(came[rank] + offset)
            end[rank].append(max(came) + chance.random() * 2e-4 + offset)
    return ready, end


def test_ranks_of_one_host_have_one_clock() -> None:
    clocks = RankClocks(3)
    clocks.compare(*_meetings([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]))
    assert clocks.offsets == [0.0, 0.0, 0.0]
    assert clocks.uncertainty_s == 0.0


def test_clocks_of_several_hosts_are_compared_by_meetings() -> None:
    clocks = RankClocks(3)
    clocks.compare(*_meetings([5.0, 1000.0, -3.0], [0.0, 0.0, 0.0]))
    assert clocks.offsets == pytest.approx([0.0, 995.0, -8.0], abs=3e-4)
    assert 0 < clocks.uncertainty_s < 3e-4


def test_an_offset_follows_a_clock_that_drifts_and_nothing_else() -> None:
    clocks = RankClocks(2)
    clocks.compare(*_meetings([0.0, 7.0], [0.0, 0.0]))
    before = clocks.offsets[1]
    clocks.correct(*_meetings([0.0, 7.0], [0.0, 0.05]))
    assert clocks.offsets[1] == before, "a slow rank is not a wrong clock"
    clocks.correct(*_meetings([0.0, 7.01], [0.0, 0.0]))
    assert clocks.offsets[1] == pytest.approx(7.01, abs=3e-4)
    clocks.correct([[NAN], [NAN]], [[NAN], [NAN]])
    assert clocks.offsets[1] == pytest.approx(7.01, abs=3e-4)


def _stragglers(late_s: Callable[[int], list[float]], steps: int = 40, step_s: float = 0.1) -> int | None:
    found = Stragglers(len(late_s(0)))
    for step in range(steps):
        found.add([late_s(step)], step_s)
    return found.slowest_rank()


def test_the_slowest_rank_is_the_one_the_others_wait_for() -> None:
    chance = random.Random(0)
    noise = lambda: chance.random() * 0.01  # noqa: E731
    assert _stragglers(lambda step: [noise(), noise(), 0.05 + noise()]) == 2
    assert _stragglers(lambda step: [noise(), noise(), noise()]) is None, "everybody in turn"
    assert _stragglers(lambda step: [0.0, 0.0005]) is None, "half a percent of a step"
    assert _stragglers(lambda step: [5.0 if step == 3 else noise(), noise()]) is None, "one hiccup is no slow rank"
    assert _stragglers(lambda step: [0.05, 0.0], steps=1) is None, "one step is chance"
    assert Stragglers(2).slowest_rank() is None


def test_clocks_that_cannot_tell_name_nobody() -> None:
    found = Stragglers(2)
    for _ in range(40):
        found.add([[0.0, 0.02]], 0.1)
    assert found.slowest_rank(uncertainty_s=0.005) == 1
    assert found.slowest_rank(uncertainty_s=0.015) is None


def test_both_meetings_of_a_step_count() -> None:
    found = Stragglers(2)
    for _ in range(40):
        found.add([[0.0, 0.03], [0.1, 0.09]], 0.1)
    assert found.slowest_rank() == 1


def _record(step: int, step_s: float) -> StepRecord:
    return StepRecord(step, 1, 0.0, step_s, None, None, 1, 1.0, communication_s=0.05)


def _watch(rank: int, world_size: int, skew_s: float, behind: int) -> Any:
    """Made-up steps: rank 1 is ready 30 ms later; its clock is ahead. Some steps nobody divided."""
    from frameworm.observe.clocks import ranks

    if rank == 1:
        clock = ranks.perf_counter
        ranks.perf_counter = lambda: clock() + skew_s  # type: ignore[attr-defined]
    begin = ranks.perf_counter()
    begin -= (begin - rank * skew_s) % 1000 - 500  # the same moment on both
    watch = RankWatch(rank, world_size, torch.device("cpu"), behind)
    watch.start()
    told, windows, held = [], [], []
    for step in range(1, 101):
        ready = begin + step + 0.03 * rank
        end = begin + step + 0.03 + 0.01
        bucket = Bucket(8, 0.5, 0.5, 0.5 + end - ready, 2)
        seen = StepCommunication(end - ready, end - ready, [bucket], [Meeting(ready, ready, end)], 0)
        held.append((_record(step, 0.001 if step < 60 else 0.25), None if step % 10 == 0 else seen))
        if len(held) > behind - (rank == 0 and behind > 0):  # ranks read their steps at their own pace
            watch.add(*held.pop(0))
        told += watch.after_step(step)
        windows.append(watch._next_at)
    for item in held:
        watch.add(*item)
    told += watch.flush()
    assert watch.flush() == []
    return told, windows, watch.slowest_rank, watch.buckets(), watch._clocks.uncertainty_s


@pytest.mark.parametrize(("skew_s", "behind"), [(0.0, 0), (123.0, 0), (0.0, 24)])
def test_records_come_back_complete_and_in_order(
    run_ranks: Callable[..., list[Any]], skew_s: float, behind: int
) -> None:
    first, second = run_ranks(_watch, args=(skew_s, behind))
    assert first[1] == second[1], "the ranks must agree when to meet"
    assert max(b - a for a, b in zip(first[1], first[1][1:])) == MOST_STEPS or behind
    for (told, _, slowest, buckets, uncertainty_s), wait_s in ((first, 0.03), (second, 0.0)):
        # The ranks really meet to compare clocks that differ; where others have the cores, they leave later.
        assert (uncertainty_s > 0) == (skew_s > 0)
        tolerance = uncertainty_s + 1e-9
        assert [record.step for record in told] == list(range(1, 101))
        for record in told:
            if record.step % 10 == 0:
                assert record.rank_wait_s is None
            else:
                assert record.rank_wait_s == pytest.approx(wait_s, abs=tolerance)
        assert slowest == 1 or uncertainty_s > 0.007
        (bucket,) = buckets
        assert bucket.start_s - bucket.ready_s == pytest.approx(wait_s, abs=tolerance)
        assert sum(record.metrics.get("exchange_s", 0.0) for record in told) > 0


def _abandoned(rank: int, world_size: int) -> Any:
    watch = RankWatch(rank, world_size, torch.device("cpu"), 0)
    for step in range(1, 4):
        watch.add(_record(step, 0.1), None)
    return [record.step for record in watch.abandon()], watch.abandon()


def test_abandoned_records_are_given_back_once(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(_abandoned, 1) == [([1, 2, 3], [])]
