"""Find the thread of a script that trains.

A thread that loads or infers beside the training loop must not take its place: another thread is watched only if it
gives a stronger sign of training, or steps optimizers while the watched one is idle.
"""

from __future__ import annotations

import threading

from frameworm.observe.clocks.phases import BACKWARD

# Strength of a sign of training; phases other than these count 1.
_BACKWARD, _STEPS = 2, 3
# Optimizer steps in another thread, with no activity in the watched one, after which training has moved there.
MOVES_AFTER = 3


class TrainingThread:
    """The thread that is watched: initially the one that creates this object.

    Attributes:
        ident: Its identifier.
        sure: The strongest sign of training that it has given; 0 for none.
        others_train: Whether another thread has stepped an optimizer too.
        moves: How often training has moved to another thread.
    """

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self.sure = 0
        self.others_train = False
        self.moves = 0
        self._rests_at = -1
        self._steps_beside = 0

    def gave_sign(self, phase: str, steps: bool) -> None:
        """Note that the watched thread has begun a phase; `steps` marks an optimizer step."""
        if self.sure < _STEPS:
            self.sure = max(self.sure, _sign(phase, steps))

    def gives_way(self, phase: str, steps: bool, position: int | None) -> bool:
        """Whether to watch the current thread, which is not the watched one, from now on as it begins a phase.

        Args:
            phase: The phase that it begins.
            steps: Whether that is an optimizer step.
            position: Progress of the watched thread; None while it is in a phase.
        """
        if _sign(phase, steps) <= self.sure:
            if not steps:
                return False
            self.others_train = True
            if position is None or position != self._rests_at:
                self._rests_at, self._steps_beside = -1 if position is None else position, 0
            self._steps_beside += 1
            if self._steps_beside < MOVES_AFTER:
                return False
            self.moves += 1
            self.others_train = False
        self.ident, self.sure, self._rests_at = threading.get_ident(), 0, -1
        return True


def _sign(phase: str, steps: bool) -> int:
    return _STEPS if steps else _BACKWARD if phase == BACKWARD else 1
