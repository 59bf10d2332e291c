"""Small models and data whose training the engine tests compare."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from frameworm import RunRecord, Trainer
from frameworm.distributed import OptimizedDataLoader
from frameworm.records.events import Listener
from frameworm.records.schema import StepRecord


class Steps(Listener):
    """Keeps the step records of a run."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_step(self, step: StepRecord) -> None:
        self.records.append(step)


class StopAfter(Listener):
    """Sends this process a signal after a step, as a scheduler or Ctrl-C would."""

    def __init__(self, step: int | None, number: signal.Signals = signal.SIGINT, pause_s: float = 0.0) -> None:
        self._step = step
        self._number = number
        self._pause_s = pause_s

    def on_step(self, step: StepRecord) -> None:
        time.sleep(self._pause_s)
        if step.step == self._step:
            os.kill(os.getpid(), self._number)


def classification(samples: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, (inputs @ torch.randn(6, 3, generator=generator)).argmax(-1))


class Sequences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sequences of very unequal length, padded to 8; the target marks padding with -100."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, 11, (samples, 8), generator=generator)
        self.targets = torch.randint(0, 4, (samples, 8), generator=generator)
        lengths = torch.randint(1, 9, (samples,), generator=generator)
        self.targets[torch.arange(8)[None, :] >= lengths[:, None]] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens[index], self.targets[index]


def mlp(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def tagger() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 4))


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([item.detach().flatten().clone() for item in model.parameters()])


def fit(
    model: nn.Module,
    dataset: Any,
    *,
    optimizer: str = "sgd",
    batch_size: int,
    accumulation: int = 1,
    epochs: int = 1,
    validation: Any = None,
    loader: str = "ours",
    **settings: Any,
) -> tuple[RunRecord, torch.Tensor, list[StepRecord]]:
    """Train and return the record, the final parameters and this rank's steps."""
    steps = Steps()
    settings = {"run_dir": None, "device": "cpu", **settings}
    trainer = Trainer(model, make_optimizer(optimizer, model), callbacks=[steps], accumulation=accumulation, **settings)
    train: Any = (
        OptimizedDataLoader.create(dataset, batch_size, seed=5)
        if loader == "ours"
        else DataLoader(dataset, batch_size, shuffle=False)
    )
    record = trainer.train(train, None if validation is None else DataLoader(validation, batch_size), epochs=epochs)
    return record, parameters(model), steps.records
