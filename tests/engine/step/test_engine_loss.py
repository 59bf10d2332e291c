"""The ways a loss may be given, and the errors when none fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frameworm.engine.step.loss import LossFunction
from frameworm.errors import LossError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])
LINEAR = nn.Linear(4, 3)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, input_ids: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.layer(input_ids) * (1 if scale is None else scale)


class WithLoss(Named):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        logits = self.layer(input_ids)
        return SimpleNamespace(loss=F.cross_entropy(logits, labels), logits=logits)


class Scalar(Named):
    def forward(self, batch: Any) -> torch.Tensor:  # type: ignore[override]
        return self.layer(batch["features"]).square().mean()


def test_integer_targets_mean_cross_entropy() -> None:
    computed, right = LossFunction(LINEAR).scored(LINEAR, (X, Y))
    assert torch.equal(computed.loss, F.cross_entropy(LINEAR(X), Y))
    assert right is not None
    assert int(right[0]) == int((LINEAR(X).argmax(-1) == Y).sum())
    assert right[1] == 6


def test_a_loss_of_output_and_target() -> None:
    loss = LossFunction(LINEAR, lambda output, target: (output.sum(-1) - target).abs().mean())
    assert torch.equal(loss(LINEAR, [X, Y]).loss, (LINEAR(X).sum(-1) - Y).abs().mean())


def test_a_loss_of_model_and_batch_with_its_count() -> None:
    def by_tokens(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return model(batch[0]).mean(), 17

    computed, answers = LossFunction(LINEAR, by_tokens).scored(LINEAR, (X, Y))
    assert computed.count == 17
    assert answers is None


def test_mapping_batches_are_given_by_name() -> None:
    model = Named()
    computed = LossFunction(model)(model, {"input_ids": X, "scale": torch.tensor(2.0), "labels": Y})
    assert torch.equal(computed.loss, F.cross_entropy(model.layer(X) * 2, Y))


def test_a_model_that_takes_labels_returns_its_loss() -> None:
    model = WithLoss()
    computed, answers = LossFunction(model).scored(model, {"input_ids": X, "labels": Y})
    assert torch.equal(computed.loss, F.cross_entropy(model.layer(X), Y))
    assert answers is not None
    assert torch.equal(LossFunction(model)(model, (X, Y)).loss, computed.loss)


def test_a_model_that_takes_the_whole_mapping() -> None:
    model = Scalar()
    assert torch.equal(LossFunction(model)(model, {"features": X}).loss, model.layer(X).square().mean())


def test_targets_per_position_count_real_positions() -> None:
    scores = nn.Embedding(10, 5)
    tokens = torch.arange(6).reshape(2, 3)
    targets = torch.tensor([[1, 2, -100], [0, -100, -100]])
    computed = LossFunction(scores)(scores, (tokens, targets))
    expected = F.cross_entropy(scores(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert torch.allclose(computed.loss, expected)
    assert int(computed.count) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "loss_fn", "batch", "words"),
    [
        (LINEAR, None, (X, X[:, :1]), "Three ways"),
        (LINEAR, None, X, "Three ways"),
        (LINEAR, None, (X, Y.float()), "Three ways"),
        (LINEAR, lambda output, target: output, (X, Y), "return one number"),
        (LINEAR, lambda output, target: output.mean(), X, "needs a target"),
    ],
)
def test_anything_else_shows_the_three_ways(model: nn.Module, loss_fn: Any, batch: Any, words: str) -> None:
    with pytest.raises(LossError, match=words):
        LossFunction(model, loss_fn)(model, batch)
