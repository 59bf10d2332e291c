"""Ranks that share one GPU and record their steps with NCCL inside: the same training, and one way for all of them."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_gpu import join_on_one_gpu
from sharding_cases import whole_values
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from workbench import Steps, classification

from frameworm import Callback, RunRecord, Trainer
from frameworm.distributed import OptimizedDataLoader
from frameworm.engine.optim.schedule import Schedule
from frameworm.engine.step.capture import CapturedStep
from frameworm.errors import TrainingPreemptedError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Ranks = Callable[..., list[Any]]
STEPS, MICRO, BAD = 30, 4, 20


def _net(seed: int = 3, dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(),
        nn.Linear(64, 3),
    )  # fmt: skip


def _data(world_size: int, accumulation: int) -> TensorDataset:
    """Steps of full size, one of them with a sample that is not finite, and a short last one."""
    size = MICRO * accumulation * world_size
    inputs, target = classification(STEPS * size - size // 2).tensors
    inputs = inputs.clone()
    inputs[(BAD - 1) * size] = float("inf")
    return TensorDataset(inputs, target)


def _train(
    model: nn.Module, data: Any, *, capture: str = "step", resume: Any = None, callbacks: Any = (), **settings: Any
) -> tuple[RunRecord, list[Any]]:
    made = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    steps = Steps()
    if settings["strategy"] in ("ddp", "zero1"):
        settings.setdefault("bucket_cap_mb", 0.01)  # several buckets
    settings = {"device": "cuda", "device_ids": [0] * dist.get_world_size(), "clip_norm": 1.0, "seed": 7, **settings}

    def scheduler(total: int | None) -> Schedule:
        return Schedule(made, "onecycle", total or 50, 0.0)

    trainer = Trainer(
        model,
        made,
        scheduler=scheduler,
        **{"run_dir": None, **settings},
        capture=capture,
        progress=False,
        callbacks=[steps, *callbacks],
    )
    loader = data
    if isinstance(data, TensorDataset):
        loader = OptimizedDataLoader.create(data, MICRO, shuffle=False, num_workers=0)
    return trainer.train(loader, resume=resume), steps.records


def _whole(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.flatten().cpu() for value in whole_values(model).values()])


CASES = [
    {"strategy": strategy, "accumulation": accumulation, "mixed_precision": precision, "compression": compression}
    for strategy, accumulation, precision, compression in itertools.product(
        ("ddp", "zero1", "zero2", "zero3"), (1, 3), ("off", "bf16"), ("off", "int8", "int4")
    )
    if compression == "off" or strategy in ("ddp", "zero1")
]
CASES += [{"strategy": "ddp", "compression": method} for method in ("topk", "powersgd", "bf16")]
# One message in place of the buckets.
CASES += [
    {"strategy": strategy, "accumulation": accumulation, "mixed_precision": precision, "bucket_cap_mb": 25.0}
    for strategy, accumulation, precision in itertools.product(("ddp", "zero1"), (1, 3), ("off", "bf16", "fp16"))
]
CASES += [{"strategy": "ddp", "mixed_precision": "fp16", "compression": method} for method in ("off", "int8")]


def _compared(rank: int, world_size: int, cases: list[dict[str, Any]]) -> list[Any]:
    join_on_one_gpu(rank, world_size)
    found: list[Any] = []
    for case in cases:
        data = _data(world_size, case.get("accumulation", 1))
        models = _net(), _net()
        record, steps = _train(models[0], data, **case)
        _, expected = _train(models[1], data, capture="rehearse", **case)
        own, theirs = (_whole(model) for model in models)
        figures = [[(step.loss, step.skipped, step.lr) for step in some] for some in (steps, expected)]
        problem = ""
        if not torch.isfinite(own).all():
            problem = "not finite"
        elif not torch.equal(own, theirs):
            problem = f"parameters differ by {(own - theirs).abs().max():.2g}"
        elif str(figures[0]) != str(figures[1]):
            problem = "losses, skipped steps or rates differ"
        elif not steps[BAD - 1].skipped:
            problem = f"step {BAD} was not skipped"
        elif not STEPS - 16 <= (record.captured_steps or 0) < STEPS:
            problem = f"{record.captured_steps} steps captured: {record.notes}"
        found.append((case, problem))
    return found


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_captured_steps_of_two_ranks_equal_eager_ones_to_the_last_bit(run_ranks: Ranks, strategy: str) -> None:
    cases = [case for case in CASES if case["strategy"] == strategy]
    for found in run_ranks(_compared, 2, (cases,), timeout_s=240):
        assert [item for item in found if item[1]] == []


def test_four_ranks(run_ranks: Ranks) -> None:
    cases = [{"strategy": "ddp"}, {"strategy": "zero1", "compression": "int8"}, {"strategy": "zero2"}]
    for found in run_ranks(_compared, 4, (cases,), timeout_s=200):
        assert [item for item in found if item[1]] == []


def _automatic(rank: int, world_size: int) -> Any:
    join_on_one_gpu(rank, world_size)
    model, eager = _net(), _net()
    record, steps = _train(model, classification(800), capture="auto", strategy="ddp")
    _train(eager, classification(800), capture="off", strategy="ddp")
    seen = [step for step in steps if step.phases.get("communication_exposed")]
    return record, _whole(model), _whole(eager), len(seen)


def test_what_is_sent_inside_a_graph_is_seen(run_ranks: Ranks) -> None:
    for record, own, eager, _ in run_ranks(_automatic, 2, timeout_s=120):
        if not record.captured_steps:  # two ranks on one GPU take turns, and may gain nothing
            assert any("gains nothing" in note for note in record.notes), record.notes
        torch.testing.assert_close(own, eager, rtol=2e-3, atol=2e-4)


def _observed(rank: int, world_size: int) -> Any:
    join_on_one_gpu(rank, world_size)
    record, steps = _train(_net(), classification(4000), strategy="ddp")
    return record, [step for step in steps[30:] if step.phases]


def test_phases_and_buckets_come_from_inside_the_graph(run_ranks: Ranks) -> None:
    for record, steps in run_ranks(_observed, 2, timeout_s=120):
        assert record.captured_steps, record.notes
        assert record.communication.exposed_s
        assert len(record.communication.buckets) > 1
        for bucket in record.communication.buckets:
            assert 0 < bucket.ready_s <= bucket.start_s <= bucket.end_s
        for name in ("forward", "backward", "communication_exposed", "optimizer"):
            assert all(step.phases[name] > 0 for step in steps), name
        for step in steps:
            assert sum(step.phases.values()) == pytest.approx(step.step_s, rel=1e-3)


class Asks(nn.Module):
    """Waits for the device in forward, on one rank."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.inner = _net(dropout=0.0)
        self.asks = asks

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores = self.inner(inputs)
        return scores * 2 if self.asks and scores.sum().item() > 1e9 else scores


