"""What may stand before every step of a run: it can wait there, look at what goes in, and end the run."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from frameworm.data.steps import StepBatch
from frameworm.engine.model.compilation import Compiler
from frameworm.engine.model.precision import Precision
from frameworm.engine.step.capture import CapturedStep
from frameworm.engine.step.step import TrainStep

# go: at once. waited: time has passed that belongs to no step. reset: the same, and the run's figures start over from
# here. validate: validate first, then go. end: the run is over, as if this were its last step.
Passage = Literal["go", "waited", "reset", "validate", "end"]


class Session(NamedTuple):
    """The inside of a run: what makes its steps, what compiles its model, its precision and the user's loss."""

    step: TrainStep | CapturedStep
    compiler: Compiler
    precision: Precision
    loss_fn: Any


class Gate:
    """Lets every step through; for subclasses."""

    def begin(self, session: Session) -> None:
        """Called before the first step."""

    def enter(self, step: int) -> Passage:
        """Called before a step (numbered from 1) asks for its batch; with several ranks all must say `end` alike."""
        return "go"

    def validated(self, loss: float | None) -> None:
        """Called with the validation loss after `enter` asked to validate."""

    def admit(self, batch: StepBatch) -> None:
        """Called with what the step is about to compute on."""

    def end(self) -> None:
        """Called after the last step, also when the run failed."""
