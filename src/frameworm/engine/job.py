"""What a session is given: the live objects of a training beside the values of its config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from frameworm.config.schema import Config
from frameworm.data.steps import StepSource
from frameworm.engine.faults.out_of_memory import Advise
from frameworm.engine.gate import Gate
from frameworm.engine.model.precision import Precision
from frameworm.engine.optim.schedule import AnySchedule
from frameworm.engine.run_output import RunOutput
from frameworm.parallel.strategy import Strategy
from frameworm.records.events import Listener
from frameworm.records.schema import Batch


@dataclass
class Job:
    """What is to be trained, by what and how; the live objects beside the config's values."""

    config: Config
    model: nn.Module
    optimizer: torch.optim.Optimizer
    make_schedule: Callable[[int | None], AnySchedule]  # from the total number of steps
    loss_fn: Callable[..., Any] | None
    strategy: Strategy
    precision: Precision
    batch: Batch
    train: StepSource
    validation: Iterable[Any] | None
    open_output: Callable[[], RunOutput]  # called once all else fits, so that a refused job leaves no folder behind
    callbacks: Sequence[Listener] = ()
    notes: list[str] = field(default_factory=list)
    advise: Advise | None = None  # settings that would fit, asked when memory has run out
    gate: Gate | None = None  # stands before every step
