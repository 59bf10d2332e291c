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

torch.manual_seed(0)
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


class Returns(Named):
    """Takes optional labels, and returns what a function makes of logits and loss."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        logits = self.layer(input_ids)
        return self.make(logits, None if labels is None else 3 * F.cross_entropy(logits, labels))


@pytest.mark.parametrize(
    "make",
    [
        lambda logits, loss: (loss, logits),
        lambda logits, loss: (logits, loss),
        lambda logits, loss: {"loss": loss, "logits": logits},
        lambda logits, loss: (loss, logits, loss.detach()),
    ],
)
@pytest.mark.parametrize("batch", [(X, Y), {"input_ids": X, "labels": Y}])
def test_a_model_that_was_given_the_target_returns_its_loss_in_many_ways(make: Any, batch: Any) -> None:
    model = Returns(make)
    computed, answers = LossFunction(model).scored(model, batch)
    assert torch.equal(computed.loss, 3 * F.cross_entropy(model.layer(X), Y))
    assert answers is not None
    assert int(answers[0]) == int((model.layer(X).argmax(-1) == Y).sum())


def test_a_scalar_beside_the_scores_is_not_taken_for_the_loss_of_a_model_without_the_target() -> None:
    class Auxiliary(Named):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return self.layer(x), self.layer.weight.square().mean()

    model = Auxiliary()
    with pytest.raises(LossError, match="Three ways"):
        LossFunction(model)(model, (X, Y))


def test_a_model_of_any_keyword_gets_the_labels() -> None:
    class Wrapper(Named):
        def __init__(self) -> None:
            super().__init__()
            self.inner = WithLoss()

        def forward(self, **batch: torch.Tensor) -> Any:  # type: ignore[override]
            return self.inner(**batch)

    model = Wrapper()
    computed = LossFunction(model)(model, {"input_ids": X, "labels": Y})
    assert torch.equal(computed.loss, F.cross_entropy(model.inner.layer(X), Y))


def test_a_model_of_any_keyword_that_takes_no_labels_goes_without() -> None:
    class Wrapper(Named):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Named()

        def forward(self, *inputs: torch.Tensor, **more: torch.Tensor) -> Any:  # type: ignore[override]
            return self.inner(*inputs, **more)

    model = Wrapper()
    loss = LossFunction(model)
    for _ in range(2):
        computed = loss(model, {"input_ids": X, "labels": Y})
        assert torch.equal(computed.loss, F.cross_entropy(model.inner.layer(X), Y))


class Pair(Named):
    def forward(self, pair: Any) -> torch.Tensor:  # type: ignore[override]
        left, right = pair
        return self.layer(left + right)


class TwoInputs(Named):
    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.layer(left + right)


@pytest.mark.parametrize("model", [Pair(), TwoInputs()])
@pytest.mark.parametrize("batch", [((X, X), Y), ([X, X], Y), (X, X, Y)])
@pytest.mark.parametrize("loss_fn", [None, F.cross_entropy])
def test_inputs_come_together_or_one_by_one_as_forward_needs_them(model: Named, batch: Any, loss_fn: Any) -> None:
    computed = LossFunction(model, loss_fn)(model, batch)
    assert torch.equal(computed.loss, F.cross_entropy(model.layer(2 * X), Y))


@pytest.mark.parametrize(
    ("second", "count"),
    [
        (4, 4),
        (torch.tensor(1), 1),
        (torch.tensor([5]), 5),
        (7.0, 7),
        (torch.tensor(6.0), 6),
        (None, None),
        ({"accuracy": 0.5}, None),
        (torch.zeros(6, 3), None),
        ("name", None),
    ],
)
def test_what_comes_after_the_loss_is_a_count_or_ignored(second: Any, count: int | None) -> None:
    found = LossFunction(LINEAR, lambda output, target: (output.mean(), second, 0.5))(LINEAR, (X, Y)).count
    assert found is count if count is None else float(found) == count  # type: ignore[arg-type]


@pytest.mark.parametrize("second", [0.25, 1.0, 0.0, 2.5, -3, float("nan"), torch.tensor(0.5), torch.tensor(1.0)])
def test_a_number_that_is_no_count_is_refused(second: Any) -> None:
    with pytest.raises(LossError, match="not a count"):
        LossFunction(LINEAR, lambda output, target: (output.mean(), second))(LINEAR, (X, Y))


def test_whether_there_is_a_count_is_settled_by_the_first_batch() -> None:
    results = iter([3.0, 1.0, 0.0, 0.5])
    loss = LossFunction(LINEAR, lambda output, target: (output.mean(), next(results)))
    assert [loss(LINEAR, (X, Y)).count for _ in range(3)] == [3.0, 1.0, 0.0]
    with pytest.raises(LossError, match="not a count"):
        loss(LINEAR, (X, Y))
    predictions = LossFunction(LINEAR, lambda output, target: (output.mean(), output.argmax(-1).squeeze()))
    assert predictions(LINEAR, (X, Y)).count is None
    assert predictions(LINEAR, (X[:1], Y[:1])).count is None, "one prediction is no count"


@pytest.mark.parametrize("returned", [lambda loss: {"loss": loss}, lambda loss: SimpleNamespace(loss=loss)])
def test_a_loss_function_may_name_its_loss(returned: Any) -> None:
    loss = LossFunction(LINEAR, lambda output, target: returned(output.mean()))
    assert torch.equal(loss(LINEAR, (X, Y)).loss, LINEAR(X).mean())


def focal(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logs = output.log_softmax(1).gather(1, target[:, None])
    return (-((1 - logs.exp()) ** 2) * logs).mean()


def margin_head(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Metric learning with as many classes as the embeddings have dimensions."""
    centres = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    return F.cross_entropy(8 * F.normalize(output) @ F.normalize(centres).T, target)


