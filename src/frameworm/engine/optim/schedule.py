"""The learning rate's course: a factor on each group's peak rate, per attempted step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from frameworm.errors import ConfigError

ONECYCLE_WARMUP = 0.3
ONECYCLE_START = 1 / 25
ONECYCLE_END = 1 / (25 * 1e4)


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def onecycle(step: int, total: int, warmup: float) -> float:
    """Up to the peak along a cosine, then down along another, as torch's OneCycleLR (without cycling momentum)."""
    peak = (warmup or ONECYCLE_WARMUP) * total - 1
    last = max(total - 1, 1)
    if step <= peak:
        return _cosine(ONECYCLE_START, 1.0, step / peak if peak > 0 else 1.0)
    return _cosine(1.0, ONECYCLE_END, min(1.0, (step - peak) / max(last - peak, 1e-9)))


def _after_warmup(step: int, total: int, warmup: float, fall: Callable[[float], float]) -> float:
    climb = round(warmup * total)
    if step < climb:
        return (step + 1) / climb
    return fall(min(1.0, (step - climb) / max(total - climb, 1)))


def cosine(step: int, total: int, warmup: float) -> float:
    """A linear climb over the warm-up, then half a cosine down to zero."""
    return _after_warmup(step, total, warmup, lambda share: _cosine(1.0, 0.0, share))


def linear(step: int, total: int, warmup: float) -> float:
    """A linear climb over the warm-up, then a straight line down to zero."""
    return _after_warmup(step, total, warmup, lambda share: 1.0 - share)


def constant(step: int, total: int, warmup: float) -> float:
    """A linear climb over the warm-up, then no change."""
    return _after_warmup(step, total, warmup, lambda share: 1.0)


SHAPES: dict[str, Callable[[int, int, float], float]] = {
    "onecycle": onecycle,
    "cosine": cosine,
    "linear": linear,
    "constant": constant,
}


class Schedule:
    """Sets the rate of every parameter group for each step. It has no state beyond the step number."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: str, total_steps: int | None, warmup: float) -> None:
        if total_steps is None and (kind != "constant" or warmup):
            raise ConfigError(
                f"training.schedule: {kind} needs to know how many steps there will be, and the data set has no "
                "length; set training.max_steps, or schedule: constant"
            )
        self._optimizer = optimizer
        self._shape = SHAPES[kind]
        self._total = total_steps or 1
        self._shift = 0
        self._warmup = warmup
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]

    def before_step(self, step: int) -> None:
        """Set the rates for step number `step`, counted from 0."""
        factor = self._shape(step + self._shift, self._total, self._warmup)
        for group, peak in zip(self._optimizer.param_groups, self._peaks):
            group["lr"] = peak * factor

    def shift(self, steps: int) -> None:
        """Count so many steps more (or fewer) than were taken, because those covered more (or less) of the data."""
        self._shift = steps

    def after_step(self) -> None:
        """Nothing: the next rate follows from the step's number."""

    def after_epoch(self, metric: float | None) -> None:
        """Nothing: epochs do not matter here."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: see `load_state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore: peaks come from the config, the position from the step number."""


class TorchSchedule:
    """A scheduler of torch's, stepped after every attempted step (`ReduceLROnPlateau`: after every epoch)."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._by_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)

    def before_step(self, step: int) -> None:
        """Nothing: torch's schedulers set the rate when stepped."""

    def after_step(self) -> None:
        """One attempted step has passed."""
        if not self._by_metric:
            self._scheduler.step()

    def after_epoch(self, metric: float | None) -> None:
        """An epoch has passed; only schedulers that watch a metric care."""
        if self._by_metric and metric is not None:
            self._scheduler.step(metric)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state."""
        return dict(self._scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the saved scheduler stood."""
        self._scheduler.load_state_dict(state)


class NoSchedule:
    """The rates stay as the optimizer has them."""

    def before_step(self, step: int) -> None:
        """Nothing."""

    def after_step(self) -> None:
        """Nothing."""

    def after_epoch(self, metric: float | None) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


AnySchedule = Schedule | TorchSchedule | NoSchedule
