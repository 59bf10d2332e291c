"""The names of the contract for several processes, used on two gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conformance_cases import classifier, data
from contract_entries import covers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from frameworm import Trainer
from frameworm.distributed import (
    CompressedDDP,
    DDPTrainer,
    ZeROStage1Optimizer,
    cleanup,
    enable_gradient_compression,
    find_optimal_batch_size,
    setup_ddp,
)

pytestmark = pytest.mark.slow
METHODS = ("fp16", "bf16", "int8", "int4", "topk", "powersgd", "auto")


def weights(model: nn.Module) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


class Seen(nn.Module):
    """Keeps the first feature of every sample that it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()
        self.seen: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += inputs[:, 0].tolist()
        return self.inner(inputs)  # type: ignore[no-any-return]


def train_by_ddp(rank: int, world_size: int) -> dict[str, Any]:
    info = setup_ddp(rank, world_size)
    model = Seen()
    trainer = DDPTrainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), rank, world_size, run_dir=None, device="cpu"
    )
    result = trainer.train(DataLoader(data(), 6))
    batch = result.batch
    trainer.cleanup()
    cleanup()
    return {
        "world_size": info.world_size,
        "seen": model.seen,
        "weights": weights(model),
        "batch": (batch.micro, batch.accumulation, batch.world_size, batch.global_),
        "left": not dist.is_initialized(),
    }


@covers("DDPTrainer", "DDPTrainer.train", "DDPTrainer.cleanup", "setup_ddp", "cleanup", "plain-loader-is-split")
def test_ddp_splits_a_plain_loader_and_keeps_replicas_equal(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(train_by_ddp)
    assert first["weights"] == second["weights"]
    assert sorted(first["seen"] + second["seen"]) == sorted(data().tensors[0][:, 0].tolist())
    assert first["batch"] == (6, 1, 2, 12)
    assert first["world_size"] == 2
    assert first["left"]


def train_by_strategy(rank: int, world_size: int) -> dict[str, list[list[float]]]:
    found = {}
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        model = classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        Trainer(model, optimizer, strategy=strategy, run_dir=None, device="cpu").train(DataLoader(data(), 6))
        state = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in model.state_dict().items()
        }
        found[strategy] = [value.flatten().tolist() for value in state.values()]
    return found


@covers("zero1", "zero2", "zero3")
def test_every_stage_trains_what_ddp_trains(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(train_by_strategy, timeout_s=200)
    for stage in ("zero1", "zero2", "zero3"):
        assert first[stage] == second[stage]
        for one, other in zip(first[stage], first["ddp"], strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-4, atol=1e-5)


def own_loop(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for method in METHODS:
        model = DistributedDataParallel(classifier())
        enabled = enable_gradient_compression(model, rank, method=method, compression_ratio=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, targets in DataLoader(data(), 6):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs * (1 + rank)), targets).backward()
            optimizer.step()
        assert "world_size" in enabled.state_dict()
        enabled.close()
        found[method] = weights(model)
    return found


@covers("enable_gradient_compression")
def test_every_codec_keeps_replicas_equal_to_the_bit(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(own_loop, timeout_s=200)
    assert first == second
    assert set(first) == set(METHODS)


def compressed_loop(rank: int, world_size: int) -> list[list[float]]:
    model = CompressedDDP(classifier(), compression_ratio=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in DataLoader(data(), 6):
        optimizer.zero_grad()
        model.backward_with_compression(nn.functional.cross_entropy(model(inputs * (1 + rank)), targets))
        optimizer.step()
    return weights(model)


@covers("CompressedDDP", "CompressedDDP.backward_with_compression")
def test_the_wrapper_of_the_older_guides(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(compressed_loop)
    assert first == second


def sharded_optimizer(rank: int, world_size: int) -> list[list[float]]:
    model = DistributedDataParallel(classifier())
    optimizer = ZeROStage1Optimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-2)
    for inputs, targets in DataLoader(data(), 6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs * (1 + rank)), targets).backward()
        optimizer.step()
    return weights(model)


@covers("ZeROStage1Optimizer")
def test_the_sharded_optimizer_in_a_loop_of_ones_own(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(sharded_optimizer)
    assert first == second


@covers("find_optimal_batch_size")
def test_the_largest_batch_is_found_and_verified() -> None:
    found = find_optimal_batch_size(classifier(), max_batch_size=8, data=data(), budget_s=200, device="cpu")
    assert int(found) == 8
