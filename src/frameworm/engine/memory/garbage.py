"""Keep Python's garbage collector from holding up steps: short collections, at the same steps on all ranks."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from types import TracebackType

EVERY_STEPS = 50
FULL_EVERY_STEPS = 1000
# Python 3.12 freezes a few hundred objects by itself; a heap frozen on purpose has many more.
OWN_FROZEN = 10_000
# Garbage that holds tensors may reach at most this fraction of the memory between collections.
MOST_GARBAGE = 0.02

_paused = False
_watches_forks = False


class Collector:
    """Shortens collections inside its context; outside, the collector is as the user has it.

    A full collection visits all objects of the process. With torch imported that takes as long as many small steps. So
    objects that exist when training begins are frozen, unless the user has frozen a heap.

    With several ranks collections would also come at a different moment on each, and all ranks wait for every one. Then
    Python's own schedule is off, and collections happen before steps whose numbers all ranks know: 1, 2, 4, ..., then
    every 50th, with a full collection every 1000th. If a collection frees much memory, the next ones come sooner.
    Objects created by the first steps (compilers, late imports) are frozen too, after 50 steps and then ever more
    rarely. One process on a CPU gained nothing from that and was rather slower (benchmarks/results/ablation-cpu.json).

    Args:
        enabled: If False, nothing is done at all; nor is it if the user has disabled the collector.
        between_steps: Whether to collect between steps only; otherwise Python's schedule stays on.
        held_bytes: Returns the memory in use, before and after a collection.
        total_bytes: Size of that memory.
    """

    def __init__(
        self,
        enabled: bool,
        between_steps: bool = True,
        held_bytes: Callable[[], int] | None = None,
        total_bytes: int = 0,
    ) -> None:
        self._enabled = enabled
        self._between_steps = between_steps
        self._held_bytes = held_bytes
        self._budget_bytes = int(total_bytes * MOST_GARBAGE)
        self._froze = False
        self._active = False
        self._every = EVERY_STEPS
        self._last = 0
        self._next = 0
        self._first: int | None = None
        self._settles_after = EVERY_STEPS
        self.note: str | None = None

    def __enter__(self) -> Collector:
        """Take over from Python's schedule."""
        global _paused
        if not self._enabled or not gc.isenabled():
            return self
        gc.collect()
        if gc.get_freeze_count() < OWN_FROZEN:
            gc.freeze()
            self._froze = True
        if self._between_steps:
            _enable_in_children()
            gc.disable()
            self._active = _paused = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore Python's schedule."""
        global _paused
        if self._active:
            gc.enable()
            self._active = _paused = False
        if self._froze:
            gc.unfreeze()
            self._froze = False

    @contextlib.contextmanager
    def at_leisure(self) -> Iterator[None]:
        """Use Python's own schedule during something long that has no steps."""
        if self._active:
            gc.enable()
        try:
            yield
        finally:
            if self._active:
                gc.disable()

    def before_step(self, number: int) -> None:
        """Collect if due; call before every step."""
        if number < self._next or not self._active:
            return
        if self._first is None:
            self._first = number
        before = self._held_bytes() if self._held_bytes is not None else 0
        full = number % FULL_EVERY_STEPS == 0
        settles = number - self._first >= self._settles_after - 1 and (full or self._settles_after == EVERY_STEPS)
        gc.collect(2 if full or settles else 1)
        if settles:
            self._settles_after = max(FULL_EVERY_STEPS, 2 * self._settles_after)
            if self._froze:
                gc.freeze()
        if self._held_bytes is not None and self._budget_bytes:
            self._adapt(number - self._last, before - self._held_bytes())
        self._last = number
        self._next = _next_moment(number, self._every)

    def _adapt(self, steps: int, freed_bytes: int) -> None:
        """Collect more often if garbage holds much memory."""
        if self._last and freed_bytes > 0:
            fitting = max(1, steps * self._budget_bytes // freed_bytes)
            if fitting < self._every:
                self._every = fitting
                self.note = (
                    f"objects that refer to each other held {freed_bytes / 2**20 / steps:,.0f} MiB more with every "
                    f"step: garbage is collected every {fitting} steps (break the cycles to save that)"
                )


def _next_moment(number: int, every: int) -> int:
    """Next multiple of `every`; before the first, 1, 2, 4, ..., to see early how much garbage there is."""
    regular = (number // every + 1) * every
    return min(regular, number * 2) if number < every else regular


def _enable_in_children() -> None:
    """Enable the collector in forked loader workers, which have no steps."""
    global _watches_forks
    if not _watches_forks and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_enable_in_child)
        _watches_forks = True


def _enable_in_child() -> None:
    global _paused
    if _paused:
        _paused = False
        gc.enable()
