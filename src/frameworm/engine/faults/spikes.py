"""Detect a loss that jumps up and stays up, on all ranks at the same step, and roll back if the config says so."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from math import isfinite
from statistics import median

from frameworm.engine.checkpoint.load import SavedState, load_newest
from frameworm.engine.checkpoint.store import CheckpointStore
from frameworm.engine.checkpoint.training_state import TrainingState
from frameworm.errors import BadNumbersError
from frameworm.parallel.shards import loaded

log = logging.getLogger("frameworm")

LOOK_EVERY = 16  # steps; each check waits once for the device and the other ranks
HISTORY = 128
FEWEST = 32
DEVIATIONS = 8.0
FACTOR = 1.5
IN_A_ROW = 3
MOST_ROLLBACKS = 3


def spike_begins(history: list[float], recent: list[float]) -> int | None:
    """Index in `recent` where the loss rises far above its history for at least `IN_A_ROW` steps, if it does.

    Args:
        history: Losses of earlier, ordinary steps.
        recent: The losses since then, in order; a non-finite loss counts as far above.
    """
    if len(history) < FEWEST:
        return None
    usual = median(history)
    spread = 1.4826 * median(abs(value - usual) for value in history)
    limit = max(usual + DEVIATIONS * spread, usual + (FACTOR - 1) * abs(usual))
    row = 0
    for place, value in enumerate(recent):
        row = 0 if isfinite(value) and value <= limit else row + 1
        if row == IN_A_ROW:
            return place - IN_A_ROW + 1
    return None


class SpikeWatch:
    """Collects this rank's losses and checks those of all ranks together every few steps.

    Args:
        sum_over_ranks: Sums numbers over the ranks.
        roll_back: Restores the model of the newest checkpoint and returns its step, or None if there is none. If not
            given, spikes are only reported.
    """

    def __init__(
        self,
        sum_over_ranks: Callable[[list[float]], list[float]],
        roll_back: Callable[[], int | None] | None = None,
    ) -> None:
        self._sum_over_ranks = sum_over_ranks
        self._roll_back = roll_back
        self._waiting: list[tuple[int, float, float]] = []
        self._history: deque[float] = deque(maxlen=HISTORY)
        self._open: list[tuple[int, float]] = []  # recent steps that may be the start of a spike
        self._rollbacks = 0
        self._told_at = 0
        self.notes: list[str] = []

    def add(self, step: int, loss: float | None, count: float | None) -> None:
        """Add one step of this rank."""
        weight = count or 0.0
        self._waiting.append((step, 0.0 if loss is None else loss * weight, weight))

    def due(self, step: int) -> bool:
        """Whether to check after this step; the same on all ranks."""
        return step % LOOK_EVERY == 0

    def look(self) -> None:
        """Check the steps since the last check. All ranks must call it at the same step, after adding all steps.

        Raises:
            BadNumbersError: If the loss jumps again after the last allowed rollback.
        """
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        sums = self._sum_over_ranks([value for _, loss, count in waiting for value in (loss, count)])
        for (step, _, _), loss_sum, count in zip(waiting, sums[::2], sums[1::2]):
            self._open.append((step, loss_sum / count if count else 0.0))
        losses = [loss for _, loss in self._open]
        place = spike_begins(list(self._history), losses)
        if place is None:
            # The last few may be the start of one.
            self._history.extend(value for value in losses[: -IN_A_ROW + 1] if isfinite(value))
            self._open = self._open[-IN_A_ROW + 1 :]
            return
        step, loss = self._open[place]
        self._history.extend(value for value in losses[:place] if isfinite(value))
        self._open = []
        self._act(step, loss)

    def _act(self, step: int, loss: float) -> None:
        text = f"the loss jumped to {loss:.4g} in step {step}, from {median(self._history):.4g}"
        if self._roll_back is None:
            if step > self._told_at + HISTORY or not self._told_at:
                self._note(text)
            self._told_at = step
            return
        if self._rollbacks == MOST_ROLLBACKS:
            raise BadNumbersError(
                f"{text}, after {MOST_ROLLBACKS} rollbacks; lower training.lr or training.clip_norm, or look at the "
                "samples of that step"
            )
        saved = self._roll_back()
        if saved is None:
            self._note(f"{text}; there is no checkpoint to go back to")
            return
        self._rollbacks += 1
        self._note(f"{text}; the model is that of step {saved} again, and training continues with the next samples")

    def _note(self, text: str) -> None:
        self.notes.append(text)
        log.warning("%s", text)


def make_spikes(
    on_spike: str,
    sum_over_ranks: Callable[[list[float]], list[float]],
    state: TrainingState,
    store: CheckpointStore | None,
) -> SpikeWatch | None:
    """Create the spike watch that a config asks for."""
    if on_spike == "off":
        return None

    def roll_back() -> int | None:
        if store is None:
            return None
        store.wait()
        newest = load_newest(store.folder, log.warning)
        return None if newest is None else put_back(state, newest[1], str(newest[0].path))

    return SpikeWatch(sum_over_ranks, roll_back if on_spike == "rollback" else None)


def put_back(state: TrainingState, saved: SavedState, where: str) -> int:
    """Load a checkpoint's values into the model and its optimizer, but keep the run's position.

    Returns:
        The step of the checkpoint.
    """
    shared = saved.shared
    state.load_values(shared, where)
    state.precision.load_state_dict(loaded(shared["precision"]))
    return int(shared["progress"]["step"])
