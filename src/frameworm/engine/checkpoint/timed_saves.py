"""Checkpoints by the clock: all ranks save after the same step."""

from __future__ import annotations

import time
from collections.abc import Callable

from frameworm.config.schema import CheckpointConfig
from frameworm.launch.stopping import StopAgreement, StopRequest


class TimedSaves:
    """Says when a checkpoint is due.

    Args:
        interval_s: Time between two.
        agreement: How the ranks agree; its like is made for every checkpoint.
        now: A clock.
    """

    def __init__(self, interval_s: float, agreement: StopAgreement, now: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._agreement = agreement
        self._now = now
        self._rounds = 0
        self._begin()

    def _begin(self) -> None:
        self._due_at = self._now() + self._interval_s
        self._request = StopRequest()
        self._round = self._agreement.for_another(self._request, f"save-{self._rounds}")
        self._rounds += 1

    def due(self, step: int) -> bool:
        """Whether to save before this step; asked once before every step, and the same on all ranks."""
        if self._now() >= self._due_at:
            self._request.ask("preempted")
        if self._round.stop_before(step) is None:
            return False
        self._begin()
        return True


def make_timed_saves(settings: CheckpointConfig, agreement: StopAgreement) -> TimedSaves | None:
    """What a config asks for."""
    return None if settings.every_minutes is None else TimedSaves(60 * settings.every_minutes, agreement)
