"""Averaged weights: what they are, when they are used, and that they are the same however a model is trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sharding_cases import make, make_optimizer, perplexing, whole_values
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workbench import Steps, classification, mlp

from frameworm import Trainer
from frameworm.distributed import OptimizedDataLoader
from frameworm.engine.checkpoint.load import load_newest
from frameworm.engine.export import export_weights
from frameworm.engine.model.precision import Precision
from frameworm.engine.optim.ema import AveragedWeights
from frameworm.engine.optim.schedule import NoSchedule
from frameworm.engine.optim.update import Update
from frameworm.errors import CheckpointError, ConfigError, StateError
from frameworm.parallel.shards import loaded
from frameworm.parallel.strategy import Strategy
from frameworm.records.events import Listener

CPU = torch.device("cpu")
DECAY = 0.9
HALF, WHOLE = 7, 11
DEADLINE_S = 100.0


class Follow(Listener):
    """Averages the weights after each step, as written in a textbook."""

    def __init__(self, model: nn.Module, decay: float = DECAY) -> None:
        self.model = model
        self.averages = _copy(model)
        self._decay = decay

    def on_step(self, step: Any) -> None:
        if not step.skipped:
            for name, value in self.model.named_parameters():
                self.averages[name].lerp_(value.detach(), 1 - self._decay)


def _copy(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: item.detach().clone() for name, item in model.named_parameters()}


def _averages(trainer: Trainer) -> dict[str, torch.Tensor]:
    with trainer.averaged_weights() as model:
        return whole_values(model)


def _same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in second)


def _trainer(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **settings: Any) -> Trainer:
    settings = {"run_dir": None, "device": "cpu", "ema": DECAY, "progress": False, **settings}
    return Trainer(model, optimizer or torch.optim.AdamW(model.parameters(), lr=0.01), **settings)


def _loader(samples: int = 40, batch_size: int = 4) -> Any:
    return OptimizedDataLoader.create(classification(samples), batch_size, seed=5)


def test_it_is_the_textbook_average_and_training_does_not_notice() -> None:
    model, plain = mlp(), mlp()
    follow = Follow(model)
    trainer = _trainer(model, callbacks=[follow])
    trainer.train(_loader())
    _trainer(plain, ema=None).train(_loader())
    assert _same(_copy(model), _copy(plain))
    assert _same(_averages(trainer), follow.averages)
    assert _same(_copy(model), _copy(plain)), "the weights were not put back"


def test_a_second_training_goes_on_with_the_average() -> None:
    model = mlp()
    follow = Follow(model)
    trainer = _trainer(model, callbacks=[follow])
    trainer.train(_loader())
    trainer.train(_loader())
    assert _same(_averages(trainer), follow.averages)


@pytest.mark.parametrize("settings", [{"clip_norm": 1.0}, {}], ids=["clipped", "checked"])
def test_steps_that_are_left_out_are_not_averaged(settings: dict[str, Any]) -> None:
    data = classification(40)
    inputs = data.tensors[0].clone()
    inputs[9, 0] = 1e4
    model, steps = mlp(), Steps()
    follow = Follow(model)
    trainer = _trainer(model, callbacks=[follow, steps], loss_fn=perplexing, **settings)
    trainer.train(OptimizedDataLoader.create(TensorDataset(inputs, data.tensors[1]), 4, shuffle=False))
    assert [step.step for step in steps.records if step.skipped] == [3]
    assert _same(_averages(trainer), follow.averages)


def test_the_flag_of_a_left_out_step_is_heeded_where_it_lies() -> None:
    parameter = nn.Parameter(torch.zeros(5))
    model = nn.ParameterList([parameter])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    averages = AveragedWeights(0.5, model, optimizer, Strategy(CPU))
    averages.follow(model.parameters())
    parameter.data.fill_(1.0)
    averages.update(torch.ones(()))
    assert not averages.tensors["0"].any()
    averages.update(torch.zeros(()))
    averages.update(None)
    assert torch.equal(averages.tensors["0"], torch.full((5,), 0.75))


def test_validation_scores_the_average_and_says_so() -> None:
    model, held_out = mlp(), classification(20, seed=9)
    trainer = _trainer(model)
    record = trainer.train(_loader(), DataLoader(held_out, 5))
    trained = _copy(model)
    inputs, target = held_out.tensors
    plain = F.cross_entropy(model(inputs), target)
    with trainer.averaged_weights():
        averaged = F.cross_entropy(model(inputs), target)
    assert record.quality.val_loss == pytest.approx(averaged.item(), rel=1e-6)
    assert abs(plain.item() - averaged.item()) > 1e-4
    assert _same(_copy(model), trained)
    assert any("validation scores averaged weights (training.ema: 0.9" in note for note in record.notes)


@pytest.mark.slow
def test_weights_come_back_when_validation_fails() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.breaks = False

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if not self.training and self.breaks:
                raise RuntimeError("broken")
            result: torch.Tensor = self.inner(inputs)
            return result

    model = Breaks()
    model.breaks = True
    follow = Follow(model)
    trainer = _trainer(model, callbacks=[follow])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train(_loader(), DataLoader(classification(8), 4))
    steps = 10
    plain = mlp()
    _trainer(plain, ema=None, max_steps=steps).train(_loader())
    assert _same(_copy(model.inner), _copy(plain))


def test_half_precision_weights_are_averaged_in_float32() -> None:
    model = nn.Sequential(nn.Linear(4, 4).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    averages = AveragedWeights(0.999, model, optimizer, Strategy(CPU))
    averages.follow(model.parameters())
    before = _copy(model)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    for _ in range(1000):
        averages.update(None)
    moved = averages.tensors["0.weight"] - before["0.weight"]
    assert averages.tensors["0.weight"].dtype == torch.float32
    assert moved.mean().item() == pytest.approx(1 - 0.999**1000, abs=0.02)
    now = _copy(model)
    with averages.in_place():
        assert not torch.equal(model[0].weight, now["0.weight"])
    assert _same(_copy(model), now)


class Awkward(nn.Module):
    """Parameters that do not lie in memory as their averages do, and complex ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Parameter(torch.randn(6, 8)[:, ::2])
        self.columns = nn.Parameter(torch.randn(4, 6).t())
        self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.number = nn.Parameter(torch.tensor(3), requires_grad=False)


