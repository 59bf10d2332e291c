"""Small data sets, models and runs shared by the tests of training habits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from frameworm import Callback, Config, Trainer, Workload

SAMPLES = 64
# Collecting the garbage of the whole test process before every run would take longer than the runs.
QUICK: dict[str, Any] = {"device": "cpu", "enable_automatic_gc": False}


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Each input is the sample's own number."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([float(index)]), torch.tensor(index % 3)


class Augmented(Numbered):
    """Each input is the sample's number plus noise in [0, 0.5) that the loader's worker draws."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = super().__getitem__(index)
        return inputs + torch.rand(1) / 2, target


class Recorder(nn.Module):
    """Records the inputs of every training step, and presses Ctrl-C during step `interrupt_in` if given.

    A Ctrl-C during a step stops a single process after that step.
    """

    def __init__(self, interrupt_in: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(1, 3)
        self.steps: list[list[float]] = []
        self._interrupt_in = interrupt_in

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps.append(inputs[:, 0].tolist())
            if len(self.steps) == self._interrupt_in:
                os.kill(os.getpid(), signal.SIGINT)
        result: torch.Tensor = self.inner(inputs / SAMPLES)
        return result


class PressCtrlC(Callback):
    """Sends SIGINT to this process after a step."""

    def __init__(self, after_step: int) -> None:
        self._after_step = after_step

    def on_step(self, step: Any) -> None:
        if step.step == self._after_step:
            os.kill(os.getpid(), signal.SIGINT)


def require(condition: object, text: str) -> None:
    """Check the setup of a test. The error is no AssertionError, so that it reads as a broken setup."""
    if not condition:
        raise RuntimeError(text)


def flatten(steps: list[list[float]]) -> list[float]:
    """The samples of several steps in one list."""
    return [sample for step in steps for sample in step]


def train_recorded(
    loader: Any, folder: Path, *, interrupt_in: int | None = None, resume: bool = False, **settings: Any
) -> list[list[float]]:
    """Train a `Recorder` in a run folder, and return the samples of each step that this call trained."""
    model = Recorder(interrupt_in)
    settings = {**QUICK, "epochs": 1, "seed": 11, **settings}
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=folder, **settings)
    stopped = False
    try:
        trainer.train(loader, resume="auto" if resume else None)
    except KeyboardInterrupt:
        stopped = True
    require(stopped == (interrupt_in is not None), "the run did not stop where the test wanted it to")
    return model.steps


def on_ranks(run_ranks: Callable[..., Any], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a function on two ranks. A rank that fails is no AssertionError, so that it reads as a broken setup."""
    try:
        results: list[Any] = run_ranks(function, 2, args)
    except AssertionError as error:
        raise RuntimeError(str(error)) from None
    return results


built: list[Recorder] = []  # models of `numbered_workload`, newest last


def numbered_workload(config: Config) -> Workload:
    """A `workload:` of a config file: numbered samples and a model that records them."""
    model = Recorder(getattr(config.model, "interrupt_in", None))
    built.append(model)
    return Workload(model, Numbered())


def classification(samples: int = 32, seed: int = 0) -> TensorDataset:
    """Samples of six features and three classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 6, generator=generator)
    return TensorDataset(inputs, (inputs @ torch.randn(6, 3, generator=generator)).argmax(-1))


def values(module: nn.Module) -> torch.Tensor:
    """All parameters and buffers in one vector."""
    return torch.cat([item.detach().flatten().float().clone() for item in module.state_dict().values()])
