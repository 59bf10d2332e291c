"""docs/differences.md: what it says that frameworm does differently, it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from frameworm import Trainer
from frameworm.config.schema import Config
from frameworm.distributed import GradientCompressor, PerformanceProfiler, ZeROStage1Optimizer, cleanup, setup_ddp
from frameworm.errors import ConfigError, FramewormError, StateError, TrainingInterruptedError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "differences.md").read_text(encoding="utf-8")


def loader(count: int = 10) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(count, 4), torch.zeros(count, dtype=torch.long)), 4)


def trainer(model: nn.Module | None = None, kind: Any = torch.optim.SGD, **settings: Any) -> Trainer:
    model = nn.Linear(4, 2) if model is None else model
    return Trainer(model, kind(model.parameters()), **{"run_dir": None, "device": "cpu", **settings})


def _steps_taken_elsewhere() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    Trainer(model, optimizer, run_dir=None, device="cpu").train(loader())
    try:
        Trainer(model, optimizer, strategy="zero2", run_dir=None, device="cpu").train(loader())
    finally:
        cleanup()


def _too_late() -> None:
    trained = trainer()
    trained.train(loader())
    trained.enable_compile()


REFUSED: dict[str, tuple[Callable[[], Any], type[FramewormError]]] = {
    "trained parameters in fp16": (lambda: trainer(nn.Linear(4, 2).half()), ConfigError),
    "an optimizer with a closure": (lambda: trainer(kind=torch.optim.LBFGS), ConfigError),
    "wrap an optimizer that has taken steps in ZeRO": (_steps_taken_elsewhere, StateError),
    "an error once `train()` has begun": (_too_late, StateError),
    "an unknown setting is ignored": (lambda: trainer(learning_rat=1.0), ConfigError),
    "`ZeROStage1Optimizer` in a single process": (
        lambda: ZeROStage1Optimizer(nn.Linear(4, 2).parameters(), lr=0.1),
        FramewormError,
    ),
    "`checkpoint.dir: auto`": (lambda: Config(checkpoint={"dir": "auto"}), ConfigError),
    "compression together with FSDP": (
        lambda: trainer(strategy="zero3", compression="int8").train(loader()),
        ConfigError,
    ),
    "needs `training.base_batch`": (lambda: trainer(lr_scaling="linear").train(loader()), ConfigError),
}
NEED_NO_GPU: dict[str, Callable[[], Any]] = {
    '`backend="nccl"` copied to a CPU': lambda: setup_ddp(0, 1, backend="nccl"),
    "`PerformanceProfiler(nvtx=True)` without a GPU": lambda: PerformanceProfiler(nvtx=True),
}


@pytest.mark.parametrize("claim", REFUSED)
def test_what_is_refused(claim: str) -> None:
    assert claim in PAGE
    attempt, error = REFUSED[claim]
    with pytest.raises(error):
        attempt()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
@pytest.mark.parametrize("claim", NEED_NO_GPU)
def test_what_is_refused_without_a_gpu(claim: str) -> None:
    assert claim in PAGE
    with pytest.raises(FramewormError):
        NEED_NO_GPU[claim]()


@pytest.mark.slow
def test_what_is_done_differently() -> None:
    assert trainer().train(loader(10)).steps == 3  # the last, short step is trained
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    halved = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    Trainer(model, optimizer, scheduler=halved, run_dir=None, device="cpu").train(loader(12), epochs=2)
    assert optimizer.param_groups[0]["lr"] == 0.5**6  # once per step
    mixed = trainer()
    mixed.enable_mixed_precision()
    assert mixed.train(loader()).precision == "bf16"
    assert trainer(mixed_precision="auto").train(loader()).precision == "fp32"
    assert GradientCompressor().compress_quantize(torch.randn(1000), 4)["quantized"].nbytes == 500
    assert issubclass(TrainingInterruptedError, KeyboardInterrupt)
    assert not issubclass(TrainingInterruptedError, Exception)


def test_frozen_layers_stay_frozen_and_a_regression_has_no_accuracy() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[1].eval()
    numbers = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), 4)
    record = trainer(model, loss_fn=nn.MSELoss()).train(numbers, numbers)
    assert not model[1].training
    assert torch.equal(model[1].running_mean, torch.zeros(4))
    assert record.quality.val_accuracy is None


def test_the_page_can_be_found() -> None:
    assert "(docs/differences.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(differences.md)" in (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
