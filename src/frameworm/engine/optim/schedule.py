"""Learning-rate schedules: a factor on each group's peak rate, per attempted step."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from frameworm.config.training_section import TrainingConfig
from frameworm.errors import ConfigError

ONECYCLE_WARMUP = 0.3
ONECYCLE_START = 1 / 25
ONECYCLE_END = 1 / (25 * 1e4)
WSD_DECAY = 0.2


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def steps_of(length: float, total: int) -> float:
    """Convert a length to steps: below 1 it is a fraction of all steps, otherwise a number of steps."""
    return length if length >= 1 else length * total


def onecycle(step: int, total: int, warmup: float) -> float:
    """Cosine up to the peak, then cosine down, as torch's OneCycleLR (without cycling momentum)."""
    peak = min(steps_of(warmup or ONECYCLE_WARMUP, total), total) - 1
    last = max(total - 1, 1)
    if step <= peak:
        return _cosine(ONECYCLE_START, 1.0, step / peak if peak > 0 else 1.0)
    return _cosine(1.0, ONECYCLE_END, min(1.0, (step - peak) / max(last - peak, 1e-9)))


def _after_warmup(step: int, total: int, warmup: float, fall: Callable[[float], float]) -> float:
    climb = round(steps_of(warmup, total))
    if step < climb:
        return (step + 1) / climb
    return fall(min(1.0, (step - climb) / max(total - climb, 1)))


def cosine(step: int, total: int, warmup: float) -> float:
    """Linear warm-up, then half a cosine down to zero."""
    return _after_warmup(step, total, warmup, lambda share: _cosine(1.0, 0.0, share))


def linear(step: int, total: int, warmup: float) -> float:
    """Linear warm-up, then linear decay to zero."""
    return _after_warmup(step, total, warmup, lambda share: 1.0 - share)


def constant(step: int, total: int, warmup: float) -> float:
    """Linear warm-up, then no change."""
    return _after_warmup(step, total, warmup, lambda share: 1.0)


FALLS: dict[str, Callable[[float], float]] = {
    "linear": lambda share: 1.0 - share,
    "cosine": lambda share: _cosine(1.0, 0.0, share),
    "sqrt": lambda share: 1.0 - math.sqrt(share),
}


def wsd(step: int, total: int, warmup: float, decay: float = WSD_DECAY, decay_shape: str = "linear") -> float:
    """Warm-up, stable, decay: linear warm-up, then constant, then down to zero over the last steps.

    Args:
        decay: Length of the decay, as for `steps_of`.
        decay_shape: Shape of the decay, a key of `FALLS`.
    """
    begin = max(total - round(steps_of(decay, total)), round(steps_of(warmup, total)))
    if step < begin:
        return constant(step, total, warmup)
    return FALLS[decay_shape](min(1.0, (step - begin) / max(total - begin, 1)))


SHAPES: dict[str, Callable[[int, int, float], float]] = {
    "onecycle": onecycle,
    "cosine": cosine,
    "linear": linear,
    "constant": constant,
    "wsd": wsd,
}


class Schedule:
    """Sets every parameter group's learning rate from the step number alone.

    Args:
        optimizer: Its groups hold their peak rates.
        kind: A key of `SHAPES`.
        total_steps: Steps of the whole run; None if unknown.
        warmup: Length of the warm-up, as for `steps_of`.
        more: Further arguments of the shape.

    Raises:
        ConfigError: If the shape needs the number of steps and it is unknown.
    """

    metric: str | None = None
    note: str | None = None

    def __init__(
        self, optimizer: torch.optim.Optimizer, kind: str, total_steps: int | None, warmup: float, **more: Any
    ) -> None:
        if total_steps is None and (kind != "constant" or 0 < warmup < 1):
            raise ConfigError(
                f"training.schedule: {kind} needs to know how many steps there will be, and the data set has no "
                "length; set training.max_steps, or schedule: constant (with a warmup in steps)"
            )
        self._optimizer = optimizer
        self._shape = functools.partial(SHAPES[kind], **more)
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
        """Add `steps` to every step number, because those taken covered more (or, if negative, less) of the data."""
        self._shift = steps

    def after_step(self) -> None:
        """Do nothing: the next rate follows from the step number."""

    def after_epoch(self, metric: float | None) -> None:
        """Do nothing: epochs do not matter here."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state: see `load_state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: peaks come from the config, the position from the step number."""


