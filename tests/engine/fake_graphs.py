"""A recorder whose graphs run the recorded function again at every replay, and may err: for tests without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from frameworm.engine.step.graphs import CaptureError, Mark, RehearsalRecorder, Rehearsed, ReplaySample

CPU = torch.device("cpu")


class Again(Rehearsed):
    """Counts its replays, and adds an error to what it computes."""

    replays = 0
    error = 0.0

    def replay(self) -> None:
        self.replays += 1
        super().replay()
        self.output = self.output + self.error

    def sample(self) -> ReplaySample:
        return ReplaySample({"forward": 0.25, "backward": 0.75})


class FakeRecorder(RehearsalRecorder):
    def __init__(self, error: float = 0.0, fails: bool = False) -> None:
        super().__init__(CPU)
        self.graphs: list[Again] = []
        self._error = error
        self._fails = fails

    def record(self, function: Callable[[Mark], torch.Tensor]) -> Again:
        if self._fails:
            raise CaptureError("RuntimeError: not while capturing")
        made = Again(function, CPU)
        made.error = self._error
        self.graphs.append(made)
        return made
