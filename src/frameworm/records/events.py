"""How the training loop tells others what happened, without knowing who listens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from frameworm.records.schema import EpochRecord, RunRecord, StepRecord

EVENTS = {  # and their arguments
    "on_run_start": 1,
    "on_batch_end": 4,
    "on_step": 1,
    "on_epoch": 1,
    "on_checkpoint": 2,
    "on_run_end": 1,
}
_Call = Callable[..., Any]
_Target = tuple["Listener", _Call]


class Listener:
    """Base of everything that wants to hear of a run; each method does nothing unless overridden.

    Attributes:
        must_not_break_training: True for listeners that only watch. When one of these raises, it is dropped with a
            note and training goes on; errors of all others reach the training loop.
        trainer: The `Trainer` that this callback was given to; None for other listeners.
    """

    must_not_break_training: ClassVar[bool] = False
    trainer: Any = None

    def on_run_start(self, record: RunRecord) -> None:
        """The run is about to take its first step."""

    def on_batch_end(self, trainer: Any, batch: Any, outputs: Any, loss: Any) -> None:
        """A step is done on this rank; called for each of its micro-batches, before the next step begins.

        Args:
            trainer: Has `model`, `optimizer` and `stop()`.
            batch: As the loader gave it, on the device.
            outputs: What the model returned, without gradients; None where `loss_fn(model, batch)` calls the model, or
                the model returns its loss alone.
            loss: On the device, without gradients: to read its value is to wait for the device.
        """

    def on_step(self, step: StepRecord) -> None:
        """A step of this rank is complete; called for every step, so keep it cheap."""

    def on_epoch(self, epoch: EpochRecord) -> None:
        """An epoch and its validation are complete."""

    def on_checkpoint(self, path: str, step: int) -> None:
        """A checkpoint of the state after `step` is durable at `path`."""

    def on_run_end(self, record: RunRecord) -> None:
        """The run is over, for whatever reason; `record.status` says which."""


class Events(Listener):
    """Hands each event to every listener, in order. With no listeners it does nothing, so the loop never asks.

    Args:
        listeners: Who listens; only the methods a listener overrides are ever called, and one without the base class
            needs only those that it wants.
        acting: Those of them that may act on the training, and hear of a step at once (`on_own_step`).

    Attributes:
        notes: One sentence for each listener that was dropped.
    """

    def __init__(self, listeners: Iterable[Listener] = (), acting: Iterable[Listener] = ()) -> None:
        self.notes: list[str] = []
        self._listeners: tuple[Listener, ...] = tuple(listeners)
        self._acting = {id(listener) for listener in acting}
        self._collect()

    @property
    def wants_batches(self) -> bool:
        """Whether somebody listens to `on_batch_end`; batches and outputs are kept for nobody else."""
        return bool(self._batch_end)

    @property
    def listeners(self) -> Sequence[Listener]:
        """The listeners still being told."""
        return self._listeners

    def on_run_start(self, record: RunRecord) -> None:
        """Tell all that the run begins."""
        self._tell(self._run_start, record)

    def on_batch_end(self, trainer: Any, batch: Any, outputs: Any, loss: Any) -> None:
        """Tell all of one micro-batch."""
        self._tell(self._batch_end, trainer, batch, outputs, loss)

    def on_step(self, step: StepRecord) -> None:
        """Tell all of one step, but those who act."""
        for listener, call in self._step:
            try:
                call(step)
            except Exception as error:
                if not self._dropped(listener, error):
                    raise

    def on_own_step(self, step: StepRecord) -> None:
        """Tell those who act, before the next step begins: what the other ranks say of this one is not known yet."""
        self._tell(self._own_step, step)

    def on_epoch(self, epoch: EpochRecord) -> None:
        """Tell all of one epoch."""
        self._tell(self._epoch, epoch)

    def on_checkpoint(self, path: str, step: int) -> None:
        """Tell all of one checkpoint."""
        self._tell(self._checkpoint, path, step)

    def on_run_end(self, record: RunRecord) -> None:
        """Tell all that the run is over; every listener hears it before the first error is raised."""
        first: Exception | None = None
        for target in self._run_end:
            try:
                self._tell((target,), record)
            except Exception as error:
                first = first or error
        if first is not None:
            raise first

    def _tell(self, targets: Iterable[_Target], *arguments: object) -> None:
        for listener, call in targets:
            try:
                call(*arguments)
            except Exception as error:
                if not self._dropped(listener, error):
                    raise

    def _collect(self) -> None:
        """Look up once which listeners override what: a step then costs one call for each that cares."""
        self._run_start = self._overriding("on_run_start")
        self._batch_end = self._overriding("on_batch_end")
        told = self._overriding("on_step")
        self._step = tuple(item for item in told if id(item[0]) not in self._acting)
        self._own_step = tuple(item for item in told if id(item[0]) in self._acting)
        self._epoch = self._overriding("on_epoch")
        self._checkpoint = self._overriding("on_checkpoint")
        self._run_end = self._overriding("on_run_end")

    def _overriding(self, name: str) -> tuple[_Target, ...]:
        base = getattr(Listener, name)
        found = ((listener, getattr(listener, name, None)) for listener in self._listeners)
        return tuple(
            (listener, call)
            for listener, call in found
            if callable(call) and getattr(call, "__func__", None) is not base
        )

    def _dropped(self, listener: Listener, error: Exception) -> bool:
        """Drop a listener that only watches and has failed; False for one whose errors must be seen."""
        if not getattr(listener, "must_not_break_training", False):
            return False
        if any(item is listener for item in self._listeners):
            self.notes.append(f"{type(listener).__name__} was dropped: {type(error).__name__}: {error}")
            self._listeners = tuple(item for item in self._listeners if item is not listener)
            self._collect()
        return True
