"""Small models, batches and reference results for the tests of habits.

Only public names are used here: the modules behind them are going to move.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from frameworm import Callback, RunRecord, Trainer

LEARNING_RATE = 0.5
FROZEN = 1e-12  # a learning rate that leaves the model as it is, to float32 rounding
Cli = Callable[..., subprocess.CompletedProcess[str]]


class Steps(Callback):
    """Keeps the step records of a run."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def on_step(self, step: Any) -> None:
        self.records.append(step)


class LogLines(logging.Handler):
    """Keeps the library's log records, and how many there were before the first step."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []
        self.at_first_step: int | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def first_step(self) -> None:
        """Remember where the log stands, once."""
        if self.at_first_step is None:
            self.at_first_step = len(self.records)

    @property
    def before_first_step(self) -> list[logging.LogRecord]:
        """Records up to the first step; all of them if no step was taken."""
        return self.records[: self.at_first_step]

    def text(self) -> str:
        """Everything that was logged."""
        return "\n".join(record.getMessage() for record in self.records)


class FirstStep(Callback):
    """Tells a log where the first step ended, and counts steps."""

    def __init__(self, log: LogLines) -> None:
        self.steps = 0
        self._log = log

    def on_step(self, step: Any) -> None:
        self._log.first_step()
        self.steps += 1


@contextmanager
def logged() -> Iterator[LogLines]:
    """Collect what the library logs."""
    log, lines = logging.getLogger("frameworm"), LogLines()
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(lines)
    try:
        yield lines
    finally:
        log.removeHandler(lines)
        log.setLevel(level)


def linear(inputs: int = 4, outputs: int = 2) -> nn.Linear:
    """A linear layer with the same weights every time."""
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs)


def samples(count: int = 14) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of four features and labels of two classes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 4, generator=generator)
    return inputs, (inputs.sum(-1) + torch.randn(count, generator=generator) > 0).long()


def pairs(count: int = 12, size: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Samples as a list of (inputs, labels) batches."""
    inputs, labels = samples(count)
    return [(inputs[i : i + size], labels[i : i + size]) for i in range(0, count, size)]


def trainer(model: nn.Module, lr: float = LEARNING_RATE, **settings: Any) -> Trainer:
    """A trainer with plain SGD on the CPU that leaves nothing behind, unless told otherwise."""
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr)
    return Trainer(model, optimizer, **{"run_dir": None, "device": "cpu", **settings})


def outcome(run: Callable[[], RunRecord]) -> RunRecord | Exception:
    """The record of a run, or the error it ended with."""
    try:
        return run()
    except Exception as error:
        return error


def is_refusal(result: object) -> bool:
    """True for an error the library raises on purpose, whose message is meant for the user."""
    return isinstance(result, Exception) and any(kind.__name__ == "FramewormError" for kind in type(result).__mro__)


def one_update(
    loss: Callable[[nn.Module, Any], torch.Tensor], batches: Sequence[Any], weights: Sequence[float]
) -> torch.Tensor:
    """Weights of `linear()` after one SGD step on the weighted mean of the batches' losses."""
    model = linear()
    total = sum(weight * loss(model, batch) for weight, batch in zip(weights, batches))
    (gradient,) = torch.autograd.grad(total / sum(weights), [model.weight])
    return (model.weight - LEARNING_RATE * gradient).detach()


def built_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], None]) -> Path:
    """A folder that several tests read, built by the first of them, also where tests run in several processes."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # what the processes of one session share
    folder = base / name
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / f"{name}.built").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            build(folder)
            (base / f"{name}.built").touch()
    return folder


def completed(cli: Cli, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line; one that does not end in time is not the failure that a test expects."""
    try:
        return cli(*arguments, env={"OMP_NUM_THREADS": "1"}, timeout_s=200)
    except AssertionError as error:
        raise RuntimeError(str(error)) from error
