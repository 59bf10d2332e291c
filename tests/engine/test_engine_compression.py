"""Training with compressed gradients, and with models that are averaged now and then, through the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from workbench import classification, parameters

from frameworm import Trainer
from frameworm.distributed import OptimizedDataLoader
from frameworm.errors import ModelError
from frameworm.parallel.replicas import check_replicas

STEPS = 14  # 56 samples, 4 for each of two ranks: 7 steps an epoch
METHODS = ("bf16", "int8", "int4", "topk", "powersgd")


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 160), nn.BatchNorm1d(160), nn.Tanh(), nn.Dropout(0.2), nn.Linear(160, 3))


def _train(folder: Path | None, *, max_steps: int = STEPS, resume: bool = False, **settings: Any) -> tuple[Any, Any]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer, run_dir=folder, max_steps=max_steps, progress=False, **settings)
    loader = OptimizedDataLoader.create(classification(56), 4, seed=2)
    record = trainer.train(loader, epochs=2, resume="auto" if resume else None)
    return model, record


def _stopped_and_resumed(rank: int, world_size: int, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    whole, record = _train(Path(folder) / "whole", **settings)
    _train(Path(folder) / "parts", max_steps=STEPS // 2, **settings)
    resumed, again = _train(Path(folder) / "parts", resume=True, **settings)
    check_replicas(resumed, STEPS)
    return {
        "same": torch.equal(parameters(whole), parameters(resumed)),
        "values": parameters(whole),
        "communication": record.communication,
        "strategy": record.strategy,
        "unseen": record.unseen,
        "notes": again.notes,
        "loss": record.quality.train_loss,
    }


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_goes_on_bit_for_bit(run_ranks: Callable[..., list[Any]], tmp_path: Path, method: str) -> None:
    settings = {"compression": method, "check_replicas": 5, "bucket_cap_mb": 0.001, "first_bucket_mb": 0.001}
    first, second = run_ranks(_stopped_and_resumed, 2, (str(tmp_path), settings))
    for result in (first, second):
        assert result["same"]
        assert not any("feedback" in note for note in result["notes"])
        compression = result["communication"].compression
        assert compression.method == method
        assert compression.chosen_by == "user"
        assert 0 < compression.bytes_per_step < compression.plain_bytes_per_step
        assert result["communication"].bytes_per_step == compression.bytes_per_step
    assert torch.equal(first["values"], second["values"])


@pytest.mark.slow
def test_averaged_models_resume_and_agree(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    first, second = run_ranks(_stopped_and_resumed, 2, (str(tmp_path), {"sync_every": 4}))
    plain, _ = run_ranks(_stopped_and_resumed, 2, (str(tmp_path / "plain"), {}))
    for result in (first, second):
        assert result["same"]
        assert result["strategy"] == "ddp"
        assert result["unseen"] == []
        assert any("models are averaged every 4 steps" in note for note in result["notes"])
        assert result["communication"].compression is None
        assert result["communication"].bytes_per_step == plain["communication"].bytes_per_step // 4
    assert torch.equal(first["values"], second["values"])
    assert not torch.equal(first["values"], plain["values"])  # the codec changes numerics
    assert first["loss"] == pytest.approx(plain["loss"], rel=0.3)


def _other_world(rank: int, world_size: int, folder: str) -> list[str]:
    record: Any
    _, record = _train(Path(folder), max_steps=STEPS // 2, compression="int4")
    return list(record.notes)


def _three(rank: int, world_size: int, folder: str) -> list[str]:
    _, record = _train(Path(folder), resume=True, compression="int4")
    return list(record.notes)


@pytest.mark.slow
def test_another_number_of_processes_starts_feedback_anew(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    run_ranks(_other_world, 2, (str(tmp_path / "run"),))
    for notes in run_ranks(_three, 3, (str(tmp_path / "run"),)):
        assert any("error feedback starts from nothing: 2 processes" in note for note in notes)


def _strays(rank: int, world_size: int) -> str:
    class Strays(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if rank == 1:
                with torch.no_grad():
                    self.bias += 1e-3
            return super().forward(inputs)

    torch.manual_seed(0)
    model = Strays(6, 3)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), check_replicas=2, progress=False)
    try:
        trainer.train(OptimizedDataLoader.create(classification(56), 4), epochs=1)
    except ModelError as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_replicas_that_part_are_found(run_ranks: Callable[..., list[Any]]) -> None:
    for text in run_ranks(_strays, 2):
        assert "after step 2 the ranks no longer hold the same model: bias of rank 1" in text


def _alone(rank: int, world_size: int) -> Any:
    return _train(None, compression="int4")[1].communication


@pytest.mark.slow
def test_one_rank_has_nothing_to_compress(run_ranks: Callable[..., list[Any]]) -> None:
    (communication,) = run_ranks(_alone, 1)
    assert communication.bytes_per_step == 0
