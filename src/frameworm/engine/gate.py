"""A hook before every step of a run: it can wait, inspect the batch and end the run."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from frameworm.data.steps import StepBatch
from frameworm.engine.model.compilation import Compiler
from frameworm.engine.model.precision import Precision
from frameworm.engine.step.capture import CapturedStep
from frameworm.engine.step.step import TrainStep

# go: continue. waited: time has passed that belongs to no step. reset: the same, and the run's metrics start over.
# validate: validate, then continue. end: finish the run, as if this were its last step.
Passage = Literal["go", "waited", "reset", "validate", "end"]


class Session(NamedTuple):
    """Internals of a run: its train step, its compiler, its precision and the user's loss."""

    step: TrainStep | CapturedStep
    compiler: Compiler
    precision: Precision
    loss_fn: Any


class Gate:
    """Base class that lets every step through."""

    def begin(self, session: Session) -> None:
        """Called before the first step."""

    def enter(self, step: int) -> Passage:
        """Called before a step (numbered from 1) gets its batch; all ranks must agree on `end`."""
        return "go"

    def validated(self, loss: float | None) -> None:
        """Called with the validation loss after `enter` asked to validate."""

    def admit(self, batch: StepBatch) -> None:
        """Called with the batch that the step is about to use."""

    def end(self) -> None:
        """Called after the last step, even if the run failed."""
