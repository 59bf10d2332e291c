"""What the sharding strategies leave on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from frameworm.config.schema import ParallelConfig
from frameworm.models.gpt import GPT
from frameworm.models.text_classifier import TextClassifier
from frameworm.parallel.choose import choose_strategy
from frameworm.parallel.units import find_units

CPU = torch.device("cpu")
WIDTH = 16
DEADLINE_S = 100.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden


def _bytes(tensors: Any) -> int:
    """What this rank holds of them; a part must not keep the whole alive."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    size = sum(part.numel() * part.element_size() for part in parts)
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    assert sum(storages.values()) == size
    return size


def _state(optimizer: Any) -> list[torch.Tensor]:
    inner = getattr(optimizer, "optim", optimizer)
    return [item for state in inner.state.values() for key, item in state.items() if key != "step"]


def _held(rank: int, world_size: int) -> dict[str, tuple[int, int, int]]:
    found = {}
    for name in ("ddp", "zero1", "zero2", "zero3"):
        torch.manual_seed(rank)  # rank 0's values count
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        strategy = choose_strategy(ParallelConfig(strategy=name), CPU, rank=rank, world_size=world_size)
        wrapped = strategy.place(model)
        optimizer = strategy.shard_optimizer(optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            wrapped(torch.ones(2, WIDTH)).square().sum().backward()
            gradients = _bytes([item.grad for item in model.parameters()])
            optimizer.step()
        inner = getattr(optimizer, "optim", optimizer)
        parameters = _bytes(model.parameters())
        assert all(item is other for item, other in zip(inner.param_groups[0]["params"], inner.state))
        found[name] = (parameters, gradients, _bytes(_state(optimizer)))
        strategy.close()
    return found


@pytest.mark.slow
def test_state_is_really_divided(run_ranks: Callable[..., list[Any]]) -> None:
    whole = 4 * WIDTH * WIDTH * 4
    for found in run_ranks(_held, 2, timeout_s=DEADLINE_S):
        assert found == {
            "ddp": (whole, whole, 2 * whole),
            "zero1": (whole, whole, whole),
            "zero2": (whole // 2, whole // 2, whole),
            "zero3": (whole // 2, whole // 2, whole),
        }


def _gathered(rank: int, world_size: int) -> dict[str, list[bool]]:
    """Which layers are whole between forward and backward, and after it."""
    found = {}
    for name in ("zero2", "zero3"):
        model = Model()
        strategy = choose_strategy(ParallelConfig(strategy=name), CPU, rank=rank, world_size=world_size)
        strategy.place(model)
        result = model(torch.ones(2, WIDTH))
        between = [not isinstance(item, DTensor) for item in model.parameters()]
        result.sum().backward()
        after = [not isinstance(item, DTensor) for item in model.parameters()]
        found[name] = [all(between), any(between), any(after)]
    return found


@pytest.mark.slow
def test_only_zero2_keeps_layers_whole_until_backward(run_ranks: Callable[..., list[Any]]) -> None:
    for found in run_ranks(_gathered, 2, timeout_s=DEADLINE_S):
        assert found["zero2"] == [True, True, False]
        assert found["zero3"][2] is False
        assert found["zero3"][0] is False


def _public(rank: int, world_size: int) -> dict[str, Any]:
    from frameworm.distributed import ZeROStage1Optimizer

    torch.manual_seed(0)
    model, twin = Model(), Model()
    twin.load_state_dict(model.state_dict())
    optimizer = ZeROStage1Optimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    plain = torch.optim.Adam(twin.parameters(), lr=0.01)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(torch.ones(2, WIDTH)), torch.zeros(2, WIDTH)).backward()
        optimizer.step()

    for _ in range(3):
        step(model, optimizer)
        step(twin, plain)
    own = len(optimizer.optim.state)
    optimizer.consolidate_state_dict(to=0)
    states = [optimizer.state_dict() if rank == 0 else None]
    torch.distributed.broadcast_object_list(states, src=0)
    again = ZeROStage1Optimizer(model.parameters(), torch.optim.Adam, lr=0.5)
    assert states[0] is not None
    again.load_state_dict(states[0])
    step(model, again)
    step(twin, plain)
    return {
        "own": own,
        "lr": again.param_groups[0]["lr"],
        "difference": max(float((a - b).abs().max()) for a, b in zip(model.parameters(), twin.parameters())),
    }


@pytest.mark.slow
def test_the_public_optimizer_is_adam_in_parts(run_ranks: Callable[..., list[Any]]) -> None:
    for result in run_ranks(_public, 2, timeout_s=DEADLINE_S):
        assert result["own"] == 2
        assert result["lr"] == 0.01
        assert result["difference"] < 1e-6


def test_layers_are_found() -> None:
    gpt = GPT(32, d_model=8, n_heads=2, num_layers=3, max_seq_len=8)
    assert set(find_units(gpt)) == set(gpt.layers)
    classifier = TextClassifier(32, 4, d_model=8, n_heads=2, num_layers=2, dim_feedforward=8, max_seq_len=8)
    assert set(find_units(classifier)) == set(classifier.layers)
    assert find_units(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))) == []
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)], nn.Linear(2, 2))
    assert set(find_units(blocks)) == {blocks[0], blocks[1]}


def test_a_layer_that_shares_a_weight_with_the_outside_is_not_divided_apart() -> None:
    model = Model()
    model.layers[1].weight = model.layers[0].weight
    assert set(find_units(model)) == {model.layers[2], model.layers[3]}


def test_inner_layers_come_before_those_around_them() -> None:
    inner = [nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(2)]

    class Outer(nn.Module):
        def __init__(self, parts: nn.ModuleList) -> None:
            super().__init__()
            self.parts = parts

    model = nn.ModuleList(Outer(part) for part in inner)
    found = find_units(model)
    assert len(found) == 6
    for outer in model:
        assert all(found.index(part) < found.index(outer) for part in outer.parts)  # type: ignore[union-attr]
