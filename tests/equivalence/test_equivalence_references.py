"""The references themselves: the plain loops agree with each other and with torch's own DDP, ZeRO-1 and FSDP."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cells import Cell
from options import BATCH, SAMPLES
from plain_loop import Trained, train_plain, train_plain_ranks
from rank_pair import RankError, RankPair
from recipe import EPOCHS, build
from torch.nn.parallel import DistributedDataParallel
from verdicts import TOLERANCE, compare, shares_of, uncovered

SEEDS = [31, 32]


def in_turn(ranks: int) -> list[list[list[int]]]:
    """Samples by rank and forward pass: each step's samples in order, the first half to rank 0."""
    passes: list[list[list[int]]] = [[] for _ in range(ranks)]
    for begin in list(range(0, SAMPLES, BATCH)) * EPOCHS:
        step = list(range(begin, min(begin + BATCH, SAMPLES)))
        size = -(-len(step) // ranks)
        for rank in range(ranks):
            passes[rank].append(step[rank * size : (rank + 1) * size])
    return passes


def played(cell: Cell) -> Trained:
    return train_plain_ranks(build(cell), shares_of(cell, in_turn(cell.ranks)), SEEDS[: cell.ranks])


@pytest.mark.parametrize("loss", ["function", "weighted", "module with parameters", "model's own"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_two_ranks_train_as_one_with_the_global_batch(loss: str, accumulation: int) -> None:
    cell = Cell(loss=loss, loader="function", scheduler="LambdaLR", accumulation=accumulation)
    plain = train_plain(build(cell), accumulation)
    ranks = played(Cell(**{**vars(cell), "strategy": "ddp"}))
    assert list(compare(ranks, plain, TOLERANCE)) == []


@pytest.mark.parametrize("layer", ["dropout", "BatchNorm", "sparse"])
def test_one_rank_alone_is_the_plain_loop(layer: str) -> None:
    cell = Cell(layer=layer, loader="function", scheduler="OneCycleLR", optimizer="frozen")
    recipe = build(cell)
    # A DataLoader draws a random number for its workers, which the reference for ranks does not.
    recipe.validation = list(recipe.validation)
    torch.manual_seed(SEEDS[0])
    plain = train_plain(recipe, 1)
    assert list(compare(played(cell), plain, 1e-6)) == []


def test_accumulation_is_one_large_batch() -> None:
    cell = Cell(loss="weighted", loader="function", accumulation=3)
    recipe = build(cell)
    whole = [
        recipe.batch_of(list(range(begin, min(begin + 3 * BATCH, SAMPLES)))) for begin in range(0, SAMPLES, 3 * BATCH)
    ]
    recipe.train = whole
    assert list(compare(train_plain(recipe, 1), train_plain(build(cell), 3), TOLERANCE)) == []


def by_torch(rank: int, cell: Cell) -> Trained:
    """Plain DDP, ZeRO-1 and FSDP as torch's tutorials write them."""
    recipe = build(cell, rank)
    ranks = cell.ranks
    if cell.strategy in ("zero2", "zero3"):
        from torch.distributed.fsdp import fully_shard

        before = dict(recipe.model.named_parameters())
        names = {id(item): name for name, item in before.items()}
        model: Any = fully_shard(recipe.model, reshard_after_forward=cell.strategy == "zero3")
        for group in recipe.optimizer.param_groups:
            group["params"] = [model.get_parameter(names[id(item)]) for item in group["params"]]
    else:
        model = DistributedDataParallel(recipe.model)
    optimizer: Any = recipe.optimizer
    if cell.strategy == "zero1":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import ZeroRedundancyOptimizer
        optimizer = ZeroRedundancyOptimizer(recipe.model.parameters(), torch.optim.AdamW, lr=0.01, eps=1e-4)
    torch.manual_seed(SEEDS[rank])
    for epoch in shares_of(cell, in_turn(ranks)):
        model.train()
        for step in epoch:
            optimizer.zero_grad()
            total = sum(recipe.count(recipe.batch_of(micro)) for share in step for micro in share)
            for place, micro in enumerate(step[rank]):
                last = place + 1 == len(step[rank])
                batch = recipe.batch_of(micro)
                if hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(last)
                with contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                    (recipe.loss(model, batch) * (recipe.count(batch) * ranks / total)).backward()
            optimizer.step()
    for buffer in recipe.model.buffers():
        dist.broadcast(buffer, src=0)
    return Trained(recipe.state())


@pytest.mark.parametrize(
    "cell",
    [
        Cell(strategy="ddp", layer="BatchNorm", accumulation=3),
        Cell(strategy="ddp", layer="dropout", loss="weighted"),
        Cell(strategy="ddp", layer="sparse", optimizer="frozen"),
        Cell(strategy="zero1", layer="BatchNorm", optimizer="AdamW"),
        Cell(strategy="zero2", layer="dropout", optimizer="AdamW", accumulation=3),
        Cell(strategy="zero3", layer="BatchNorm", optimizer="param groups"),
    ],
    ids=str,
)
def test_ranks_played_by_one_process_train_as_torch_does(cell: Cell, pair: RankPair) -> None:
    found = pair.call(by_torch, cell)[0]
    expected = played(cell)
    expected.train_losses, expected.val_losses, expected.rates = [], [], []
    assert list(compare(found, expected, TOLERANCE)) == []


def test_plain_fsdp_cannot_train_sparse_gradients(pair: RankPair) -> None:
    """The reason of a refusal that is allowed."""
    with pytest.raises(RankError, match=r"(?i)sparse|not implemented|could not run"):
        pair.call(by_torch, Cell(strategy="zero3", layer="sparse"))


# The suite would notice


def test_a_wrong_weight_is_far_beyond_the_tolerance() -> None:
    """A step whose ranks have three and two samples, each weighed by half."""
    cell = Cell(strategy="ddp", loader="function")
    shares = shares_of(cell, in_turn(2))
    right, recipe = played(cell), build(cell)
    recipe.count = lambda batch: 1.0
    wrong = train_plain_ranks(recipe, shares, SEEDS)
    smallest = max(float((right.state[name] - item).abs().max()) for name, item in wrong.state.items())
    assert smallest > 20 * TOLERANCE


def test_differences_are_named() -> None:
    one, other = played(Cell(strategy="ddp")), played(Cell(strategy="ddp"))
    assert list(compare(one, other, 0.0)) == []
    other.rates[3] *= 1.01
    other.val_losses[1] = float("nan")
    other.state["model.head.bias"] = other.state["model.head.bias"] + 1e-3
    del one.state["model.first.bias"]
    found = " ".join(compare(one, other, TOLERANCE))
    for word in ("rates", "val losses", "model.head.bias is", "model.first.bias is missing"):
        assert word in found
    assert "train losses" not in found


def test_samples_trained_twice_or_never_are_noticed() -> None:
    cell = Cell(strategy="ddp")
    seen = in_turn(2)
    assert uncovered(cell, seen) is None
    seen[1][2] = seen[1][1]
    assert "epoch 1 trained 44 of 47 samples" in str(uncovered(cell, seen))
    assert "15" in str(uncovered(cell, [in_turn(2)[0], in_turn(2)[1][1:]]))
