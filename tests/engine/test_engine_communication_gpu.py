"""Communication between two ranks that share one GPU, by gloo and by NCCL: delays and late ranks are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from delays import Link, Slow, median
from one_gpu import join_on_one_gpu
from torch import nn
from torch.utils.data import DataLoader
from workbench import Steps, classification, mlp, parameters

from frameworm import RunRecord, Trainer
from frameworm.parallel import replicated
from frameworm.parallel.replicated import DDPStrategy
from frameworm.records.schema import StepRecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WARM_UP = 10
WAIT_S = 0.05

Ranks = Callable[..., list[Any]]


def _train(model: nn.Module, number: int = 100) -> tuple[RunRecord, list[StepRecord]]:
    steps = Steps()
    settings: dict[str, Any] = {"max_steps": number, "run_dir": None, "device": "cuda", "device_ids": [0, 0]}
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[steps], **settings)
    record = trainer.train(DataLoader(classification(2000), batch_size=8))
    assert [item.step for item in steps.records] == list(range(1, number + 1))
    divided = [item for item in steps.records if item.phases]
    for item in divided:
        assert sum(item.phases.values()) == pytest.approx(item.step_s, rel=1e-3)
    return record, [item for item in divided if item.step > WARM_UP]


def _group(backend: str, rank: int, world_size: int) -> None:
    if backend == "nccl":
        join_on_one_gpu(rank, world_size)
    # So that a group that cannot be formed says so here.
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    assert one.item() == world_size


def _exposed(steps: list[StepRecord]) -> float:
    return median(step.phases["communication_exposed"] for step in steps)


def _everything(rank: int, world_size: int, backend: str) -> dict[str, Any]:
    _group(backend, rank, world_size)
    found: dict[str, Any] = {}
    observed = mlp()
    found["plain"] = _train(observed)
    hook = replicated.mean_of_gradients
    replicated.mean_of_gradients = Link(WAIT_S, every=1)  # type: ignore[assignment]
    found["delayed"] = _train(mlp(), 40)
    replicated.mean_of_gradients = hook
    torch.manual_seed(0)
    slow = Slow(forward_s=WAIT_S if rank == 1 else 0.0)
    found["late"] = _train(nn.Sequential(nn.Linear(6, 16), slow, nn.Linear(16, 3)), 60)
    DDPStrategy.wrap_hook = lambda self, wrap: False  # type: ignore[method-assign, assignment]
    alone = mlp()
    _train(alone)
    found["same"] = torch.equal(parameters(observed), parameters(alone))
    return found


def _check(found_s: float, planted_s: float, backend: str, what: str) -> None:
    # Processes take turns on a GPU, and NCCL's kernels wait there for each other: each meeting costs some turns.
    tolerance_s = 0.1 * planted_s if backend == "gloo" else 0.3 * planted_s
    assert abs(found_s - planted_s) <= tolerance_s, f"{what}: {1e3 * found_s:.1f} ms, planted {1e3 * planted_s:.1f} ms"


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_ranks_on_one_gpu(run_ranks: Ranks, backend: str) -> None:
    first, second = run_ranks(_everything, args=(backend,), timeout_s=150)
    for rank, found in enumerate((first, second)):
        assert found["same"], "observation must not change a bit"
        plain, plain_steps = found["plain"]
        assert plain.communication.total_s is not None
        assert plain.communication.exposed_s <= plain.communication.total_s * 1.01
        (bucket,) = plain.communication.buckets
        assert 0 < bucket.ready_s <= bucket.start_s <= bucket.end_s
        delay_s = _exposed(found["delayed"][1]) - _exposed(plain_steps)
        _check(delay_s, WAIT_S, backend, f"rank {rank}: exposed more where gradients come late")
    record, steps = first["late"]
    waits = [step.rank_wait_s for step in steps if step.rank_wait_s is not None]
    assert len(waits) >= len(steps) // 2, f"a wait in {len(waits)} of {len(steps)} steps"
    _check(median(waits), WAIT_S, backend, "rank 0 waits for rank 1")
    assert [found["late"][0].communication.slowest_rank for found in (first, second)] == [1, 1]
    assert [item.rank for item in record.ranks] == [0, 1]
    own = [step.rank_wait_s for step in second["late"][1] if step.rank_wait_s is not None]
    assert median(own) < WAIT_S / 5, f"rank 1 waits {1e3 * median(own):.1f} ms for rank 0"
