"""Numbers that a user reads off a run or trains by: accuracy, sample counts, losses, rates, early stops, empty runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from number_cases import (
    FROZEN,
    FirstStep,
    Steps,
    is_refusal,
    linear,
    logged,
    one_update,
    outcome,
    pairs,
    samples,
    trainer,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from frameworm import Config, RunRecord, Trainer
from frameworm.distributed import OptimizedDataLoader

# Accuracy


class OwnRegression(nn.Module):
    """Returns its own loss and one column of scores, as a regression head with `num_labels=1` does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(4, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.layer(inputs)
        return SimpleNamespace(loss=F.mse_loss(logits.squeeze(-1), labels.float()), logits=logits)


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.squeeze(-1), target.float())


def pinball(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Quantile regression: each column estimates another quantile of the same count."""
    quantiles = torch.tensor([0.1, 0.5, 0.9])
    distance = target[:, None] - output
    return torch.maximum(quantiles * distance, (quantiles - 1) * distance).mean()


def contrast(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    same = (target == target.roll(1)).float() * 2 - 1
    return F.cosine_embedding_loss(output, output.roll(1, 0), same)


@pytest.mark.parametrize(
    ("model", "loss_fn"),
    [
        pytest.param(lambda: linear(4, 1), squared_error, id="one output column"),
        pytest.param(lambda: linear(4, 3), pinball, id="regression of counts"),
        pytest.param(lambda: linear(4, 8), contrast, id="embeddings"),
        pytest.param(OwnRegression, None, id="a regression model's own loss"),
    ],
)
def test_no_accuracy_where_the_output_holds_no_class_scores(model: Callable[[], nn.Module], loss_fn: Any) -> None:
    record = trainer(model(), loss_fn=loss_fn, lr=0.01).train(pairs(), pairs())
    assert record.quality.val_loss is not None
    assert record.accuracy is None


def test_no_accuracy_for_several_labels_per_sample() -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(output, target.float())

    inputs, labels = samples(8)
    batches = [(inputs, torch.stack([labels, 1 - labels, labels], dim=1))]
    record = trainer(linear(4, 3), loss_fn=loss).train(batches, batches)
    assert record.quality.val_loss is not None
    assert record.accuracy is None


@pytest.mark.parametrize("loss_fn", [None, nn.CrossEntropyLoss(), F.cross_entropy])
def test_class_scores_with_integer_targets_have_an_accuracy(loss_fn: Any) -> None:
    model = linear()
    inputs, labels = samples(12)
    right = float((model(inputs).argmax(-1) == labels).float().mean())
    record = trainer(model, lr=FROZEN, loss_fn=loss_fn).train(pairs(), pairs())
    assert record.accuracy == pytest.approx(right)


def per_position(classes: int, length: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Conv1d(4, classes, 1)
    return model, torch.randn(6, 4, length), torch.randint(0, classes, (6, length))


@pytest.mark.parametrize(
    ("classes", "length"),
    [
        (3, 5),
        (5, 5),
    ],
)
def test_scores_per_position_have_their_classes_in_dimension_1(classes: int, length: int) -> None:
    model, inputs, labels = per_position(classes, length)
    with torch.no_grad():
        expected = float(F.cross_entropy(model(inputs), labels))
        right = float((model(inputs).argmax(1) == labels).float().mean())
    record = trainer(model, lr=FROZEN).train([(inputs, labels)], [(inputs, labels)])
    assert record.quality.train_loss == pytest.approx(expected, rel=1e-5)
    assert record.quality.val_loss == pytest.approx(expected, rel=1e-5)
    assert record.accuracy is None or record.accuracy == pytest.approx(right)


# Samples per batch


@dataclass
class Fields:
    inputs: torch.Tensor
    labels: torch.Tensor


class Plain:
    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.inputs = inputs
        self.labels = labels


def by_attribute(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch.inputs), batch.labels)


def of_images(inputs: torch.Tensor, labels: torch.Tensor) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """As detection models take them: images in a list, since their sizes differ, and a mapping for each."""
    return list(inputs), [{"label": label} for label in labels]


def by_image(model: nn.Module, batch: Any) -> torch.Tensor:
    images, targets = batch
    return F.cross_entropy(model(torch.stack(images)), torch.stack([target["label"] for target in targets]))


SHAPES = [
    pytest.param(Fields, by_attribute, id="dataclass"),
    pytest.param(Plain, by_attribute, id="object"),
    pytest.param(of_images, by_image, id="lists of images"),
]


def shaped(batch: Callable[..., Any], sizes: tuple[int, ...] = (4, 4, 4, 2)) -> list[Any]:
    inputs, labels = samples(sum(sizes))
    return [batch(*part) for part in zip(inputs.split(sizes), labels.split(sizes))]


@pytest.mark.parametrize(("batch", "loss_fn"), SHAPES)
def test_accumulation_weighs_batches_of_any_shape_by_their_samples(batch: Any, loss_fn: Any) -> None:
    model = linear()
    trainer(model, loss_fn=loss_fn, accumulation=4).train(shaped(batch))
    expected = one_update(loss_fn, shaped(batch), (4, 4, 4, 2))
    assert torch.allclose(model.weight, expected, atol=1e-6)


@pytest.mark.parametrize(("batch", "loss_fn"), SHAPES)
def test_validation_weighs_batches_of_any_shape_by_their_samples(batch: Any, loss_fn: Any) -> None:
    model = linear()
    with torch.no_grad():
        expected = float(F.cross_entropy(model(samples()[0]), samples()[1]))
    record = trainer(model, lr=FROZEN, loss_fn=loss_fn).train(shaped(batch), shaped(batch))
    assert record.quality.val_loss == pytest.approx(expected, rel=1e-5)


def _on_ranks(rank: int, world_size: int) -> torch.Tensor:
    model = linear()
    trainer(model, loss_fn=by_attribute).train(shaped(Fields, (4, 2)))
    return model.weight.detach()


def test_ranks_weigh_dataclass_batches_by_their_samples(run_ranks: Callable[..., Any]) -> None:
    expected = one_update(by_attribute, shaped(Fields, (4, 2)), (4, 2))
    try:
        weights = run_ranks(_on_ranks, 2, timeout_s=100)
    except AssertionError as error:  # a rank that fails is not the failure this test expects
        raise RuntimeError("a rank failed") from error
    for found in weights:
        assert torch.allclose(found, expected, atol=1e-6)


def by_either(model: nn.Module, batch: Any) -> torch.Tensor:
    return by_seed(model, batch) if isinstance(batch, int) else by_pair(model, batch)


def _one_rank_cannot_tell(rank: int, world_size: int) -> torch.Tensor:
    model = linear()
    trainer(model, loss_fn=by_either).train([pairs()[0], 7])
    return model.weight.detach()


@pytest.mark.slow
def test_ranks_weigh_the_same_where_one_cannot_tell_its_samples(run_ranks: Callable[..., Any]) -> None:
    expected = one_update(by_either, [pairs()[0], 7], (1, 1))
    for found in run_ranks(_one_rank_cannot_tell, 2, timeout_s=200):
        assert torch.allclose(found, expected, atol=1e-6)


def _scored_on_ranks(rank: int, world_size: int) -> list[float | None]:
    found = []
    for strategy in ("ddp", "zero3"):
        with_classes = trainer(linear(), lr=FROZEN, strategy=strategy).train(pairs(), pairs())
        regression = trainer(linear(), lr=FROZEN, strategy=strategy, loss_fn=contrast).train(pairs(), pairs())
        found += [with_classes.accuracy, regression.accuracy]
    return found


@pytest.mark.slow
def test_ranks_agree_on_the_accuracy(run_ranks: Callable[..., Any]) -> None:
    right = trainer(linear(), lr=FROZEN).train(pairs(), pairs()).accuracy
    for found in run_ranks(_scored_on_ranks, 2, timeout_s=300):
        assert found == [pytest.approx(right), None, pytest.approx(right), None]


def graphs(nodes: tuple[int, ...], seed: int) -> Any:
    """A nested batch ((nodes, edges, owner), labels) of graphs with so many nodes each."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(sum(nodes), 4, generator=generator)
    owner = torch.repeat_interleave(torch.arange(len(nodes)), torch.tensor(nodes))
    labels = torch.randint(0, 2, (len(nodes),), generator=generator)
    return (features, torch.zeros(2, 3, dtype=torch.long), owner), labels


def pooled(features: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    return torch.zeros(int(owner.max()) + 1, 4).index_add(0, owner, features)


def by_graph(model: nn.Module, batch: Any) -> torch.Tensor:
    (features, _, owner), labels = batch
    return F.cross_entropy(model(pooled(features, owner)), labels)


def test_nested_batches_are_weighed_by_samples_or_equally_and_that_is_said() -> None:
    batches = [graphs((1, 1, 1, 1), 0), graphs((9, 9), 1)]
    model = linear()
    with logged() as log:
        record = trainer(model, loss_fn=by_graph, accumulation=2).train(batches)
    said = "sample" in " ".join([log.text(), *record.notes])
    by_samples = torch.allclose(model.weight, one_update(by_graph, batches, (4, 2)), atol=1e-6)
    equally = torch.allclose(model.weight, one_update(by_graph, batches, (1, 1)), atol=1e-6)
    assert by_samples or (equally and said)


def by_seed(model: nn.Module, batch: int) -> torch.Tensor:
    inputs = torch.randn(3 + batch, 4, generator=torch.Generator().manual_seed(batch))
    return model(inputs).square().mean()


def test_batches_of_unknown_size_weigh_the_same() -> None:
    model = linear()
    trainer(model, loss_fn=by_seed, accumulation=2).train([1, 7])
    assert torch.allclose(model.weight, one_update(by_seed, [1, 7], (1, 1)), atol=1e-6)


def test_an_unknown_number_of_samples_is_said() -> None:
    with logged() as log:
        record = trainer(linear(), loss_fn=by_seed, accumulation=2).train([1, 7])
    assert "sample" in " ".join([log.text(), *record.notes])


# What a loss function and a model may return


def with_accuracy(kind: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return F.cross_entropy(output, target), kind((output.argmax(-1) == target).float().mean())

    return loss


def answered(model: nn.Module, right: tuple[int, ...]) -> list[torch.Tensor]:
    """Labels for `pairs()` of which the model has so many right in each batch."""
    given = [model(inputs).argmax(-1) for inputs, _ in pairs()]
    return [torch.where(torch.arange(len(item)) < count, item, 1 - item) for item, count in zip(given, right)]


def by_pair(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("kind", [pytest.param(float, id="float"), pytest.param(lambda value: value, id="tensor")])
def test_an_accuracy_beside_the_loss_is_no_weight(kind: Any) -> None:
    model = linear()
    batches = [(inputs, answers) for (inputs, _), answers in zip(pairs(), answered(model, (1, 3, 2)))]
    result = outcome(lambda: trainer(model, loss_fn=with_accuracy(kind), accumulation=3).train(batches))
    expected = one_update(by_pair, batches, (1, 1, 1))
    assert is_refusal(result) or torch.allclose(model.weight, expected, atol=1e-6)


@pytest.mark.parametrize("kind", [int, float, torch.tensor])
def test_a_count_beside_the_loss_is_the_weight(kind: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, Any]:
        return by_pair(model, batch), kind(3 if batch[1] is batches[0][1] else 9)

    batches = pairs(8)
    model = linear()
    trainer(model, loss_fn=loss, accumulation=2).train(batches)
    assert torch.allclose(model.weight, one_update(by_pair, batches, (3, 9)), atol=1e-6)


class LossFirst(nn.Module):
    """Returns (loss, logits), as transformers' models do with `return_dict=False`; its loss is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.layer(input_ids)
        return (logits,) if labels is None else (3 * F.cross_entropy(logits, labels), logits)


class LossInside(LossFirst):
    """Returns an object with `.loss`."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.layer(input_ids)
        return SimpleNamespace(loss=None if labels is None else 3 * F.cross_entropy(logits, labels), logits=logits)


class Scaled(LossFirst):
    """Its optional parameter is no target."""

    def forward(self, input_ids: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
        return self.layer(input_ids) * (1 if scale is None else scale)


def cross_entropy_of_all() -> float:
    with torch.no_grad():
        return float(by_pair(linear(), samples(12)))


def test_a_model_may_return_its_loss_first_in_a_tuple() -> None:
    batches = [{"input_ids": inputs, "labels": labels} for inputs, labels in pairs()]
    result = outcome(lambda: trainer(LossFirst(), lr=FROZEN).train(batches))
    assert isinstance(result, RunRecord), repr(result)
    assert result.losses == [pytest.approx(3 * cross_entropy_of_all(), rel=1e-5)]


@pytest.mark.parametrize("model", [LossFirst, LossInside])
def test_a_models_own_loss_counts_for_tuple_batches_too(model: type[nn.Module]) -> None:
    result = outcome(lambda: trainer(model(), lr=FROZEN).train(pairs()))
    assert isinstance(result, RunRecord), repr(result)
    assert result.losses == [pytest.approx(3 * cross_entropy_of_all(), rel=1e-5)]


def test_an_optional_parameter_that_is_no_target_does_not_get_the_target() -> None:
    assert trainer(Scaled(), lr=FROZEN).train(pairs()).losses == [pytest.approx(cross_entropy_of_all(), rel=1e-5)]


class OfGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, graph: Any) -> torch.Tensor:
        features, _, owner = graph
        return self.layer(pooled(features, owner))


def test_nested_batches_reach_the_model_as_they_were_collated() -> None:
    batch = graphs((2, 1, 3, 1), 0)
    with torch.no_grad():
        expected = float(by_graph(linear(), batch))
    result = outcome(lambda: trainer(OfGraph(), lr=FROZEN).train([batch]))
    assert isinstance(result, RunRecord), repr(result)
    assert result.losses == [pytest.approx(expected, rel=1e-5)]


# Early stops


@pytest.mark.parametrize(
    ("metric", "validation"),
    [
        pytest.param("val_loss", None, id="no validation set"),
        pytest.param("val_accuracy", "the training set", id="no classes"),
    ],
)
def test_early_stop_on_a_metric_that_does_not_exist_is_refused(metric: str, validation: str | None) -> None:
    batches = [(inputs, labels.float()) for inputs, labels in pairs()]
    steps = Steps()
    watched = trainer(
        linear(4, 1),
        lr=0.01,
        loss_fn=squared_error,
        callbacks=[steps],
        early_stop={"metric": metric, "patience": 2},
    )
    result = outcome(lambda: watched.train(batches, None if validation is None else batches, epochs=6))
    assert is_refusal(result), result if isinstance(result, Exception) else f"{len(result.epochs)} epochs were trained"
    assert metric in str(result)
    # Whether a model classifies shows in the first validation; that there is none shows before the first step.
    assert len(steps.records) <= (0 if validation is None else len(batches))


def test_early_stop_on_an_unknown_metric_is_refused() -> None:
    refused = outcome(lambda: trainer(linear(), early_stop={"metric": "f1", "patience": 2}).train(pairs(), pairs()))
    assert is_refusal(refused)


def test_nan_never_becomes_the_best() -> None:
    validations = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal validations
        found = by_pair(model, batch)
        if model.training:
            return found
        validations += 1
        return found * math.nan if validations == 1 else found

    inputs, _ = samples(12)
    data = [(inputs, (inputs.sum(-1) > 0).long())]
    watched = trainer(linear(), lr=0.1, loss_fn=loss, early_stop={"metric": "val_loss", "patience": 2})
    record = watched.train(data, data, epochs=6)
    values = [epoch.val_loss for epoch in record.epochs]
    assert math.isnan(values[0])
    assert values[1:] == sorted(values[1:], reverse=True)
    assert len(values) == 6, "every epoch after the first was better than the one before"


def test_the_summary_tells_of_an_early_stop(tmp_path: Path) -> None:
    stalled = trainer(
        linear(),
        lr=FROZEN,
        run_dir=tmp_path / "run",
        early_stop={"metric": "val_loss", "patience": 1, "min_delta": 1e-3},
    )
    record = stalled.train(pairs(), pairs(), epochs=9)
    assert len(record.epochs) == 2
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert "early" in summary["stop_reason"]
    assert record.stop_reason == summary["stop_reason"]


# Bad steps, rates and schedulers


def test_a_step_that_was_left_out_does_not_count_in_the_epochs_loss() -> None:
    batches = [(inputs.clone(), labels) for inputs, labels in pairs()]
    batches[1][0][2] = math.inf
    steps = Steps()
    record = trainer(linear(), callbacks=[steps]).train(batches)
    assert [step.skipped for step in steps.records] == [False, True, False]
    trained = [step.loss for step in steps.records if not step.skipped]
    assert record.losses == [pytest.approx(sum(trained) / len(trained))]
    assert record.quality.train_loss == record.losses[0]


def stepped_by(make: Callable[[torch.optim.Optimizer], Any], **settings: Any) -> tuple[Trainer, Any]:
    """A trainer at a rate of 1 with a scheduler."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = make(optimizer)
    return trainer(model, optimizer=optimizer, scheduler=scheduler, **settings), scheduler


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def test_the_recorded_rate_is_the_one_the_step_was_taken_with() -> None:
    steps = Steps()
    stepped_by(halving, callbacks=[steps])[0].train(pairs())
    assert [step.lr for step in steps.records] == [1.0, 0.5, 0.25]


class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Keeps what it is told."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.told: list[float] = []
        super().__init__(optimizer, mode="max")

    def step(self, metrics: Any, epoch: int | None = None) -> None:
        self.told.append(float(metrics))
        super().step(metrics)


def test_a_scheduler_that_waits_for_a_maximum_is_told_the_accuracy_or_refused() -> None:
    made, plateau = stepped_by(Plateau)
    result = outcome(lambda: made.train(pairs(), pairs(), epochs=3))
    if not is_refusal(result):
        assert isinstance(result, RunRecord), repr(result)
        assert plateau.told == [epoch.val_accuracy for epoch in result.epochs]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        pytest.param(halving, "step", id="each step"),
        pytest.param(torch.optim.lr_scheduler.ReduceLROnPlateau, "epoch", id="each epoch"),
    ],
)
def test_it_is_said_before_the_first_step_how_often_a_scheduler_is_stepped(make: Any, word: str) -> None:
    with logged() as log:
        stepped_by(make, callbacks=[FirstStep(log)])[0].train(pairs(), pairs())
    lines = [record.getMessage().lower() for record in log.before_first_step]
    assert any("schedul" in line and word in line for line in lines)


def interval_settings() -> list[str]:
    """Settings of the config that offer the choice between `step` and `epoch`."""
    found = []
    for definition in Config.model_json_schema()["$defs"].values():
        for name, field in definition.get("properties", {}).items():
            if {"step", "epoch"} <= set(field.get("enum", ())):
                found.append(name)
    return found


def test_a_scheduler_can_be_stepped_once_per_epoch() -> None:
    names = interval_settings()
    assert names, "no setting chooses between `step` and `epoch`"
    made, scheduler = stepped_by(halving, **{names[0]: "epoch"})
    made.train(pairs(), epochs=2)
    assert scheduler.last_epoch == 2


@pytest.mark.parametrize(
    ("validation", "settings"),
    [
        pytest.param(None, {}, id="no validation set"),
        pytest.param("the training set", {"accuracy": False}, id="no accuracy wanted"),
        pytest.param("the training set", {"loss_fn": lambda model, batch: by_pair(model, batch)}, id="output unseen"),
        pytest.param("the training set", {"schedule_every": "step"}, id="every step"),
    ],
)
def test_a_scheduler_whose_metric_will_not_exist_is_refused_before_the_first_step(
    validation: str | None, settings: dict[str, Any]
) -> None:
    steps = Steps()
    made, plateau = stepped_by(Plateau, callbacks=[steps], **settings)
    assert is_refusal(outcome(lambda: made.train(pairs(), None if validation is None else pairs())))
    assert not steps.records
    assert not plateau.told


def test_a_scheduler_may_be_made_from_the_number_of_steps() -> None:
    model, steps = linear(), Steps()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def make(total: int) -> Any:
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=total)

    trainer(model, optimizer=optimizer, scheduler=make, callbacks=[steps]).train(pairs(), epochs=2)
    assert [step.lr for step in steps.records] == pytest.approx([1 - step / 6 for step in range(6)])


def test_a_scheduler_that_asks_for_something_else_is_refused() -> None:
    class ByEpoch:
        def step(self, epoch: int, metric: float | None = None) -> None: ...

    result = outcome(lambda: trainer(linear(), scheduler=ByEpoch()).train(pairs()))
    assert is_refusal(result)
    assert "epoch" in str(result)


# Runs without a step


def too_few() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*samples(6)), 8, drop_last=True)


@pytest.mark.parametrize(
    ("loader", "word"),
    [
        pytest.param(lambda: [], "", id="empty list"),
        pytest.param(lambda: lambda: iter(()), "", id="function without batches"),
        pytest.param(too_few, "drop_last", id="drop_last"),
        pytest.param(
            lambda: OptimizedDataLoader.create(TensorDataset(*samples(6)), 8, drop_last=True),
            "drop_last",
            id="drop_last of our own loader",
        ),
    ],
)
def test_a_loader_without_a_step_fails_with_the_reason(loader: Callable[[], Any], word: str) -> None:
    result = outcome(lambda: trainer(linear()).train(loader()))
    assert is_refusal(result)
    assert word in str(result)


def test_an_epoch_without_a_step_fails_too() -> None:
    once = iter(pairs())
    result = outcome(lambda: trainer(linear()).train(lambda: once, epochs=2))
    assert is_refusal(result)
    assert "epoch 2" in str(result)


def test_no_epochs_are_refused() -> None:
    assert is_refusal(outcome(lambda: trainer(linear()).train(pairs(), epochs=0)))