def test_any_layout_and_type() -> None:
    model = Awkward()
    optimizer = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad])
    averages = AveragedWeights(DECAY, model, optimizer, Strategy(CPU))
    averages.follow(model.parameters())
    expected = _copy(model)
    with torch.no_grad():
        for _ in range(3):
            for name, item in model.named_parameters():
                if item.requires_grad:
                    item.add_(1.0)
                    expected[name] = expected[name] + (1 - DECAY) * (item.detach() - expected[name])
            averages.update(None)
    assert set(averages.tensors) == {"rows", "columns", "wave"}
    for name, average in averages.tensors.items():
        torch.testing.assert_close(average, expected[name])


def test_what_is_unfrozen_later_is_averaged_from_then_on() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    start = model[0].weight.detach().clone()
    update = Update(
        model.parameters(),
        torch.optim.SGD(model.parameters(), 0.1),
        NoSchedule(),
        Precision("off", CPU),
        None,
        strategy=Strategy(CPU),
    )
    averages = AveragedWeights(DECAY, model, update.optimizer, Strategy(CPU))
    update.average(averages)
    assert "0.weight" not in averages.tensors
    model[0].weight.requires_grad_(True)
    assert update.follow()
    assert torch.equal(averages.tensors["0.weight"], start)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    update.apply(None)
    torch.testing.assert_close(averages.tensors["0.weight"], start - 0.01)


def _resumable(folder: Path, max_steps: int, resume: bool = False, ema: float | None = DECAY) -> tuple[Any, Any]:
    model, data = make("tied")
    trainer = _trainer(
        model, make_optimizer("fused", model), run_dir=folder, max_steps=max_steps, ema=ema, clip_norm=0.05
    )
    loader = OptimizedDataLoader.create(data, 8, seed=2)
    record = trainer.train(loader, epochs=3, resume="auto" if resume else None)
    return (_averages(trainer) if ema else whole_values(model)), record


