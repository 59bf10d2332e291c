"""A run's position: what a checkpoint holds besides tensors, and when to stop early."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from frameworm.config.schema import EarlyStopConfig, TrainingConfig
from frameworm.records.schema import EpochRecord


@dataclass(slots=True)
class Progress:
    """Position of a run, the same on all ranks except for the sums of the running epoch."""

    epoch: int = 0  # finished epochs
    step_in_epoch: int = 0
    step: int = 0  # attempted steps
    epoch_s: float = 0.0  # training time of the running epoch
    epoch_samples: int = 0  # over all ranks
    reading: dict[str, Any] | None = None  # how the running epoch is read; see `frameworm.data.position.Reading`
    loss_sum: float = 0.0  # on this rank, loss x count
    count_sum: float = 0.0
    # Set once the running epoch is validated: a run that stops right then must not validate again.
    validated: bool = False
    val_loss: float | None = None
    val_accuracy: float | None = None
    val_metrics: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    epochs_without_gain: int = 0
    finished: bool = False
    # Where `max_steps` cut the last epoch short: a run that gets more steps continues there.
    cut: dict[str, Any] | None = None
    epochs: list[EpochRecord] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """Restore from `state_dict`."""
        return cls(**{**state, "epochs": [EpochRecord(**item) for item in state["epochs"]]})

    def end_epoch(self, record: EpochRecord) -> None:
        """Close the running epoch."""
        self.epochs.append(record)
        self.epoch += 1
        self.step_in_epoch = 0
        self.epoch_s = self.loss_sum = self.count_sum = 0.0
        self.epoch_samples = 0
        self.validated = False
        self.val_loss = self.val_accuracy = None
        self.val_metrics = {}

    def figure(self, name: str) -> float | None:
        """Return a metric of the running epoch's validation by the name under which it is recorded."""
        if name in ("val_loss", "val_accuracy"):
            found: float | None = getattr(self, name)
            return found
        return self.val_metrics.get(name)

    def cut_epoch(self) -> None:
        """Remember the position in the running epoch, which `end_epoch` is about to close early."""
        self.cut = {name: getattr(self, name) for name in ("epoch", "step_in_epoch", "epoch_s", "epoch_samples")}

    def go_on(self, epochs: int, max_steps: int | None, rule: EarlyStopConfig | None) -> None:
        """Let a finished run continue if the limits now allow it: in the epoch that was cut, or the next one."""
        # Count again, as the rule may have changed.
        self.best, self.epochs_without_gain = None, 0
        stalled = [self.should_stop_early(rule, record) for record in self.epochs[: -1 if self.cut else None]][-1:]
        epoch = self.epoch if self.cut is None else self.cut["epoch"]
        if not self.finished or epoch >= epochs or self.out_of_steps(max_steps) or any(stalled):
            return
        self.finished = False
        if self.cut is not None:
            del self.epochs[self.cut["epoch"] :]
            for name, value in self.cut.items():
                setattr(self, name, value)
            self.cut = None

    def out_of_steps(self, max_steps: int | None) -> bool:
        """Whether the run has taken all the steps that it may."""
        return max_steps is not None and self.step >= max_steps

    def should_stop_early(self, rule: EarlyStopConfig | None, record: EpochRecord) -> bool:
        """Record the epoch's metric; return whether it has stalled too long. A non-finite metric is no improvement."""
        if rule is None:
            return False
        value = record.figure(rule.metric)
        sign = -1.0 if rule.prefers_higher else 1.0
        if value is None or not math.isfinite(value):
            better = False
        else:
            better = self.best is None or sign * value < sign * self.best - rule.min_delta
        if better:
            self.best = value
            self.epochs_without_gain = 0
        else:
            self.epochs_without_gain += 1
        return self.epochs_without_gain >= rule.patience

    def why_early(self, training: TrainingConfig) -> str | None:
        """Explain why a finished run has fewer epochs than configured, if early stopping ended it."""
        rule = training.early_stop
        if rule is None or self.epochs_without_gain < rule.patience or self.epoch >= training.epochs:
            return None
        best = "" if self.best is None else f"; its best was {self.best:.6g}"
        return f"stopped early after epoch {self.epoch}: {rule.metric} stopped improving{best}"


def among_best(epochs: Sequence[EpochRecord], metric: str, count: int, highest: bool = False) -> bool:
    """Whether the last epoch is among the best `count` by a metric; False if it has no finite value."""
    sign = -1.0 if highest else 1.0
    figures = [sign * value for item in epochs if (value := item.figure(metric)) is not None and math.isfinite(value)]
    last = epochs[-1].figure(metric) if epochs else None
    return last is not None and math.isfinite(last) and sum(item < sign * last for item in figures) < count
