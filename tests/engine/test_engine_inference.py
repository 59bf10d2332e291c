"""A trainer outside of its training: it scores, predicts in order, saves and loads, alone and on several ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler
from workbench import classification, mlp, parameters

from frameworm import Trainer
from frameworm.distributed import OptimizedDataLoader
from frameworm.errors import CheckpointError, ConfigError, DataError, RunFolderError, StateError

DATA = classification(23, seed=7)


def make(model: nn.Module | None = None, optimizer: str = "adamw", **settings: Any) -> Trainer:
    model = model or mlp()
    chosen = (
        torch.optim.AdamW(model.parameters(), 0.05) if optimizer == "adamw" else torch.optim.SGD(model.parameters())
    )
    return Trainer(model, chosen, **{"run_dir": None, "device": "cpu", **settings})


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([DATA[index] for index in range(len(DATA))])


class Own(Stream):
    shards_itself = True


def loaders() -> dict[str, Any]:
    return {
        "plain": DataLoader(DATA, 4),
        "shuffled": DataLoader(DATA, 4, shuffle=True),
        "ours": OptimizedDataLoader.create(DATA, 5, shuffle=True, seed=3),
        "batches": [tuple(part) for part in zip(*(tensor.split(5) for tensor in DATA.tensors))],
        "stream": DataLoader(Stream(), 4),
        "inputs": DataLoader(TensorDataset(DATA.tensors[0]), 7),
        "one more than ranks": DataLoader(TensorDataset(DATA.tensors[0]), 22),
    }


def predictions(rank: int = 0, world_size: int = 1) -> dict[str, torch.Tensor]:
    asked = make()
    found = {name: asked.predict(loader) for name, loader in loaders().items()}
    if world_size > 1:
        sampler = DistributedSampler(DATA, world_size, rank)  # repeats samples to make ranks even
        found["sampler"] = asked.predict(DataLoader(DATA, 4, sampler=sampler))
        with pytest.raises(DataError, match="cannot be put in order"):
            asked.predict(DataLoader(Own(), 4))
    asked.train(DataLoader(DATA, 8), epochs=1)
    found["trained"] = asked.predict(loaders()["plain"])
    found["expected"] = asked.model(DATA.tensors[0]).detach()
    return found


def check_predictions(found: dict[str, torch.Tensor]) -> None:
    expected = mlp()(DATA.tensors[0]).detach()
    for name, outputs in found.items():
        wanted = found["expected"] if name in ("trained", "expected") else expected
        torch.testing.assert_close(outputs, wanted, msg=name)
        assert not outputs.requires_grad


def test_predictions_are_in_the_order_of_the_data_set() -> None:
    check_predictions(predictions())


def test_predictions_of_two_ranks_are_in_order_and_complete(pair: Any) -> None:
    for found in pair.call(predictions, 2):
        check_predictions(found)


@pytest.mark.slow
def test_predictions_of_three_ranks_are_in_order_and_complete(run_ranks: Callable[..., list[Any]]) -> None:
    for found in run_ranks(predictions, 3):
        check_predictions(found)


def test_a_sampler_decides_what_is_predicted_in_its_order() -> None:
    sampler = WeightedRandomSampler([1.0] * 23, 40, generator=torch.Generator().manual_seed(1))
    drawn = list(WeightedRandomSampler([1.0] * 23, 40, generator=torch.Generator().manual_seed(1)))
    outputs = make().predict(DataLoader(DATA, 6, sampler=sampler))
    torch.testing.assert_close(outputs, mlp()(DATA.tensors[0][drawn]).detach())


class Several(nn.Module):
    """Returns a mapping with logits of the batch's own width, a row per sample, and a number per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> Any:
        return inputs * self.scale, {"mean": inputs.mean(), "rows": inputs.sum(1)}


def test_outputs_of_any_form_are_joined_by_sample() -> None:
    batches = [(torch.full((2, 3), 1.0),), (torch.full((1, 5), 2.0),)]
    wide, rest = make(Several()).predict(batches)
    assert [tuple(row.shape) for row in wide] == [(3,), (3,), (5,)]
    assert rest["rows"].tolist() == [3.0, 3.0, 10.0]
    assert [float(value) for value in rest["mean"]] == [1.0, 2.0]


def test_predictions_in_half_precision_come_in_full() -> None:
    asked = make()
    asked.enable_mixed_precision("bf16")
    assert asked.predict(loaders()["plain"]).dtype == torch.float32


