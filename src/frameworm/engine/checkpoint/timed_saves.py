"""Timed checkpoints, and checkpoints delayed while storage is busy; all ranks save after the same step."""

from __future__ import annotations

import time
from collections.abc import Callable

from frameworm.config.schema import CheckpointConfig
from frameworm.engine.checkpoint.store import CheckpointStore
from frameworm.launch.stopping import StopAgreement, StopRequest


class TimedSaves:
    """Decides when a timed checkpoint is due.

    Args:
        interval_s: Time between checkpoints.
        agreement: How the ranks agree; a new one like it is created for every checkpoint.
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
        """Whether to save before this step; call once before every step. The same on all ranks."""
        if self._now() >= self._due_at:
            self._request.ask("preempted")
        if self._round.stop_before(step) is None:
            return False
        self._begin()
        return True


class SaveTurns:
    """Delays a save while storage is busy with the previous one.

    Storage counts as busy from the start of a save until the ranks have agreed on a step at which it is free on all of
    them. So every rank knows at any step what the others will do.

    Args:
        busy: Whether this rank's part of the last save is still being written.
        agreement: How the ranks agree; a new one like it is created for every save.
        put_off: Called with the seconds by which a save was late.
        now: A clock.
    """

    def __init__(
        self,
        busy: Callable[[], bool],
        agreement: StopAgreement,
        put_off: Callable[[float], None] = lambda late_s: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._busy = busy
        self._agreement = agreement
        self._put_off = put_off
        self._now = now
        self._rounds = 0
        self._round: StopAgreement | None = None  # how the ranks agree that storage is free; None while it is
        self._request = StopRequest()
        self._owed_since: float | None = None

    def started(self) -> None:
        """Call when a save begins; it also covers any save that was delayed."""
        if self._owed_since is not None:
            self._put_off(self._now() - self._owed_since)
        self._owed_since = None
        self._request = StopRequest()
        self._round = self._agreement.for_another(self._request, f"free-{self._rounds}")
        self._rounds += 1

    def admit(self) -> bool:
        """Whether a save that is due may start now; if not, `due` says when. The same on all ranks."""
        if self._round is not None and self._owed_since is None:
            self._owed_since = self._now()
        return self._round is None

    def due(self, step: int) -> bool:
        """Whether to make up for a delayed save before this step; call once before every step, on all ranks."""
        if self._round is None or (self._request.reason is None and self._busy()):
            return False
        self._request.ask("preempted")
        if self._round.stop_before(step) is None:
            return False
        self._round = None
        return self._owed_since is not None


def make_save_turns(settings: CheckpointConfig, store: CheckpointStore, agreement: StopAgreement) -> SaveTurns | None:
    """Create what a config asks for; None if training waits for storage."""
    skips = settings.when_busy == "skip" and settings.mode == "async"
    return SaveTurns(store.is_busy, agreement, store.was_put_off) if skips else None


def make_timed_saves(settings: CheckpointConfig, agreement: StopAgreement) -> TimedSaves | None:
    """Create what a config asks for; None without timed checkpoints."""
    return None if settings.every_minutes is None else TimedSaves(60 * settings.every_minutes, agreement)
