"""k micro-batches of b on w ranks train like one batch of k x b x w."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from workbench import Sequences, classification, fit, mlp, parameters, tagger

from frameworm.parallel import replicated

# 41 samples in global batches of 8: five full steps and a last one of a single sample.
SAMPLES = 41


def _distance(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().max())


@pytest.mark.parametrize("loader", ["ours", "foreign"])
@pytest.mark.parametrize(("batch_size", "accumulation"), [(4, 2), (2, 4), (1, 8), (3, 3)])
def test_accumulation_equals_one_large_batch(batch_size: int, accumulation: int, loader: str) -> None:
    data = classification(SAMPLES)
    whole = batch_size * accumulation
    _, expected, _ = fit(mlp(), data, batch_size=whole, loader=loader)
    _, found, steps = fit(mlp(), data, batch_size=batch_size, accumulation=accumulation, loader=loader)
    assert _distance(expected, found) < 1e-6
    assert len(steps) == -(-SAMPLES // whole)
    assert sum(step.samples for step in steps) == SAMPLES


def test_accumulation_equals_one_large_batch_under_adamw() -> None:
    data = classification(SAMPLES)
    expected, _, _ = fit(mlp(), data, optimizer="adamw", batch_size=8, epochs=3)
    found, _, _ = fit(mlp(), data, optimizer="adamw", batch_size=2, accumulation=4, epochs=3)
    assert found.losses == pytest.approx(expected.losses, abs=1e-5)


def test_unequal_token_counts_weigh_as_in_one_batch() -> None:
    data = Sequences(SAMPLES)
    _, expected, _ = fit(tagger(), data, batch_size=8)
    _, found, steps = fit(tagger(), data, batch_size=2, accumulation=4)
    assert _distance(expected, found) < 1e-6
    assert len({step.count for step in steps[:-1]}) > 1, "the token counts were meant to differ"
    # The mistake this guards against, averaging micro-batches alike, would be seen:
    torch.manual_seed(0)
    wrong = tagger()
    optimizer = torch.optim.SGD(wrong.parameters(), lr=0.1)
    for start in range(0, 8, 2):
        rows = slice(start, start + 2)
        loss = torch.nn.functional.cross_entropy(wrong(data.tokens[rows]).flatten(0, 1), data.targets[rows].flatten())
        (loss / 4).backward()
    optimizer.step()
    right = tagger()
    optimizer = torch.optim.SGD(right.parameters(), lr=0.1)
    torch.nn.functional.cross_entropy(right(data.tokens[:8]).flatten(0, 1), data.targets[:8].flatten()).backward()
    optimizer.step()
    assert _distance(parameters(wrong), parameters(right)) > 1e-4


def _rank(rank: int, world_size: int, kind: str, batch_size: int, accumulation: int, loader: str) -> Any:
    synchronisations = 0
    hook = replicated.mean_of_gradients

    def counting(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        nonlocal synchronisations
        synchronisations += bucket.is_last()
        return hook(state, bucket)

    replicated.mean_of_gradients = counting
    data = classification(SAMPLES) if kind != "tokens" else Sequences(SAMPLES)
    model = tagger() if kind == "tokens" else mlp()
    optimizer = "adamw" if kind == "adamw" else "sgd"
    record, found, steps = fit(
        model,
        data,
        optimizer=optimizer,
        batch_size=batch_size,
        accumulation=accumulation,
        loader=loader,
        validation=classification(13, seed=9) if kind != "tokens" else None,
        epochs=2,
    )
    return found, record.losses, record.quality.val_loss, synchronisations, [step.samples for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "batch_size", "accumulation", "loader"),
    [("samples", 4, 1, "ours"), ("samples", 1, 4, "foreign"), ("adamw", 2, 2, "ours"), ("tokens", 2, 2, "ours")],
)
def test_two_ranks_equal_one_process(
    run_ranks: Callable[..., list[Any]], kind: str, batch_size: int, accumulation: int, loader: str
) -> None:
    data = Sequences(SAMPLES) if kind == "tokens" else classification(SAMPLES)
    expected, parameters_alone, alone = fit(
        tagger() if kind == "tokens" else mlp(),
        data,
        optimizer="adamw" if kind == "adamw" else "sgd",
        batch_size=8,
        loader=loader,
        validation=classification(13, seed=9) if kind != "tokens" else None,
        epochs=2,
    )
    results = run_ranks(_rank, 2, (kind, batch_size, accumulation, loader))
    steps = len(alone)
    for found, losses, val_loss, synchronisations, _ in results:
        tolerance = 1e-4 if kind == "adamw" else 1e-6
        assert _distance(parameters_alone, found) < tolerance
        assert losses == pytest.approx(expected.losses, abs=1e-5)
        assert val_loss == (None if kind == "tokens" else pytest.approx(expected.quality.val_loss, abs=1e-5))
        assert synchronisations == steps, "one gradient synchronisation per step"
    assert torch.equal(results[0][0], results[1][0]), "replicas must be bit-identical"
    shares = [result[4] for result in results]
    assert [sum(pair) for pair in zip(*shares)] == [step.samples for step in alone]
    assert 0 in (share[-1] for share in shares), "in the last step one rank has nothing of its own"