class Breaks(Asks):
    """Does what a graph cannot hold while one is recorded, on one rank."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.asks and torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return self.inner(inputs)


def _asked(rank: int, world_size: int) -> Any:
    join_on_one_gpu(rank, world_size)
    found = []
    for kind in (Asks, Breaks):
        model = kind(asks=rank == 1)
        record, steps = _train(model, classification(400), strategy="ddp")
        again, _ = _train(_net(), classification(400), strategy="ddp")
        found.append((record.captured_steps, record.notes, len(steps), _whole(model), again.captured_steps))
    return found


def test_a_wait_planted_on_one_rank_makes_all_go_on_eagerly(run_ranks: Ranks) -> None:
    first, second = run_ranks(_asked, 2, timeout_s=120)
    for own, other in zip(first, second):
        assert torch.equal(own[3], other[3])
        for captured, notes, steps, _, again in (own, other):
            assert captured == 0
            assert steps == 50
            assert any("not captured: rank 1" in note for note in notes), notes
            assert again, "another run of these processes can capture"


class Own(IterableDataset[Any]):
    """Batches of this rank alone."""

    shards_itself = True

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def _uneven(rank: int, world_size: int) -> Any:
    """A loader of torch whose last batch is short on one rank only, and one with a batch of odd shape."""
    join_on_one_gpu(rank, world_size)
    inputs, target = classification(400).tensors
    first, second = _net(), _net()
    record, steps = _train(first, DataLoader(TensorDataset(inputs[:398], target[:398]), MICRO), strategy="ddp")
    batches = [(inputs[i : i + 4], target[i : i + 4]) for i in range(0, 200, 4)] * 30
    if rank:
        batches[30] = (inputs[:4, None], target[:4, None])
    odd, _ = _train(second, DataLoader(Own(batches), batch_size=None), strategy="ddp", loss_fn=_flat_loss)
    return record.captured_steps, len(steps), _whole(first), odd.captured_steps, odd.notes, _whole(second)


def _flat_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def test_ranks_with_unequal_data_do_not_hang(run_ranks: Ranks) -> None:
    first, second = run_ranks(_uneven, 2, timeout_s=300)
    assert torch.equal(first[2], second[2])
    assert torch.equal(first[5], second[5])
    for captured, steps, _, odd, notes, _ in (first, second):
        assert captured
        assert steps == 50
        assert 0 < odd < 1500, notes
        assert any("another shape" in note for note in notes), notes


class Leaves(Callback):
    """Ends a rank in the middle of its replays, or stops it from coming any further."""

    def __init__(self, how: str) -> None:
        self._how = how

    def on_step(self, step: Any) -> None:
        if step.step == 60 and self._how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if step.step == 60 and self._how == "late":
            time.sleep(600)


def _left(rank: int, world_size: int, how: str, folder: str) -> None:
    join_on_one_gpu(rank, world_size)
    callbacks = [Leaves(how)] if rank == 1 else []
    _train(
        _net(), classification(80_000), strategy="ddp", callbacks=callbacks, watchdog_s=4, run_dir=Path(folder) / "run"
    )


@pytest.mark.parametrize("how", ["killed", "late"])
def test_a_rank_that_leaves_during_replays_is_named_in_time(run_ranks: Ranks, tmp_path: Path, how: str) -> None:
    begun = time.monotonic()
    with pytest.raises(AssertionError, match="rank"):
        run_ranks(_left, 2, (how, str(tmp_path)), timeout_s=60, grace_s=30)
    assert time.monotonic() - begun < 55, "the watchdog ends the others"
    account = (tmp_path / "run" / "stuck-rank0.txt").read_text()
    assert "rank 1" in account.splitlines()[0], account


class Preempted(Callback):
    """Sends this process a signal after a step, as a scheduler does."""

    def on_step(self, step: Any) -> None:
        if step.step == 40:
            os.kill(os.getpid(), signal.SIGTERM)


def _resumed(rank: int, world_size: int, folder: str) -> Any:
    join_on_one_gpu(rank, world_size)
    data = classification(150 * MICRO * world_size)
    whole, part, resumed = _net(), _net(), _net(seed=9)
    _train(whole, data, strategy="ddp", run_dir=Path(folder) / "whole")
    with pytest.raises(TrainingPreemptedError):
        _train(part, data, strategy="ddp", run_dir=Path(folder) / "run", callbacks=[Preempted()])
    record, steps = _train(resumed, data, strategy="ddp", run_dir=Path(folder) / "run", resume=Path(folder) / "run")
    return record.captured_steps, steps[0].step, _whole(whole), _whole(resumed)


def test_preempted_and_resumed(run_ranks: Ranks, tmp_path: Path) -> None:
    for captured, first, whole, resumed in run_ranks(_resumed, 2, (str(tmp_path),), timeout_s=120):
        assert 40 < first < 130
        assert captured
        torch.testing.assert_close(resumed, whole, rtol=2e-3, atol=2e-4)


def _alone(rank: int, world_size: int) -> Any:
    join_on_one_gpu(rank, world_size)
    captured: list[int] = []
    usual = CapturedStep._record

    def record(step: CapturedStep, *parts: Any) -> Any:
        group: Any = dist.group.WORLD
        before = group._get_sequence_number_for_group()
        graph = usual(step, *parts)
        captured.append(group._get_sequence_number_for_group() - before)
        return graph

    CapturedStep._record = record  # type: ignore[assignment, method-assign]
    model = _net()
    result, _ = _train(model, classification(400), strategy="ddp")
    return captured, result.captured_steps, result.strategy


def test_the_all_reduce_of_ddp_is_in_the_graph_of_one_rank(run_ranks: Ranks) -> None:
    ((captured, steps, strategy),) = run_ranks(_alone, 1, timeout_s=60)
    assert strategy == "ddp"
    assert steps
    (count,) = captured
    assert count > 1, "one for each bucket"
