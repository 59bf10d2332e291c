"""A schedule that records the optimizer's settings at each step, and can override its learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from frameworm.engine.optim.schedule import AnySchedule
from frameworm.numerics.plain_update import settings_of


class NotedRates:
    """Wraps a schedule.

    Attributes:
        settings: Optimizer settings of each parameter in the last step.
        raised: If set, the largest learning rate to use, with the others in proportion; None for the schedule's own.
    """

    def __init__(self, schedule: AnySchedule, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]):
        self._schedule = schedule
        self._optimizer = optimizer
        self._names = names
        self.settings: dict[str, dict[str, object]] = {}
        self.raised: float | None = None

    def before_step(self, step: int) -> None:
        self._schedule.before_step(step)
        groups = self._optimizer.param_groups
        self.settings = settings_of(self._optimizer, self._names)
        if self.raised is not None:
            largest = max((float(group["lr"]) for group in groups), default=0.0)
            for group in groups:
                rate = float(group["lr"]) / largest * self.raised if largest else self.raised
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def after_step(self) -> None:
        if self.raised is None:
            self._schedule.after_step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)
