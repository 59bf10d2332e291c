"""The user's metrics: over ranks and uneven batches as in one process, and watched like any other figure."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from workbench import classification, mlp

from frameworm import Trainer
from frameworm.engine.export import choose_checkpoint
from frameworm.engine.step.metrics import check_metrics
from frameworm.errors import CheckpointError, ConfigError, DataError, FramewormError
from frameworm.records.store import RunFolder

torchmetrics: Any = importlib.import_module("torchmetrics") if importlib.util.find_spec("torchmetrics") else None
needs_torchmetrics = pytest.mark.skipif(torchmetrics is None, reason="torchmetrics is not installed")
CLASSES = 3


def macro_f1(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Mean over the classes of 2 TP / (2 TP + FP + FN), by hand."""
    answers = outputs.argmax(1)
    scores = []
    for number in range(CLASSES):
        hits = ((answers == number) & (targets == number)).sum().item()
        misses = ((answers == number) ^ (targets == number)).sum().item()
        scores.append(2 * hits / (2 * hits + misses))
    return sum(scores) / CLASSES


def in_order(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """A value that depends on the order of the samples, bit by bit."""
    return float((outputs[:, 0] * torch.arange(len(outputs))).sum()) + float(targets[-1])


class Spread(object if torchmetrics is None else torchmetrics.Metric):  # type: ignore[misc]
    """Keeps all outputs in a list, which is empty on a rank without batches."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", default=[], dist_reduce_fx="cat")

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.rows.append(outputs)

    def compute(self) -> torch.Tensor:
        rows = torch.cat(self.rows) if isinstance(self.rows, list) else self.rows
        return rows.max() - rows.min()


def given() -> dict[str, Any]:
    functions: dict[str, Any] = {
        "f1": macro_f1,
        "order": in_order,
        "many": lambda outputs, targets: {"mean": outputs.mean(), "last": targets[-1]},
    }
    if torchmetrics is None:
        return functions
    from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score
    from torchmetrics.regression import PearsonCorrCoef
    from torchmetrics.wrappers import ClasswiseWrapper

    class Correlation(PearsonCorrCoef):
        """Its states are not added up but merged, which torchmetrics does from a stack of them."""

        def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
            super().update(preds[:, 0], target.float())

    return {
        **functions,
        "torch_f1": MulticlassF1Score(CLASSES),
        "auroc": MulticlassAUROC(CLASSES),  # keeps all outputs
        "correlation": Correlation(),
        "spread": Spread(),
        "each": ClasswiseWrapper(
            MulticlassAUROC(CLASSES, average=None)
        ),  # holds the states of what it wraps as its own
    }


def trainer(metrics: Any = None, model: nn.Module | None = None, **settings: Any) -> Trainer:
    model = model or mlp()
    settings = {"run_dir": None, "device": "cpu", **settings}
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), metrics=metrics, **settings)


def batches_of(data: TensorDataset, sizes: list[int]) -> list[tuple[torch.Tensor, ...]]:
    parts = zip(*(tensor.split(sizes) for tensor in data.tensors))
    return [tuple(part) for part in parts]


class Stream(IterableDataset[Any]):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter([self.data[index] for index in range(len(self.data))])


def loaders() -> dict[str, Any]:
    """Validation sets whose last batches are short, of kinds that are split in different ways."""
    data = classification(23, seed=7)
    return {
        "even": DataLoader(data, 4),
        "dropped": DataLoader(data, 4, drop_last=True),
        "batches": batches_of(data, [5, 5, 9, 4]),
        "stream": DataLoader(Stream(data), 4),
        "tiny": DataLoader(classification(CLASSES - 1, seed=2), 1),  # fewer samples than three ranks
    }


def scores(rank: int, world_size: int) -> dict[str, Any]:
    scored = trainer(given())
    # A tiny set has not all classes, for which the hand formula divides by zero.
    found = {name: scored.evaluate(loader) for name, loader in loaders().items() if name != "tiny"}
    small = {name: metric for name, metric in given().items() if name in ("order", "torch_f1", "spread")}
    found["tiny"] = trainer(small).evaluate(loaders()["tiny"])
    record = trainer(given()).train(DataLoader(classification(12), 12 // world_size), loaders()["even"], epochs=2)
    return {**found, "trained": record.epochs[-1].metrics, "quality": record.quality.metrics}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return scores(0, 1)


def test_metrics_equal_the_hand_formula(alone: dict[str, Any]) -> None:
    data = classification(23, seed=7)
    model = mlp()
    with torch.no_grad():
        outputs, targets = model(data.tensors[0]), data.tensors[1]
    for name in ("even", "batches", "stream"):
        assert alone[name]["f1"] == pytest.approx(macro_f1(outputs, targets)), name
        assert torchmetrics is None or alone[name]["torch_f1"] == pytest.approx(alone[name]["f1"]), name
        assert alone[name]["order"] == pytest.approx(in_order(outputs, targets), rel=1e-5), name
        assert alone[name]["accuracy"] == pytest.approx(float((outputs.argmax(1) == targets).float().mean()))
        assert alone[name]["many_last"] == float(targets[-1])
    assert alone["dropped"]["f1"] == pytest.approx(macro_f1(outputs[:20], targets[:20]))
    assert set(alone["trained"]) == {f"val_{name}" for name in [*alone["even"]] if name not in ("loss", "accuracy")}
    assert alone["quality"] == alone["trained"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_metrics_are_those_of_one_process(
    run_ranks: Callable[..., list[Any]], alone: dict[str, Any], world_size: int
) -> None:
    for found in run_ranks(scores, world_size):
        for place, expected in alone.items():
            if place in ("trained", "quality"):  # the gradients of ranks are summed in another order
                assert found[place] == pytest.approx(expected, rel=1e-3, abs=1e-4)
            else:
                assert found[place] == pytest.approx(expected, rel=1e-5), place


def sharded(rank: int) -> tuple[dict[str, float], dict[str, float]]:
    scored = trainer({"f1": macro_f1, "order": in_order}, strategy="zero2")
    record = scored.train(DataLoader(classification(12), 4), DataLoader(classification(7, seed=7), 3))
    return record.epochs[-1].metrics, scored.evaluate(DataLoader(classification(7, seed=7), 3))


@pytest.mark.slow
def test_metrics_of_a_model_that_is_divided(pair: Any) -> None:
    (first, after), (second, _) = pair.call(sharded)
    assert first == second
    assert {f"val_{name}": value for name, value in after.items() if name in ("f1", "order")} == pytest.approx(first)


def failing(rank: int) -> str:
    def wrong(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        raise IndexError("no such class")

    with pytest.raises((IndexError, ConfigError), match="no such class") as caught:
        trainer({"bad": wrong}).evaluate(loaders()["even"])
    return str(caught.value)


@pytest.mark.slow
def test_an_error_in_a_metric_reaches_all_ranks(pair: Any) -> None:
    assert all("no such class" in text for text in pair.call(failing))


def test_loss_functions_that_call_the_model_have_metrics_too() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    expected = trainer({"f1": macro_f1}).evaluate(loaders()["even"])
    assert trainer({"f1": macro_f1}, loss_fn=loss).evaluate(loaders()["even"])["f1"] == expected["f1"]
    twice = trainer({"f1": macro_f1}, loss_fn=lambda model, batch: loss(model, batch) + loss(model, batch))
    with pytest.raises(FramewormError, match="2 times"):
        twice.evaluate(loaders()["even"])


def test_a_model_that_returns_its_loss_alone_has_no_metrics() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.inner(inputs), labels)

    with pytest.raises(ConfigError, match="its loss alone"):
        trainer({"f1": macro_f1}, Own()).evaluate(loaders()["even"])


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ([macro_f1], "a mapping"),
        ({"loss": macro_f1}, "another name"),
        ({"a b": macro_f1}, "not a name"),
        ({"f1": 3}, "a function of"),
        ({"f1": nn.MSELoss}, "an object of it"),
    ],
)
def test_what_is_no_metric_is_refused(metrics: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        trainer(metrics)


@needs_torchmetrics
def test_a_collection_is_taken_apart() -> None:
    collection = torchmetrics.MetricCollection({"a": torchmetrics.MeanMetric(), "b": torchmetrics.SumMetric()})
    assert list(check_metrics({"all": collection})) == ["all_a", "all_b"]


def test_a_metric_must_be_one_number() -> None:
    with pytest.raises(ConfigError, match=r"shape \(23,\)"):
        trainer({"f1": lambda outputs, targets: outputs[:, 0]}).evaluate(loaders()["even"])


def falling(values: list[float]) -> Callable[[torch.Tensor, torch.Tensor], float]:
    left = list(values)
    return lambda outputs, targets: left.pop(0)


def test_early_stop_watches_a_metric() -> None:
    watched = trainer(
        {"f1": falling([0.1, 0.5, 0.4, 0.3, 0.9])},
        early_stop={"metric": "val_f1", "better": "higher", "patience": 2},
    )
    record = watched.train(loaders()["even"], loaders()["even"], epochs=9)
    assert [epoch.metrics["val_f1"] for epoch in record.epochs] == [0.1, 0.5, 0.4, 0.3]
    assert record.stop_reason == "early_stop"


@needs_torchmetrics
def test_a_metric_of_torchmetrics_says_itself_what_is_better() -> None:
    from torchmetrics.classification import MulticlassF1Score

    watched = trainer({"f1": MulticlassF1Score(CLASSES)}, early_stop={"metric": "val_f1", "patience": 9})
    watched.train(loaders()["even"], loaders()["even"])
    with pytest.raises(ConfigError, match=r"early_stop\.better to higher or lower \(the metrics are .* val_f1"):
        trainer({"f1": macro_f1}, early_stop={"metric": "val_f1"}).train(loaders()["even"], loaders()["even"])


def test_an_unknown_metric_is_refused_before_the_first_step() -> None:
    wrong = trainer({"f1": macro_f1}, early_stop={"metric": "val_recall", "better": "higher"})
    with pytest.raises(ConfigError, match="val_f1"):
        wrong.train(loaders()["even"], loaders()["even"])
    with pytest.raises(ConfigError, match="val_f1"):
        trainer({"f1": macro_f1}, early_stop={"metric": "f1"})


def test_the_best_checkpoints_are_those_of_the_metric(tmp_path: Path) -> None:
    kept = trainer(
        {"f1": falling([0.5, 0.9, 0.4, 0.3])},
        run_dir=tmp_path / "run",
        keep=1,
        keep_best=1,
        metric="val_f1",
        better="higher",
    )
    kept.train(DataLoader(classification(12), 6), loaders()["even"], epochs=4)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == [
        "step-00000004",
        "step-00000008",
    ]
    assert kept.load("best") == 4
    folder = RunFolder(tmp_path / "run")
    assert choose_checkpoint(folder, "best", "val_f1").step == 4  # as the run's config says
    with pytest.raises(CheckpointError, match="val_recall"):
        choose_checkpoint(folder, "best", "val_recall")


@pytest.mark.slow
def test_the_best_weights_are_those_of_the_metric_that_stops_early(tmp_path: Path) -> None:
    for name, more, best in (("one", {}, 4), ("two", {"metric": "train_loss"}, None)):
        kept = trainer(
            {"f1": falling([0.5, 0.9, 0.4, 0.3])},
            run_dir=tmp_path / name,
            early_stop={"metric": "val_f1", "better": "higher", "patience": 2},
            **more,
        )
        kept.train(DataLoader(classification(12), 6), loaders()["even"], epochs=9, restore_best=True)
        assert kept.config.checkpoint.metric == ("val_f1" if best else "train_loss")
        if best is not None:
            assert kept.load("best") == best


def test_a_function_that_names_the_target_first_gets_it_first() -> None:
    def recall(y_true: torch.Tensor, y_pred: torch.Tensor, average: str = "none") -> float:
        assert y_true.dim() == 1
        assert y_pred.dim() == 2
        return 0.25

    def labels_last(outputs: torch.Tensor, labels: torch.Tensor) -> float:
        return recall(labels, outputs)

    found = trainer({"recall": recall, "same": labels_last}).evaluate(loaders()["even"])
    assert (found["recall"], found["same"]) == (0.25, 0.25)


def test_a_plateau_scheduler_is_told_the_metric() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0)
    watched = Trainer(
        model,
        optimizer,
        scheduler=plateau,
        metrics={"f1": falling([0.1, 0.2, 0.2, 0.3])},
        schedule_metric="val_f1",
        run_dir=None,
        device="cpu",
    )
    watched.train(loaders()["even"], loaders()["even"], epochs=4)
    assert plateau.best == 0.3
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_metrics_are_in_all_records(tmp_path: Path) -> None:
    trained = trainer({"f1": falling([0.25, math.nan])}, run_dir=tmp_path / "run")
    record = trained.train(loaders()["even"], loaders()["even"], epochs=2)
    with (tmp_path / "run" / "epochs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["val_f1"] == "0.25"
    folder = RunFolder(tmp_path / "run")
    assert folder.read_epochs()[0].metrics == {"val_f1": 0.25}
    assert folder.read_summary().epochs[0] == record.epochs[0]
    summary = json.loads(folder.summary_json.read_text())
    assert summary["epochs"][0]["metrics"] == {"val_f1": 0.25}
    assert summary["quality"]["metrics"] == {"val_f1": "nan"}
    assert "val_f1" in folder.summary_txt.read_text()
    assert "val_f1" in folder.report_html.read_text()


def test_metrics_survive_a_resume(tmp_path: Path) -> None:
    data = DataLoader(classification(12), 6)
    first = trainer({"f1": falling([0.5, 0.4])}, run_dir=tmp_path / "run")
    first.train(data, loaders()["even"], epochs=2)
    second = trainer(
        {"f1": falling([0.3])},
        run_dir=tmp_path / "run",
        early_stop={"metric": "val_f1", "better": "higher", "patience": 2},
    )
    record = second.train(data, loaders()["even"], epochs=9, resume=tmp_path / "run")
    assert [epoch.metrics for epoch in record.epochs] == [{"val_f1": 0.5}, {"val_f1": 0.4}, {"val_f1": 0.3}]


def test_several_validation_sets() -> None:
    sets = {"near": DataLoader(classification(9, seed=7), 4), "far": batches_of(classification(11, seed=9), [6, 5])}
    watched = trainer({"f1": macro_f1}, early_stop={"metric": "val_far_loss", "patience": 1, "min_delta": 1e3})
    record = watched.train(DataLoader(classification(12), 6), sets, epochs=9)
    assert len(record.epochs) == 2
    last = record.epochs[-1]
    for name, loader in sets.items():
        alone = watched.evaluate(loader)
        found = {key: last.metrics[f"val_{name}_{key}"] for key in ("loss", "accuracy", "f1")}
        assert found == pytest.approx(alone)
    assert last.val_loss == last.metrics["val_near_loss"]
    assert last.metrics["val_f1"] == last.metrics["val_near_f1"]


@pytest.mark.parametrize("sets", [{}, {"a b": []}, {"a": None}, {"a": {"b": []}}])
def test_what_is_no_set_of_validation_sets_is_refused(sets: Any) -> None:
    with pytest.raises(DataError, match="val_loader"):
        trainer().train(loaders()["even"], sets)
