"""Runs with resident samples: the losses of the ordinary loader bit for bit, alone, over ranks, and after a stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset
from workbench import StopAfter

from frameworm.config.load import load_config_from_mapping
from frameworm.engine.run import train_workload
from frameworm.errors import ConfigError, TrainingInterruptedError
from frameworm.hardware.resolve import resolve_here
from frameworm.models.workloads import Workload

COUNT = 75


class Named(Dataset[Any]):
    """Samples as dicts of arrays and numbers."""

    def __init__(self) -> None:
        self.rows = torch.randn(COUNT, 6, generator=torch.Generator().manual_seed(2)).numpy()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.rows[index], "labels": index % 3}


class OfNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.layers(x)
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)} if labels is not None else logits


def workload_of(kind: str) -> Workload:
    torch.manual_seed(5)
    if kind == "dicts":
        return Workload(OfNames(), Named(), Named())
    data: Dataset[Any] = TensorDataset(torch.randn(COUNT, 6), torch.arange(COUNT) % 3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))
    return Workload(model, Subset(data, range(70, 3, -1)) if kind == "subset" else data, data)


def train(
    out: Path, kind: str, resident: bool, *, world_size: int = 1, stop_after: int | None = None, **training: Any
) -> list[Any]:
    sections = {
        "workload": "some.module:function",
        "data": {"resident": resident, "num_workers": 0},
        "training": {"epochs": 3, "global_batch": 16, **training},
        "gpu": {"device": "cpu"},
        "checkpoint": {"every_steps": 2},
    }
    config = resolve_here(load_config_from_mapping(sections, environ={}), world_size)
    resume = "auto" if (out / "steps-rank0.jsonl").exists() else None
    record = train_workload(config, workload_of(kind), out=out, resume=resume, callbacks=[StopAfter(stop_after)])
    losses: list[Any] = []
    for rank in range(world_size):
        lines = (out / f"steps-rank{rank}.jsonl").read_text().splitlines()
        losses += [[step[name] for name in ("step", "loss", "grad_norm", "samples")] for step in map(json.loads, lines)]
    return [*losses, [(epoch.val_loss, epoch.val_accuracy) for epoch in record.epochs]]


@pytest.mark.parametrize("kind", ["tensors", "subset", "dicts"])
def test_losses_are_those_of_the_ordinary_loader(kind: str, tmp_path: Path) -> None:
    ordinary, resident = (train(tmp_path / str(on), kind, on, micro_batch=4) for on in (False, True))
    assert ordinary == resident


@pytest.mark.parametrize("stop_after", [5, *(pytest.param(step, marks=pytest.mark.slow) for step in (3, 8))])
@pytest.mark.slow
def test_a_stopped_run_goes_on_exactly(stop_after: int, tmp_path: Path) -> None:
    through = train(tmp_path / "through", "dicts", False)
    with pytest.raises(TrainingInterruptedError):
        train(tmp_path / "stopped", "dicts", True, stop_after=stop_after)
    assert train(tmp_path / "stopped", "dicts", True) == through


@pytest.mark.slow
def test_a_run_may_be_resumed_with_another_setting_and_batch(tmp_path: Path) -> None:
    for on in (False, True):
        with pytest.raises(TrainingInterruptedError):
            train(tmp_path / str(on), "tensors", on, stop_after=3)
    ordinary, resident = (train(tmp_path / str(on), "tensors", not on, global_batch=8) for on in (False, True))
    assert ordinary == resident


def _both_ways(rank: int, world_size: int, folder: Path) -> list[list[Any]]:
    return [train(folder / str(on), "dicts", on, world_size=world_size, micro_batch=4) for on in (False, True)]


@pytest.mark.slow
def test_two_ranks_index_their_shares(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    ordinary, resident = run_ranks(_both_ways, args=(tmp_path,))[0]
    assert ordinary == resident


def test_a_refused_run_leaves_no_folder(tmp_path: Path) -> None:
    class Noisy(Named):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": torch.randn(6), "labels": index % 3}

    config = load_config_from_mapping({"workload": "a:b", "data": {"resident": True}}, environ={})
    workload = Workload(OfNames(), Noisy())
    with pytest.raises(ConfigError, match="draws random numbers"):
        train_workload(resolve_here(config, 1), workload, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
