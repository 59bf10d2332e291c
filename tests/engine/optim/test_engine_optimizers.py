"""Optimizers of other packages, by the name that a config gives them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sharding_cases import largest_difference, make, whole_values
from torch import nn
from torch.utils.data import DataLoader
from workbench import classification

from frameworm import Trainer
from frameworm.config.checks import check
from frameworm.config.schema import Config, GPUConfig, ParallelConfig, TrainingConfig
from frameworm.distributed import OptimizedDataLoader
from frameworm.engine.export import export_weights
from frameworm.engine.optim.optimizers import build_optimizer
from frameworm.errors import ConfigError, EnvironmentSetupError
from frameworm.scaling.memory_model import EIGHT_BIT_BYTES, Setting, _optimizer_bytes
from frameworm.scaling.memory_shapes import ModelShapes

CONFIG = Config(training=TrainingConfig(optimizer="adamw8bit", lr=0.01))
DEADLINE_S = 100.0


def _wide() -> nn.Module:
    """Wide enough for 8 bits: smaller tensors are left in 32."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 3))


@pytest.mark.parametrize(("name", "package"), [("adamw8bit", "bitsandbytes"), ("schedulefree", "schedulefree")])
def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, name: Any, package: str) -> None:
    for module in (package, f"{package}.optim"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EnvironmentSetupError, match=rf"pip install 'frameworm\[{package}\]'"):
        build_optimizer(_wide(), Config(training=TrainingConfig(optimizer=name)))


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"parallel": ParallelConfig(strategy="zero2")}, "use zero1, or adamw"),
        ({"gpu": GPUConfig(capture="step")}, "counts its steps on the host"),
    ],
)
def test_what_it_cannot_do_is_refused(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check(Config(training=TrainingConfig(optimizer="adamw8bit"), **sections))


@pytest.mark.parametrize(
    ("values", "told"), [({}, "set training.schedule: constant"), ({"schedule": "constant", "ema": 0.9}, "itself")]
)
def test_what_stands_in_for_a_schedule_takes_none(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check(Config(training=TrainingConfig(optimizer="schedulefree", **values)))


def test_the_memory_plan_knows_its_size() -> None:
    model = ModelShapes.of_count(1024**2)
    sizes = [_optimizer_bytes(model, Setting(optimizer=kind), 4 * 1024**2) for kind in ("adamw", "adamw8bit")]
    assert sizes[0] - sizes[1] == round((8 - EIGHT_BIT_BYTES) * 1024**2)


def _train(max_steps: int, folder: Path | None = None, resume: bool = False, **settings: Any) -> Any:
    model = _wide()
    optimizer = build_optimizer(model, CONFIG)
    trainer = Trainer(
        model, optimizer, run_dir=folder, device="cpu", progress=False, max_steps=max_steps, clip_norm=1.0, **settings
    )
    trainer.train(
        OptimizedDataLoader.create(classification(52), 4, seed=2), epochs=2, resume="auto" if resume else None
    )
    return whole_values(model), optimizer


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    expected, optimizer = _train(11)
    assert any(value.dtype == torch.uint8 for state in optimizer.state.values() for value in _tensors(state))
    _train(7, tmp_path)
    found, _ = _train(11, tmp_path, resume=True)
    assert largest_difference(found, expected) == 0.0


def _tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in state.values() if isinstance(value, torch.Tensor)]


def _strategies(rank: int, world_size: int, folder: str) -> list[float]:
    expected, _ = _train(11, strategy="ddp")
    found, _ = _train(11, strategy="zero1")
    _train(7, Path(folder) / "half", strategy="zero1")
    if rank == 0:
        shutil.copytree(Path(folder) / "half", Path(folder) / "ddp")
    torch.distributed.barrier()
    resumed, _ = _train(11, Path(folder) / "half", resume=True, strategy="zero1")
    moved, _ = _train(11, Path(folder) / "ddp", resume=True, strategy="ddp")
    return [largest_difference(values, expected) for values in (found, resumed, moved)]


@pytest.mark.slow
def test_ranks_divide_its_state_by_parameters(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    for differences in run_ranks(_strategies, 2, (str(tmp_path),), timeout_s=DEADLINE_S):
        assert max(differences) < 1e-5, differences


def _schedule_free(model: nn.Module) -> torch.optim.Optimizer:
    training = TrainingConfig(optimizer="schedulefree", lr=0.01, weight_decay=0.1, schedule="constant")
    return build_optimizer(model, Config(training=training))


def _train_free(
    max_steps: int,
    folder: Path | None = None,
    resume: bool = False,
    validation: Any = None,
    batch_size: int = 8,
    **settings: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
    """The weights that train, those to use, and the record."""
    model, _ = make("plain")
    trainer = Trainer(
        model, _schedule_free(model), run_dir=folder, device="cpu", progress=False, max_steps=max_steps, **settings
    )
    loader = OptimizedDataLoader.create(classification(52), batch_size, seed=2)
    record = trainer.train(loader, validation, epochs=2, resume="auto" if resume else None)
    with trainer.averaged_weights():
        used = whole_values(model)
    return whole_values(model), used, record


def test_validation_and_export_use_what_a_schedule_free_optimizer_has_learnt(tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    held_out = classification(12, seed=9)
    trained, used, record = _train_free(11, tmp_path / "run", validation=DataLoader(held_out, 4))
    model, _ = make("plain")
    optimizer: Any = _schedule_free(model)
    optimizer.train()
    for epoch in range(2):
        loader = OptimizedDataLoader.create(classification(52), 8, seed=2)
        loader.set_epoch(epoch)
        for place, (inputs, target) in enumerate(loader):
            if 7 * epoch + place < 11:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
    assert largest_difference(whole_values(model), trained) == 0.0
    optimizer.eval()
    assert largest_difference(whole_values(model), used) == 0.0
    inputs, target = held_out.tensors
    assert record.quality.val_loss == pytest.approx(F.cross_entropy(model(inputs), target).item(), rel=1e-5)
    export_weights(tmp_path / "run", tmp_path / "used.safetensors")
    assert largest_difference(load_file(tmp_path / "used.safetensors"), used) == 0.0


def test_a_trainer_that_loads_scores_what_a_schedule_free_optimizer_has_learnt(tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")

    def trainer() -> Trainer:
        model, _ = make("plain")
        return Trainer(model, _schedule_free(model), run_dir=None, device="cpu", progress=False)

    held_out, trained, loaded = DataLoader(classification(12, seed=9), 4), trainer(), trainer()
    first = trained.evaluate(held_out)
    trained.save(tmp_path / "first.safetensors")
    trained.train(OptimizedDataLoader.create(classification(52), 8, seed=2))
    trained.save(tmp_path / "state")
    loaded.load(tmp_path / "state")
    assert loaded.evaluate(held_out) == trained.evaluate(held_out) != first
    trained.load(tmp_path / "first.safetensors")
    assert trained.evaluate(held_out) == first


def test_a_resumed_schedule_free_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    expected, expected_used, _ = _train_free(11)
    _train_free(7, tmp_path)
    found, used, _ = _train_free(11, tmp_path, resume=True)
    assert largest_difference(found, expected) == 0.0
    assert largest_difference(used, expected_used) == 0.0


def _free_strategies(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    results = {}
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        settings: dict[str, Any] = {"batch_size": 4, "strategy": strategy}
        trained, used, record = _train_free(11, validation=DataLoader(classification(6, seed=9), 2), **settings)
        _train_free(7, Path(folder) / strategy, **settings)
        resumed = _train_free(11, Path(folder) / strategy, resume=True, **settings)
        again = [largest_difference(*pair) for pair in zip(resumed[:2], (trained, used), strict=True)]
        results[strategy] = (trained, used, record.quality.val_loss, max(again))
    return results


@pytest.mark.slow
def test_every_strategy_uses_what_one_process_has_learnt(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    trained, used, record = _train_free(11, validation=DataLoader(classification(6, seed=9), 2))
    for results in run_ranks(_free_strategies, 2, (str(tmp_path),), timeout_s=DEADLINE_S):
        for strategy, (own_trained, own_used, val_loss, again) in results.items():
            assert largest_difference(own_trained, trained) < 1e-5, strategy
            assert largest_difference(own_used, used) < 1e-5, strategy
            assert val_loss == pytest.approx(record.quality.val_loss, rel=1e-5), strategy
            assert again == 0.0, strategy