@pytest.mark.slow
def test_a_resumed_run_has_the_same_average_to_the_bit(tmp_path: Path) -> None:
    expected, _ = _resumable(tmp_path / "whole", WHOLE)
    _resumable(tmp_path / "half", HALF)
    shutil.copytree(tmp_path / "half", tmp_path / "off")
    found, _ = _resumable(tmp_path / "half", WHOLE, resume=True)
    assert _same(found, expected)
    _, record = _resumable(tmp_path / "off", WHOLE, resume=True, ema=None)
    assert any("averaged weights of the checkpoint are left behind" in note for note in record.notes)


@pytest.mark.slow
def test_an_average_may_begin_with_a_checkpoint(tmp_path: Path) -> None:
    weights, _ = _resumable(tmp_path / "run", HALF, ema=None)
    newest = load_newest(tmp_path / "run/checkpoints", print)
    assert newest is not None
    assert "ema" not in newest[1].shared
    found, record = _resumable(tmp_path / "run", HALF + 1, resume=True)
    assert any("starts with the weights" in note for note in record.notes)
    trained = load_newest(tmp_path / "run/checkpoints", print)
    assert trained is not None
    for name, value in loaded(trained[1].shared["model"]).items():
        torch.testing.assert_close(found[name], weights[name].lerp(value, 1 - DECAY))


@pytest.mark.slow
def test_export_writes_the_average_unless_told_otherwise(tmp_path: Path) -> None:
    averages, _ = _resumable(tmp_path / "run", HALF)
    plain, _ = _resumable(tmp_path / "plain", HALF, ema=None)
    for weights, expected in (("auto", averages), ("ema", averages), ("trained", plain)):
        done = export_weights(tmp_path / "run", tmp_path / f"{weights}.safetensors", weights=weights)
        assert done.averaged == (weights != "trained")
        found = load_file(tmp_path / f"{weights}.safetensors")
        assert found.keys() == expected.keys()  # both names of the weight that is tied
        assert _same(found, expected)
    with pytest.raises(CheckpointError, match=r"no averaged weights: train with training\.ema"):
        export_weights(tmp_path / "plain", tmp_path / "x.safetensors", weights="ema")
    with pytest.raises(CheckpointError, match="--weights takes auto, ema, trained, not raw"):
        export_weights(tmp_path / "plain", tmp_path / "x.safetensors", weights="raw")


def test_evaluate_scores_what_validation_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from frameworm.cli.main import app
    from frameworm.config.load import load_config_from_mapping
    from frameworm.engine.run import run

    config = load_config_from_mapping(
        {
            "data": {"dataset": "generated", "limit": 64, "num_workers": 0},
            "model": {"d_model": 16, "n_heads": 2, "num_layers": 1, "dim_feedforward": 16, "max_seq_len": 16},
            "training": {"ema": 0.5, "max_steps": 3},
            "gpu": {"device": "cpu"},
        }
    )
    record = run(config, out=tmp_path / "run")
    scores = {}
    for weights in ("auto", "ema", "trained"):
        result = CliRunner().invoke(app, ["evaluate", str(tmp_path / "run"), "--weights", weights, "--json"])
        assert result.exit_code == 0, result.output
        scores[weights] = json.loads(result.stdout)
    assert scores["auto"]["loss"] == pytest.approx(record.quality.val_loss, rel=1e-5)
    assert scores["ema"] == scores["auto"]
    assert (scores["auto"]["averaged"], scores["trained"]["averaged"]) == (True, False)
    assert scores["trained"]["loss"] != scores["auto"]["loss"]


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(ConfigError, match="every rank has weights of its own to average"):
        _trainer(mlp(), sync_every=4, strategy="ddp").train(_loader())
    with pytest.raises(ConfigError, match=r"ema: .* got 1\.0"):
        _trainer(mlp(), ema=1.0)
    with pytest.raises(StateError, match="no averaged weights"), _trainer(mlp(), ema=None).averaged_weights():
        pass


