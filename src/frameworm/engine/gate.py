"""What may stand before every step of a run: it can wait there, look at what goes in, and end the run."""

from __future__ import annotations

from typing import Literal

from frameworm.data.steps import StepBatch

# go: at once. waited: time has passed that belongs to no step. end: the run is over, as if this were its last step.
Passage = Literal["go", "waited", "end"]


class Gate:
    """Lets every step through; for subclasses."""

    def enter(self, step: int) -> Passage:
        """Called before a step (numbered from 1) asks for its batch; with several ranks all must say `end` alike."""
        return "go"

    def admit(self, batch: StepBatch) -> None:
        """Called with what the step is about to compute on."""
