"""The learning rate's course: a factor on each group's peak rate, per attempted step."""

from __future__ import annotations

import inspect
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

    metric: str | None = None
    note: str | None = None

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
    """A scheduler of torch's, or one written like them.

    Args:
        scheduler: Has `step()`, or `step(metric)` as `ReduceLROnPlateau`.
        every: Whether it is stepped after every attempted `step` or every `epoch`; auto: every step, or every epoch if
            it takes a metric.

    Attributes:
        metric: The metric it must be told; None: the validation loss, or the training loss where there is none.
        note: How often it is stepped, in words.

    Raises:
        ConfigError: It cannot be stepped so.
    """

    def __init__(self, scheduler: Any, every: str = "auto") -> None:
        name = type(scheduler).__name__
        argument = _needed_argument(scheduler.step)
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self._scheduler = scheduler
        self._by_metric = plateau or (argument is not None and argument.startswith("metric"))
        if argument is not None and not self._by_metric:
            raise ConfigError(
                f"{name}.step() asks for {argument}, which nobody gives it; a scheduler is stepped by step(), or by "
                "step(metric) once per epoch"
            )
        if self._by_metric and every == "step":
            raise ConfigError(
                f"training.schedule_every: {name} takes a metric, which is known once per epoch: set epoch"
            )
        self._per_epoch = self._by_metric or every == "epoch"
        wants_maximum = self._by_metric and getattr(scheduler, "mode", "min") == "max"
        self.metric: str | None = "val_accuracy" if wants_maximum else None
        how = "once per step; schedule_every: epoch steps it once per epoch"
        if self.metric is not None:
            how = "once per epoch, with the validation accuracy"
        elif self._by_metric:
            how = "once per epoch, with the validation loss, or the training loss if there is no validation set"
        elif self._per_epoch:
            how = "once per epoch"
        self.note: str | None = f"the scheduler {name} is stepped {how}"

    def before_step(self, step: int) -> None:
        """Nothing: torch's schedulers set the rate when stepped."""

    def after_step(self) -> None:
        """One attempted step has passed."""
        if not self._per_epoch:
            self._scheduler.step()

    def after_epoch(self, metric: float | None) -> None:
        """An epoch has passed."""
        if self._by_metric:
            if metric is not None:
                self._scheduler.step(metric)
        elif self._per_epoch:
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state."""
        return dict(self._scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the saved scheduler stood."""
        self._scheduler.load_state_dict(state)


class NoSchedule:
    """The rates stay as the optimizer has them."""

    metric: str | None = None
    note: str | None = None

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


def _needed_argument(step: Any) -> str | None:
    """The first argument that a scheduler's `step` cannot do without."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return next((item.name for item in parameters if item.default is item.empty and item.kind in kinds), None)


AnySchedule = Schedule | TorchSchedule | NoSchedule