def test_logits_stand_for_an_output_that_has_some() -> None:
    class Output(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            found = {"logits": self.inner(inputs)}
            if labels is not None:
                found["loss"] = nn.functional.cross_entropy(found["logits"], labels)
            return found

    batches = [{"inputs": inputs, "labels": labels} for inputs, labels in loaders()["batches"]]
    asked = make(Output())
    torch.testing.assert_close(asked.predict(batches), mlp()(DATA.tensors[0]).detach())
    scores = asked.evaluate(batches)
    assert scores["loss"] == pytest.approx(make().evaluate(loaders()["plain"])["loss"])


def test_nothing_to_predict_is_an_error() -> None:
    with pytest.raises(DataError, match="nothing to predict"):
        make().predict([])


def test_evaluation_is_the_last_validation_and_changes_nothing() -> None:
    trained = make(metrics={"top": lambda outputs, targets: outputs.max()})
    trained.model.train()
    record = trained.train(DataLoader(DATA, 8), loaders()["plain"], epochs=2)
    before = parameters(trained.model)
    found = trained.evaluate(loaders()["plain"])
    last = record.epochs[-1]
    assert found == {"loss": last.val_loss, "accuracy": last.val_accuracy, "top": last.metrics["val_top"]}
    assert torch.equal(parameters(trained.model), before)
    assert trained.model.training


def test_a_regression_has_no_accuracy() -> None:
    inputs, _ = DATA.tensors
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).expand(-1, 3)), 4)
    assert list(make(loss_fn=nn.MSELoss()).evaluate(data)) == ["loss"]


def scored(rank: int) -> tuple[dict[str, float], torch.Tensor]:
    # Ranks begin with other weights: those of rank 0 count, as in training.
    found = make(mlp(seed=3 + rank), metrics={"sum": lambda outputs, targets: outputs.double().sum()})
    return found.evaluate(loaders()["plain"]), parameters(found.model)


def test_ranks_score_the_same_model(pair: Any) -> None:
    alone = make(metrics={"sum": lambda outputs, targets: outputs.double().sum()}).evaluate(loaders()["plain"])
    for found, held in pair.call(scored):
        assert found == pytest.approx(alone)
        assert torch.equal(held, parameters(mlp()))


# Saving and loading


def moments(trainer: Trainer) -> list[torch.Tensor]:
    return [value["exp_avg"] for value in trainer.optimizer.state.values()]


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    first = make()
    first.train(DataLoader(DATA, 8), epochs=2)
    first.save(tmp_path / "state")
    second = make(mlp(seed=9))
    assert second.load(tmp_path / "state") == 6
    assert torch.equal(parameters(second.model), parameters(first.model))
    assert all(torch.equal(one, other) for one, other in zip(moments(first), moments(second), strict=True))
    # Both go on alike.
    first.train(DataLoader(DATA, 8), epochs=1)
    second.train(DataLoader(DATA, 8), epochs=1)
    assert torch.equal(parameters(second.model), parameters(first.model))


def test_a_folder_holds_the_last_save(tmp_path: Path) -> None:
    long, short = make(), make()
    long.train(DataLoader(DATA, 4), epochs=3)
    short.train(DataLoader(DATA, 8))
    long.save(tmp_path / "state")
    short.save(tmp_path / "state")
    assert make().load(tmp_path / "state") == 3
    assert len(list((tmp_path / "state").glob("step-*"))) == 1


def test_weights_alone(tmp_path: Path) -> None:
    first = make()
    first.train(DataLoader(DATA, 8))
    first.save(tmp_path / "weights.safetensors")
    second = make(mlp(seed=9))
    assert second.load(tmp_path / "weights.safetensors") is None
    assert torch.equal(parameters(second.model), parameters(first.model))
    assert not second.optimizer.state


def test_a_run_and_its_checkpoints_can_be_loaded(tmp_path: Path) -> None:
    trained = make(run_dir=tmp_path / "run", every_steps=2, keep=9)
    trained.train(DataLoader(DATA, 8))
    last = parameters(trained.model)
    other = make(mlp(seed=9))
    assert other.load(tmp_path / "run") == 3
    assert torch.equal(parameters(other.model), last)
    assert other.load(tmp_path / "run" / "checkpoints" / "step-00000002") == 2
    assert not torch.equal(parameters(other.model), last)