@pytest.mark.parametrize(
    ("loss_fn", "scored"),
    [
        (lambda output, target: F.cross_entropy(output / 0.1, target, label_smoothing=0.1), True),
        (lambda output, target: F.nll_loss(output.log_softmax(1), target), True),
        (lambda output, target: -torch.distributions.Categorical(logits=output).log_prob(target).mean(), True),
        (lambda output, target: -output.log_softmax(1)[torch.arange(len(target)), target].mean(), True),
        (F.multi_margin_loss, True),
        (focal, True),
        (margin_head, False),
        (lambda output, target: (output - torch.eye(3)[target]).square().mean(), False),
        (lambda output, target: F.poisson_nll_loss(output[:, 0], target.float()), False),
    ],
)
def test_an_accuracy_is_where_the_loss_takes_targets_for_classes(loss_fn: Any, scored: bool) -> None:
    loss = LossFunction(LINEAR, loss_fn)
    for _ in range(2):
        answers = loss.scored(LINEAR, (X, Y))[1]
        assert (answers is not None) is scored
    if scored:
        assert answers is not None
        assert int(answers[0]) == int((LINEAR(X).argmax(-1) == Y).sum())
        assert LossFunction(LINEAR, loss_fn, accuracy=False).scored(LINEAR, (X, Y))[1] is None


def test_ignored_targets_are_no_answers() -> None:
    loss = LossFunction(LINEAR, lambda output, target: F.cross_entropy(output, target, ignore_index=2))
    answers = loss.scored(LINEAR, (X, Y))[1]
    assert answers is not None
    assert int(answers[1]) == 4


def test_an_accuracy_on_request() -> None:
    scores = nn.Embedding(10, 5)
    batch = torch.arange(6).reshape(2, 3), torch.tensor([[1, 2, -100], [0, -100, -100]])
    assert LossFunction(scores).scored(scores, batch)[1] is None
    answers = LossFunction(scores, accuracy=True).scored(scores, batch)[1]
    assert answers is not None
    assert int(answers[1]) == 3
    one_hot = LossFunction(LINEAR, lambda output, target: (output - torch.eye(3)[target]).square().mean(), True)
    assert one_hot.scored(LINEAR, (X, Y))[1] is not None
    column = nn.Linear(4, 1)
    with pytest.raises(LossError, match="class scores"):
        LossFunction(column, lambda output, target: output.mean(), True).scored(column, (X, Y))
    with pytest.raises(LossError, match="loss_fn"):
        LossFunction(LINEAR, lambda model, batch: model(batch[0]).mean(), True)
    with pytest.raises(LossError, match="Three ways"):
        LossFunction(column)(column, (X, Y))  # the cross-entropy of one column is zero
