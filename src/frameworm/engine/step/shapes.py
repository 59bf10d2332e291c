"""Shapes of a run's batches: what is known of each, and what the ranks may assume about each other's."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from frameworm.data.steps import StepBatch
from frameworm.engine.step.graphs import CaptureError, KeptFigures, Recorded, ReplaySample
from frameworm.engine.step.static_batch import StaticInputs, signature

MAX_SHAPES = 32
_UNFORESEEN = "a batch has another shape than all before it"


class Shape:
    """One batch shape: whether it has run eagerly, and its graph once there is one."""

    def __init__(self, number: int = 0) -> None:
        self.number = number  # in order of first occurrence
        self.warm = False
        self.warmed = 0
        self.replays = self.look_at = 0
        self.figures = KeptFigures()
        self.eager_only = False
        self.graph: Recorded | None = None
        self.earlier: StepBatch | None = None
        self.inputs: StaticInputs | None = None
        self.static: StepBatch | None = None  # holds the inputs
        self.sample = ReplaySample({})
        self.slots: dict[str, int] = {}  # positions of loss, gradient norm and so on in the graph's output
        self.counts_samples = True
        self.fixed_count = 0.0


class Shapes:
    """All shapes of a run, in order of first occurrence.

    Args:
        several: Whether there are several ranks.
        alike: Whether the batches of all ranks are certain to change shape at the same steps. Otherwise a rank knows
            of the others' batches only how many samples all ranks have in a step, and only the first shape is recorded.

    Attributes:
        order: Shapes of the first steps, by number; -1 for a batch without a shape.
        begun: Whether the ranks may have begun to record.
        crowded: Whether there were more shapes than are recorded.
    """

    def __init__(self, several: bool, alike: bool) -> None:
        self.order: list[int] = []
        self.begun = False
        self.crowded = False
        self._several = several
        self._alike = alike
        self._known: dict[Hashable, Shape] = {}
        self._global_samples = 0  # of the first step

    def __iter__(self) -> Iterator[Shape]:
        return iter(self._known.values())

    def of(self, batch: StepBatch) -> Shape:
        """Return the shape of a batch.

        Raises:
            CaptureError: If the batch cannot be recorded, or the other ranks do not know of its shape.
        """
        key: Hashable = tuple([signature(micro) for micro in batch.batches])
        if len(batch.batches) > 1:
            key = (key, tuple(batch.samples), batch.global_samples)  # samples weight the gradients
        elif self._several:
            key = (key, batch.samples[0], batch.global_samples)  # here too
        shape = self._known.get(key)
        if shape is None:
            shape = self._known[key] = Shape(len(self._known))
            if len(self._known) > MAX_SHAPES:
                shape.eager_only = self.crowded = True
            elif not self._alike and self.begun:
                self._check_foreseen(shape, batch)
        return shape

    def passes(self, shape: Shape | None, batch: StepBatch) -> None:
        """Note the shape of one of the first steps."""
        if not self.order:
            self._global_samples = batch.global_samples
        self.order.append(-1 if shape is None else shape.number)

    def check(self, shape: Shape, batch: StepBatch) -> None:
        """Check before recording begins with this batch, the last one noted, that this rank may record.

        Raises:
            CaptureError: If the other ranks would not know when this rank's batches change their shape.
        """
        if self._alike:
            return
        first, *_, last = self.order
        if len(set(self.order[:-1])) > 1:
            raise CaptureError("batches come in several shapes, and a rank does not know which ones the others have")
        if last != first:
            self._check_foreseen(shape, batch)

    def awaited(self, batch: StepBatch) -> Shape | None:
        """Return the shape on which the other ranks may be about to decide in a step whose batch has none here."""
        first = next(iter(self._known.values()))
        if self._alike or first.graph is not None or batch.global_samples != self._global_samples:
            return None
        return first

    def _check_foreseen(self, shape: Shape, batch: StepBatch) -> None:
        # All ranks know of steps with fewer samples, such as the last of an epoch, but not of other changes.
        shape.eager_only = True
        if batch.global_samples == self._global_samples:
            raise CaptureError(_UNFORESEEN)