def test_the_best_weights_are_restored_on_request(tmp_path: Path) -> None:
    worse = make(optimizer="sgd", run_dir=tmp_path / "run")
    for group in worse.optimizer.param_groups:
        group["lr"] = 300.0  # each epoch is worse than the one before
    record = worse.train(DataLoader(DATA, 23), loaders()["plain"], epochs=3, restore_best=True)
    losses = [epoch.val_loss for epoch in record.epochs]
    assert worse.evaluate(loaders()["plain"])["loss"] == pytest.approx(min(losses))
    assert min(losses) < losses[-1]
    assert worse.load("latest") == 3
    assert worse.evaluate(loaders()["plain"])["loss"] == pytest.approx(losses[-1])


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda trainer, path: trainer.load(path / "none"), CheckpointError, "no checkpoint"),
        (lambda trainer, path: trainer.load("best"), CheckpointError, "last run"),
        (lambda trainer, path: trainer.load(path / "model.pt"), CheckpointError, "pickle"),
        (lambda trainer, path: trainer.save(path / "model.pt"), RunFolderError, "pickle"),
        (lambda trainer, path: trainer.load(path / "none.safetensors"), CheckpointError, "cannot be read"),
        (lambda trainer, path: trainer.stop(), StateError, "none is running"),
        (lambda trainer, path: trainer.train([], restore_best=True), ConfigError, "run_dir"),
    ],
)
def test_calls_that_cannot_be_served(
    call: Callable[..., Any], kind: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=says):
        call(make(), tmp_path)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    trained = make(run_dir=tmp_path / "run")
    trained.train(DataLoader(DATA, 8))
    for taken in (tmp_path / "run", tmp_path / "run" / "checkpoints"):
        before = sorted(taken.iterdir())
        with pytest.raises(RunFolderError):
            trained.save(taken)
        assert sorted(taken.iterdir()) == before


def test_another_model_is_refused(tmp_path: Path) -> None:
    make().save(tmp_path / "state")
    with pytest.raises(CheckpointError, match="another model"):
        make(nn.Linear(6, 3)).load(tmp_path / "state")


@pytest.mark.parametrize(("saved", "other"), [("adamw", "sgd"), ("sgd", "adamw")])
def test_another_optimizer_is_refused(saved: str, other: str, tmp_path: Path) -> None:
    make(optimizer=saved).save(tmp_path / "state")
    with pytest.raises(CheckpointError, match="another optimizer"):
        make(optimizer=other).load(tmp_path / "state")


def divided(rank: int, strategy: str, folder: Path) -> list[tuple[torch.Tensor, float]]:
    """Train, save, spoil, load: under a strategy that divides what it trains."""
    trained = make(strategy=strategy)
    trained.train(DataLoader(DATA, 4))
    outputs = trained.predict(loaders()["plain"])
    trained.save(folder / "state")
    trained.save(folder / "weights.safetensors")
    for path in ("state", "weights.safetensors"):
        with torch.no_grad():
            for parameter in trained.model.parameters():
                parameter.zero_()
        trained.load(folder / path)
        torch.testing.assert_close(trained.predict(loaders()["plain"]), outputs)
    return [(outputs, trained.evaluate(loaders()["plain"])["loss"])]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_ranks_save_and_load_together(pair: Any, strategy: str, tmp_path: Path) -> None:
    ((outputs, loss),), ((other, _),) = pair.call(divided, strategy, tmp_path)
    assert torch.equal(outputs, other)
    alone = make()
    for path in ("state", "weights.safetensors"):
        alone.load(tmp_path / path)
        torch.testing.assert_close(alone.predict(loaders()["plain"]), outputs)
        assert alone.evaluate(loaders()["plain"])["loss"] == pytest.approx(loss)


def loaded_before(rank: int, folder: Path) -> tuple[torch.Tensor, int]:
    trained = make(mlp(seed=20 + rank), strategy="zero1")
    trained.load(folder)
    found = parameters(trained.model)
    trained.train(DataLoader(DATA, 4))
    return found, trained.load(folder) or 0


def test_weights_can_be_loaded_before_an_optimizer_is_divided(
    pair: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    first = make()
    first.train(DataLoader(DATA, 8))
    first.save(tmp_path / "state")
    for found, step in pair.call(loaded_before, tmp_path / "state"):
        assert torch.equal(found, parameters(first.model))
        assert step == 3
