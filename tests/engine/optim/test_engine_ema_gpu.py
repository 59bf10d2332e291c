"""Averaged weights on a CUDA device: without waiting for it, and inside of a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workbench import Steps, classification

from frameworm import Trainer
from frameworm.distributed import OptimizedDataLoader
from frameworm.engine.optim.ema import AveragedWeights
from frameworm.parallel.strategy import Strategy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DECAY = 0.9


def _net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 3))


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: item.detach().cpu().clone() for name, item in model.named_parameters()}


def _apart(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def _spoilt(samples: int) -> TensorDataset:
    inputs, target = (item.clone() for item in classification(samples).tensors)
    inputs[83, 0] = 1e4  # in the 21st step
    return TensorDataset(inputs, target)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, target = batch
    factor = torch.where((inputs[:, 0] > 1e3).any(), float("inf"), 1.0)
    return F.cross_entropy(model(inputs), target) * factor


def _train(capture: str, **settings: Any) -> tuple[Any, Any, Any, Any]:
    model, steps = _net(), Steps()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    trainer = Trainer(
        model,
        optimizer,
        _loss,
        **{
            "ema": DECAY, "capture": capture, "clip_norm": 1.0, "callbacks": [steps], "run_dir": None, "seed": 7,
            "progress": False, **settings,
        },
    )  # fmt: skip
    loader = OptimizedDataLoader.create(_spoilt(200), 4, shuffle=False, num_workers=0)
    record = trainer.train(loader, DataLoader(classification(16, seed=9), 8))
    with trainer.averaged_weights():
        averages = _values(model)
    return _values(model), averages, record, steps.records


@pytest.mark.parametrize("settings", [{}, {"mixed_precision": "fp16"}], ids=["fp32", "fp16"])
def test_a_captured_step_keeps_the_average_of_an_eager_one(settings: dict[str, Any]) -> None:
    weights, averages, record, steps = _train("off", **settings)
    captured_weights, captured_averages, captured_record, captured_steps = _train("step", **settings)
    assert captured_record.captured_steps > 30, captured_record.notes
    skipped = [step.step for step in steps if step.skipped]
    assert 21 in skipped
    assert skipped == [step.step for step in captured_steps if step.skipped]
    assert _apart(weights, averages) > 1e-3
    assert _apart(captured_weights, weights) < 1e-4
    assert _apart(captured_averages, averages) < 1e-4
    assert captured_record.quality.val_loss == pytest.approx(record.quality.val_loss, abs=1e-4)


def test_a_trial_of_the_capture_leaves_the_average_alone() -> None:
    _, averages, _, _ = _train("off")
    _, tried, _, _ = _train("auto")
    assert _apart(tried, averages) < 1e-4


def test_the_host_waits_for_nothing() -> None:
    model = _net().cuda()
    averages = AveragedWeights(DECAY, model, torch.optim.AdamW(model.parameters()), Strategy(torch.device("cuda")))
    averages.follow(model.parameters())
    bad, fine = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    before = {name: item.clone() for name, item in averages.tensors.items()}
    with torch.no_grad():
        for item in model.parameters():
            item.add_(1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        averages.update(bad)
        averages.update(fine)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, item in model.named_parameters():
        torch.testing.assert_close(averages.tensors[name], before[name].lerp(item.detach(), 1 - DECAY))
