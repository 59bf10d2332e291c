"""Replicas that must be the same, and copies that are averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from frameworm.errors import ModelError
from frameworm.parallel.averaging import AveragingStrategy
from frameworm.parallel.replicas import check_replicas, fingerprint


def test_a_fingerprint_sees_every_bit_and_the_order() -> None:
    tensor = torch.randn(1000)
    same = fingerprint(tensor.clone())
    assert fingerprint(tensor) == same
    flipped = tensor.clone()
    flipped.view(torch.int32)[17] ^= 1
    assert fingerprint(flipped) != same
    swapped = tensor.clone()
    swapped[[3, 4]] = tensor[[4, 3]]
    assert fingerprint(swapped) != same
    assert fingerprint(torch.zeros(3)) != fingerprint(torch.zeros(4))
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    assert fingerprint(tensor.bfloat16()).dtype == torch.int64


def _differing(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    check_replicas(model, 1)
    if rank == 1:
        with torch.no_grad():
            model[1].bias[2] += 1e-7
    try:
        check_replicas(model, 2)
    except ModelError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_strayed_is_named(run_ranks: Any) -> None:
    for text in run_ranks(_differing, 2):
        assert "after step 2" in text
        assert "1.bias of rank 1" in text
        assert "1 of 4 parameters" in text


def _averaged(rank: int, world_size: int) -> tuple[list[bool], list[float], float, int | None]:
    torch.manual_seed(rank)
    model = nn.Linear(3, 1)
    model.register_buffer("seen", torch.tensor(float(rank)))
    strategy = AveragingStrategy(torch.device("cpu"), rank, world_size, sync_every=2)
    assert strategy.place(model) is model
    check_replicas(model, 0)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    met = []
    for step in range(1, 5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += rank + 1  # ranks part by one in each step
        versions = [parameter._version for parameter in model.parameters()]
        met.append(strategy.after_step(model, step))
        written = [parameter._version > before for parameter, before in zip(model.parameters(), versions)]
        assert written == [met[-1]] * 2, "who keeps casts of the parameters must see that they were written"
    check_replicas(model, 4)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    start = model.weight.detach() - 4 * 1.5
    return met, start.flatten().tolist(), float(model.seen), strategy.communicated_bytes(model)


def test_copies_meet_in_the_middle(run_ranks: Any) -> None:
    results = run_ranks(_averaged, 2)
    torch.manual_seed(0)
    weight = nn.Linear(3, 1).weight.detach().flatten().tolist()
    for met, start, seen, sent in results:
        assert met == [False, True, False, True]
        assert start == pytest.approx(weight, abs=1e-5)  # everybody began with rank 0's
        assert seen == 0.0
        assert sent == 4 * 4 // 2


def _validated(rank: int, world_size: int) -> tuple[list[float], float]:
    model = nn.Linear(3, 1)
    model.register_buffer("seen", torch.tensor(0.0))
    strategy = AveragingStrategy(torch.device("cpu"), rank, world_size, sync_every=2)
    strategy.place(model)
    with torch.no_grad():
        model.weight.fill_(float(rank))
        model.seen.fill_(float(rank))
    assert not strategy.after_step(model, 1)
    strategy.sync_buffers(model)
    return model.weight.flatten().tolist(), float(model.seen)


def test_validation_sees_the_mean_of_the_copies_between_two_averagings(run_ranks: Any) -> None:
    assert run_ranks(_validated, 2) == [([0.5] * 3, 0.0)] * 2