class TorchSchedule:
    """Drives a torch scheduler, or one with the same interface.

    Args:
        scheduler: Has `step()`, or `step(metric)` like `ReduceLROnPlateau`.
        every: Step it after every attempted `step` or after every `epoch`; `auto` means every step, or every epoch if
            it takes a metric.
        metric: Name of the metric to pass, if it takes one; None for the accuracy if it maximizes, else a loss.

    Attributes:
        metric: Name of the metric to pass; None for the validation loss, or the training loss without validation.
        note: How often it is stepped, in words.

    Raises:
        ConfigError: If it cannot be stepped that way.
    """

    def __init__(self, scheduler: Any, every: str = "auto", metric: str | None = None) -> None:
        name = type(scheduler).__name__
        argument = _needed_argument(scheduler.step)
        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self._scheduler = scheduler
        self._by_metric = plateau or (argument is not None and argument.startswith("metric"))
        if argument is not None and not self._by_metric:
            raise ConfigError(
                f"{name}.step() needs {argument}, which it is not given; a scheduler is stepped by step(), or by "
                "step(metric) once per epoch"
            )
        if self._by_metric and every == "step":
            raise ConfigError(
                f"training.schedule_every: {name} takes a metric, which is known once per epoch: set epoch"
            )
        if metric is not None and not self._by_metric:
            raise ConfigError(f"training.schedule_metric: {name} takes no metric; leave it out")
        self._per_epoch = self._by_metric or every == "epoch"
        wants_maximum = self._by_metric and getattr(scheduler, "mode", "min") == "max"
        self.metric: str | None = metric or ("val_accuracy" if wants_maximum else None)
        how = "once per step; schedule_every: epoch steps it once per epoch"
        if self.metric is not None:
            how = f"once per epoch, with {'the validation accuracy' if metric is None else metric}"
        elif self._by_metric:
            how = "once per epoch, with the validation loss, or the training loss if there is no validation set"
        elif self._per_epoch:
            how = "once per epoch"
        self.note: str | None = f"the scheduler {name} is stepped {how}"

    def before_step(self, step: int) -> None:
        """Do nothing: torch's schedulers set the rate when stepped."""

    def after_step(self) -> None:
        """Step the scheduler unless it is stepped per epoch."""
        if not self._per_epoch:
            self._scheduler.step()

    def after_epoch(self, metric: float | None) -> None:
        """Step the scheduler if it is stepped per epoch, with the metric if it takes one."""
        if self._by_metric:
            if metric is not None:
                self._scheduler.step(metric)
        elif self._per_epoch:
            self._scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's own state."""
        return dict(self._scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the saved scheduler stood."""
        self._scheduler.load_state_dict(state)


class WarmUp:
    """Adds a linear warm-up to another schedule, which does not notice it.

    Args:
        schedule: Sets the rates.
        optimizer: The optimizer whose rates it sets.
        steps: Length of the warm-up.
    """

    def __init__(self, schedule: TorchSchedule | NoSchedule, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self._schedule = schedule
        self._optimizer = optimizer
        self._steps = steps
        self._usual: list[float] | None = None
        self.metric = schedule.metric
        climb = f"the learning rate climbs over the first {steps} steps (training.warmup)"
        self.note: str | None = climb if schedule.note is None else f"{schedule.note}; {climb}"

    def before_step(self, step: int) -> None:
        """Lower the rates of an early step."""
        self._schedule.before_step(step)
        if step < self._steps:
            groups = self._optimizer.param_groups
            self._usual = [float(group["lr"]) for group in groups]
            _set_rates(groups, [rate * (step + 1) / self._steps for rate in self._usual])

    def after_step(self) -> None:
        """Restore the rates before the schedule continues from them."""
        if self._usual is not None:
            _set_rates(self._optimizer.param_groups, self._usual)
            self._usual = None
        self._schedule.after_step()

    def after_epoch(self, metric: float | None) -> None:
        """Pass the end of the epoch on to the schedule."""
        self._schedule.after_epoch(metric)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state; the warm-up's position follows from the step number."""
        return self._schedule.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the saved schedule stood."""
        self._schedule.load_state_dict(state)


def _set_rates(groups: list[dict[str, Any]], rates: list[float]) -> None:
    for group, rate in zip(groups, rates):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class ChosenRates:
    """Remembers the peak rates that the user set, as schedules and checkpoints overwrite the optimizer's.

    Args:
        optimizer: The optimizer as the user passed it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._chosen = self._now()
        self._left = list(self._chosen)

    def _now(self) -> list[float]:
        return [float(group.get("lr", 0.0)) for group in self._optimizer.param_groups]

    def note(self) -> None:
        """Pick up rates that the user has changed since `leave`."""
        for place, rate in enumerate(self._now()):
            if place >= len(self._left) or rate != self._left[place]:
                self._chosen[place : place + 1] = [rate]

    def leave(self) -> None:
        """Call after training or a checkpoint has set the rates."""
        self._left = self._now()
        self._chosen += self._left[len(self._chosen) :]

    def put_back(self) -> None:
        """Restore the user's rates."""
        _set_rates(self._optimizer.param_groups, self._chosen)


def schedule_of(
    optimizer: torch.optim.Optimizer, training: TrainingConfig, total_steps: int | None, kind: str | None = None
) -> Schedule:
    """Build the schedule that a config names.

    Args:
        kind: Used instead of `training.schedule` if given.
    """
    name = training.schedule if kind is None else kind
    more = {"decay": training.decay, "decay_shape": training.decay_shape} if name == "wsd" else {}
    return Schedule(optimizer, name, total_steps, training.warmup, **more)


def warmed_up(
    schedule: TorchSchedule | NoSchedule, optimizer: torch.optim.Optimizer, warmup: float, total_steps: int | None
) -> AnySchedule:
    """Add a warm-up (a length as for `steps_of`) to a schedule; without one, return the schedule itself.

    Raises:
        ConfigError: If the warm-up is a fraction of an unknown number of steps.
    """
    if not warmup:
        return schedule
    if total_steps is None and warmup < 1:
        raise ConfigError(
            f"training.warmup: {warmup:g} is a fraction of the steps, and the data set has no length; give a number of "
            "steps, or set training.max_steps"
        )
    return WarmUp(schedule, optimizer, round(steps_of(warmup, total_steps or 1)))


class NoSchedule:
    """Leaves the optimizer's rates as they are."""

    metric: str | None = None
    note: str | None = None

    def before_step(self, step: int) -> None:
        """Do nothing."""

    def after_step(self) -> None:
        """Do nothing."""

    def after_epoch(self, metric: float | None) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


def _needed_argument(step: Any) -> str | None:
    """Name of the first required argument of a scheduler's `step`."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return next((item.name for item in parameters if item.default is item.empty and item.kind in kinds), None)


AnySchedule = Schedule | TorchSchedule | WarmUp | NoSchedule
