"""CUDA graphs that a script captures and replays: a replay calls no model, backward pass or optimizer."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any


class Captured:
    """What parts of a training step a graph contains.

    Attributes:
        trains: Whether it contains a backward pass or an optimizer step.
        updates: Whether it contains an optimizer step.
        optimizer: Returns that optimizer while it exists.
    """

    def __init__(self) -> None:
        self.trains = False
        self.updates = False
        self.optimizer: Callable[[], Any] = lambda: None


class Graphs:
    """Tracks captured graphs, and the one being captured.

    Attributes:
        capturing: The graph that calls are being recorded into, without running; None while calls run.
    """

    def __init__(self) -> None:
        self.capturing: Captured | None = None
        self._known: weakref.WeakKeyDictionary[Any, Captured] = weakref.WeakKeyDictionary()

    def begin(self, graph: Any) -> None:
        """Call when the capture of a graph has begun."""
        self.capturing = Captured()
        with contextlib.suppress(TypeError):  # a graph that cannot be a key is later treated as unknown
            self._known[graph] = self.capturing

    def end(self) -> None:
        """Call when the capture is over."""
        self.capturing = None

    def find(self, graph: Any) -> Captured:
        """Return what a graph contains; nothing if its capture was not observed."""
        with contextlib.suppress(TypeError):
            return self._known.get(graph) or Captured()
        return Captured()
