"""CUDA graphs that a script captures and replays itself: their replay calls no model, backward pass or optimizer."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any


class Captured:
    """What a graph holds of a training step.

    Attributes:
        trains: A backward pass, or the step of an optimizer.
        updates: The step of an optimizer.
        optimizer: Returns that optimizer, while it exists.
    """

    def __init__(self) -> None:
        self.trains = False
        self.updates = False
        self.optimizer: Callable[[], Any] = lambda: None


class Graphs:
    """The graphs that were captured, and the one that is being captured.

    Attributes:
        capturing: Calls are put into this graph now, and nothing runs; None while they run.
    """

    def __init__(self) -> None:
        self.capturing: Captured | None = None
        self._known: weakref.WeakKeyDictionary[Any, Captured] = weakref.WeakKeyDictionary()

    def begin(self, graph: Any) -> None:
        """The capture of a graph has begun."""
        self.capturing = Captured()
        with contextlib.suppress(TypeError):  # one that cannot be looked up is replayed as an unknown one
            self._known[graph] = self.capturing

    def end(self) -> None:
        """The capture is over."""
        self.capturing = None

    def find(self, graph: Any) -> Captured:
        """What a graph holds; nothing that is known, if nobody saw its capture."""
        with contextlib.suppress(TypeError):
            return self._known.get(graph) or Captured()
        return Captured()
