"""How the training loop reports events without knowing its listeners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from frameworm.records.schema import EpochRecord, RunRecord, StepRecord

EVENTS = {  # number of arguments of each event
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
    """Base class for everything that follows a run; each method does nothing unless overridden.

    Attributes:
        must_not_break_training: True for listeners that only watch. If one of these raises, it is dropped with a note
            and training continues; errors of other listeners reach the training loop.
        trainer: The `Trainer` that this callback was given to; None for other listeners.
    """

    must_not_break_training: ClassVar[bool] = False
    trainer: Any = None

    def on_run_start(self, record: RunRecord) -> None:
        """Called when the run is about to take its first step."""

    def on_batch_end(self, trainer: Any, batch: Any, outputs: Any, loss: Any) -> None:
        """Called for each micro-batch when its step is done on this rank, before the next step begins.

        Args:
            trainer: Has `model`, `optimizer` and `stop()`.
            batch: The batch as the loader returned it, on the device.
            outputs: What the model returned, without gradients; None if `loss_fn(model, batch)` calls the model, or if
                the model returns only its loss.
            loss: On the device, without gradients. Reading its value waits for the device.
        """

    def on_step(self, step: StepRecord) -> None:
        """Called when a step of this rank is complete. It runs on every step, so keep it cheap."""

    def on_epoch(self, epoch: EpochRecord) -> None:
        """Called when an epoch and its validation are complete."""

    def on_checkpoint(self, path: str, step: int) -> None:
        """Called when a checkpoint of the state after `step` is durable at `path`."""

    def on_run_end(self, record: RunRecord) -> None:
        """Called when the run is over for any reason; see `record.status`."""


class Events(Listener):
    """Passes each event to every listener, in order. Without listeners it does nothing, so the loop need not check.

    Args:
        listeners: The listeners. Only methods that a listener overrides are called; a listener that does not inherit
            from `Listener` needs only the methods it wants.
        acting: Those of them that may act on the training, and get each step at once (`on_own_step`).

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
        """True if any listener overrides `on_batch_end`; otherwise batches and outputs need not be kept."""
        return bool(self._batch_end)

    @property
    def listeners(self) -> Sequence[Listener]:
        """The listeners that have not been dropped."""
        return self._listeners

    def on_run_start(self, record: RunRecord) -> None:
        """Tell all listeners that the run begins."""
        self._tell(self._run_start, record)

    def on_batch_end(self, trainer: Any, batch: Any, outputs: Any, loss: Any) -> None:
        """Tell all listeners about one micro-batch."""
        self._tell(self._batch_end, trainer, batch, outputs, loss)

    def on_step(self, step: StepRecord) -> None:
        """Tell all listeners except the acting ones about one step."""
        for listener, call in self._step:
            try:
                call(step)
            except Exception as error:
                if not self._dropped(listener, error):
                    raise

    def on_own_step(self, step: StepRecord) -> None:
        """Tell the acting listeners about a step before the next one begins; other ranks' data is not known yet."""
        self._tell(self._own_step, step)

    def on_epoch(self, epoch: EpochRecord) -> None:
        """Tell all listeners about one epoch."""
        self._tell(self._epoch, epoch)

    def on_checkpoint(self, path: str, step: int) -> None:
        """Tell all listeners about one checkpoint."""
        self._tell(self._checkpoint, path, step)

    def on_run_end(self, record: RunRecord) -> None:
        """Tell all listeners that the run is over, before raising the first error of any of them."""
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
        """Find the overridden methods once, so that each event only calls the listeners that want it."""
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
        """Drop a failed listener that only watches; return False for one whose errors must reach the loop."""
        if not getattr(listener, "must_not_break_training", False):
            return False
        if any(item is listener for item in self._listeners):
            self.notes.append(f"{type(listener).__name__} was dropped: {type(error).__name__}: {error}")
            self._listeners = tuple(item for item in self._listeners if item is not listener)
            self._collect()
        return True
