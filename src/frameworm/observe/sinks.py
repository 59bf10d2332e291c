"""Places beside the run folder that step records can go to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

from frameworm.errors import MissingPackageError
from frameworm.records.events import Listener
from frameworm.records.schema import EpochRecord, RunRecord, StepRecord


class TensorBoardSink(Listener):
    """Loss, learning rate and step time per step, losses and accuracy per epoch, for TensorBoard."""

    must_not_break_training: ClassVar[bool] = True

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingPackageError(
                "observe.sinks: tensorboard needs its package: pip install 'frameworm[tensorboard]'"
            ) from None
        self._writer: Any = SummaryWriter(str(folder))

    def on_step(self, step: StepRecord) -> None:
        """Write the step's scalars."""
        self._scalars({"train/loss": step.loss, "train/lr": step.lr, "time/step_s": step.step_s}, step.step)

    def on_epoch(self, epoch: EpochRecord) -> None:
        """Write the epoch's scalars."""
        values = {
            "epoch/train_loss": epoch.train_loss,
            "epoch/val_loss": epoch.val_loss,
            "epoch/val_accuracy": epoch.val_accuracy,
            "epoch/samples_per_s": epoch.samples_per_s,
            **{f"epoch/{name}": value for name, value in epoch.metrics.items()},
        }
        self._scalars(values, epoch.epoch)

    def on_run_end(self, record: RunRecord) -> None:
        """Close the files."""
        self._writer.close()

    def _scalars(self, values: dict[str, float | None], number: int) -> None:
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(name, value, number)
