"""Optimizers of other packages, by the name that a config gives them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharding_cases import largest_difference, whole_values
from torch import nn
from workbench import classification

from frameworm import Trainer
from frameworm.config.checks import check
from frameworm.config.schema import Config, GPUConfig, ParallelConfig, TrainingConfig
from frameworm.distributed import OptimizedDataLoader
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


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(EnvironmentSetupError, match=r"pip install 'frameworm\[bitsandbytes\]'"):
        build_optimizer(_wide(), CONFIG)


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
