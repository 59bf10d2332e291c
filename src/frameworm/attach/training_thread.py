"""Which thread of a script trains.

What loads or infers beside a loop that trains must not take its place: a thread is watched instead of another one if it
gives a surer sign of training, or steps optimizers while the other one rests.
"""

from __future__ import annotations

import threading

from frameworm.observe.clocks.phases import BACKWARD

# How sure a sign is; any phase but these is one of 1.
_BACKWARD, _STEPS = 2, 3
# Optimizer steps in another thread, while nothing happens in the watched one, after which training has moved there.
MOVES_AFTER = 3


class TrainingThread:
    """The thread that is watched: at first the one that makes this.

    Attributes:
        ident: Its number.
        sure: The surest sign of training that it has given; 0 while there is none.
        others_train: Another thread has stepped an optimizer too.
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
        """The watched thread has begun a phase, which may be the step of an optimizer."""
        if self.sure < _STEPS:
            self.sure = max(self.sure, _sign(phase, steps))

    def gives_way(self, phase: str, steps: bool, position: int | None) -> bool:
        """Another thread, which is the current one, begins a phase: whether that one is watched from now on.

        Args:
            phase: What it begins.
            steps: That is the step of an optimizer.
            position: What the watched thread has come to; None while it is in a phase.
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
