"""Choosing a strategy, and refusing what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from frameworm.config.schema import ParallelConfig
from frameworm.errors import ConfigError, DeviceError, EnvironmentSetupError
from frameworm.parallel.choose import choose_strategy
from frameworm.parallel.replicated import DDPStrategy
from frameworm.parallel.strategy import Strategy

CPU = torch.device("cpu")


def test_auto_follows_the_number_of_processes() -> None:
    assert choose_strategy(ParallelConfig(), CPU, rank=0, world_size=1).name == "single"
    with pytest.raises(EnvironmentSetupError, match="process group"):
        choose_strategy(ParallelConfig(), CPU, rank=0, world_size=2)


@pytest.mark.parametrize("name", ["single", "dp"])
def test_one_process_strategies_refuse_several(name: str) -> None:
    with pytest.raises(ConfigError, match="use ddp"):
        choose_strategy(ParallelConfig(strategy=name), CPU, rank=0, world_size=2)  # type: ignore[arg-type]


def test_data_parallel_needs_gpus() -> None:
    with pytest.raises(DeviceError):
        choose_strategy(ParallelConfig(strategy="dp"), CPU, rank=0, world_size=1)


def test_single_communicates_nothing() -> None:
    strategy = Strategy(CPU)
    model = nn.Linear(2, 2)
    assert strategy.place(model) is model
    assert strategy.communicated_bytes(model) == 0
    value = torch.ones(3)
    strategy.sum_over_ranks(value)
    assert torch.equal(value, torch.ones(3))


def _ddp(rank: int, world_size: int) -> Any:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    strategy = DDPStrategy(CPU, rank, world_size, ParallelConfig())
    strategy.place(model)
    weights = model[0].weight.detach().clone()
    model[1].running_mean.fill_(float(rank + 1))  # type: ignore[union-attr, operator]
    strategy.sync_buffers(model)
    total = torch.tensor(float(rank + 1))
    strategy.sum_over_ranks(total)
    return weights, model[1].running_mean, float(total), strategy.communicated_bytes(model)


def test_ddp_starts_from_rank_0_and_shares_its_buffers(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(_ddp, 2)
    assert torch.equal(first[0], second[0])
    assert torch.equal(second[1], torch.ones(2))
    assert first[2] == second[2] == 3.0
    assert first[3] == (4 + 2 + 2 + 2) * 4