def _strategies(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Averages, bytes and validation of each strategy, and of a run that went on under another one."""
    held_out = classification(6, seed=9)
    results: dict[str, Any] = {}
    order = ("ddp", "zero1", "zero2", "zero3")
    for strategy, before in zip(order, (None, "ddp", "zero1", "zero2")):
        for name, source in ((strategy, None), (f"{before}-{strategy}", before)):
            if name.startswith("None"):
                continue
            place = Path(folder) / name
            if source is not None:
                if rank == 0:
                    shutil.copytree(Path(folder) / f"half-{source}", place)
                torch.distributed.barrier()
            model, _ = make("plain")
            settings: dict[str, Any] = {"strategy": strategy, "clip_norm": 0.05}
            if source is None:
                half = make("plain")[0]
                first = place.with_name(f"half-{name}")
                trainer = _trainer(half, make_optimizer("adamw", half), run_dir=first, max_steps=7, **settings)
                trainer.train(OptimizedDataLoader.create(classification(52), 4, seed=2), epochs=2)
            trainer = _trainer(model, make_optimizer("adamw", model), run_dir=place, max_steps=11, **settings)
            record = trainer.train(
                OptimizedDataLoader.create(classification(52), 4, seed=2),
                DataLoader(held_out, 2),
                epochs=2,
                resume=None if source is None else "auto",
            )
            trained = whole_values(model)
            averages = _averages(trainer)
            assert _same(whole_values(model), trained), "the weights were not put back"
            held = trainer._averages
            assert held is not None
            size = sum(item.numel() for item in held.tensors.values())
            results[name] = (averages, record.quality.val_loss, size)
    return results


@pytest.mark.slow
@pytest.mark.long
def test_every_strategy_has_the_average_of_one_process(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    model, data = make("plain")
    follow = Follow(model)
    trainer = _trainer(model, make_optimizer("adamw", model), clip_norm=0.05, max_steps=11, callbacks=[follow])
    record = trainer.train(
        OptimizedDataLoader.create(data, 8, seed=2), DataLoader(classification(6, seed=9), 2), epochs=2
    )
    whole = sum(item.numel() for item in follow.averages.values())
    ranks = run_ranks(_strategies, 2, (str(tmp_path),), timeout_s=DEADLINE_S)
    assert set(ranks[0]) == {"ddp", "zero1", "ddp-zero1", "zero2", "zero1-zero2", "zero3", "zero2-zero3"}
    for name, (averages, val_loss, _) in ranks[0].items():
        for key, expected in follow.averages.items():
            torch.testing.assert_close(averages[key], expected, rtol=1e-5, atol=1e-6, msg=name)
        assert val_loss == pytest.approx(record.quality.val_loss, rel=1e-5), name
        sizes = [results[name][2] for results in ranks]
        assert sum(sizes) == (2 * whole if name == "ddp" else whole), "each rank holds its share"


def test_a_trainer_scores_and_asks_the_averages() -> None:
    torch.manual_seed(0)
    model = mlp()
    trainer, loader = _trainer(model), _loader()
    trainer.train(loader, epochs=2)
    trained = whole_values(model)
    scores, answers = trainer.evaluate(loader), trainer.predict(loader)
    assert _same(whole_values(model), trained), "it goes on with the weights that are trained"
    model.load_state_dict({**model.state_dict(), **_averages(trainer)})
    alone = Trainer(model, torch.optim.AdamW(model.parameters()), run_dir=None, device="cpu", progress=False)
    assert alone.evaluate(loader) == scores
    assert torch.equal(alone.predict(loader), answers)


@pytest.mark.slow
def test_a_trainer_that_loads_what_another_saved_has_its_averages(tmp_path: Path) -> None:
    loader, trained = _loader(), _trainer(mlp())
    trained.train(loader, epochs=2)
    trained.save(tmp_path / "state")
    loaded = _trainer(mlp(seed=9))
    loaded.load(tmp_path / "state")
    assert loaded.evaluate(loader) == trained.evaluate(loader)
    loaded.save(tmp_path / "again")
    again = _trainer(mlp(seed=9))
    again.load(tmp_path / "again")
    assert _same(_averages(again), _averages(trained))
    for trainer in (trained, again):
        trainer.train(loader, epochs=1)
    assert _same(_averages(again), _averages(trained)), "both go on alike"


def test_weights_that_are_loaded_alone_begin_the_average_anew(tmp_path: Path) -> None:
    loader = _loader()
    trainer = _trainer(mlp())
    first = trainer.evaluate(loader)
    trainer.save(tmp_path / "first.safetensors")
    trainer.train(loader, epochs=2)
    assert trainer.evaluate(loader) != first
    trainer.load(tmp_path / "first.safetensors")
    assert trainer.evaluate(loader) == first
