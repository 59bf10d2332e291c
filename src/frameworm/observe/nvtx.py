"""Named ranges around steps and phases, for Nsight Systems and for torch.profiler."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

import torch

from frameworm.observe.phases import BACKWARD, CHECKPOINT, DATA_WAIT, FORWARD, OPTIMIZER, OTHER, VALIDATION

REPLAY = "captured step"

# A phase is named when it ends and a range when it begins, so the name of the next one has to be foreseen.
_FOLLOWING = {
    DATA_WAIT: FORWARD,
    FORWARD: BACKWARD,
    BACKWARD: OPTIMIZER,
    OPTIMIZER: OTHER,
    REPLAY: OTHER,
    VALIDATION: OTHER,
    CHECKPOINT: OTHER,
    OTHER: DATA_WAIT,
}


class PhaseRanges:
    """Turns the ends of phases into ranges.

    A step that begins like the one before is taken to go on like it; else each phase is followed by its usual one. With
    changing numbers of micro-batches a range can thus have the wrong name: in a step that departs from the one before.

    Args:
        push: Opens a range of that name.
        pop: Closes the innermost.
        prefix: Stands before the name of each phase.
    """

    def __init__(self, push: Callable[[str], object], pop: Callable[[], object], prefix: str = "") -> None:
        self._push = push
        self._pop = pop
        self._prefix = prefix
        self._before: list[str] = []
        self._now: list[str] = []
        self._in_step = False
        self._open = False

    def begin(self) -> None:
        """A step begins."""
        self.pause()
        self._now = []
        self._in_step = True
        self._enter(self._before[0] if self._before else OTHER)

    def mark(self, name: str) -> None:
        """A phase is over, and another begins."""
        if not self._in_step:
            return
        self.pause()
        self._now.append(name)
        count = len(self._now)
        as_before = len(self._before) > count and self._before[:count] == self._now
        self._enter(self._before[count] if as_before else self._usual(name))

    def end_step(self) -> None:
        """The step is over."""
        if self._in_step:
            self._before = self._now
        self.end()

    def end(self) -> None:
        """No step any more: marks have no meaning until the next begins."""
        self._in_step = False
        self.pause()

    def pause(self) -> None:
        """Close the range that is open, if one is: up to the next mark nobody knows a name."""
        if self._open:
            self._open = False
            self._pop()

    def _usual(self, name: str) -> str:
        if name == OTHER and DATA_WAIT in self._now:
            return VALIDATION
        return _FOLLOWING.get(name, OTHER)

    def _enter(self, name: str) -> None:
        self._open = True
        self._push(f"{self._prefix}{name}")


def nvtx_functions() -> tuple[Callable[[str], object], Callable[[], object]] | None:
    """What opens and closes NVTX ranges; None without a CUDA device."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop


def nsys_command(argv: Sequence[str], output: str = "frameworm-nsys") -> str:
    """The line that runs a command under Nsight Systems, with its NVTX ranges.

    Args:
        argv: The command and its arguments, for instance `["frameworm", "train", "--config", "F"]`.
        output: Name of the report; `%q{RANK}` in it keeps the ranks of torchrun apart.
    """
    options = ["--trace=cuda,nvtx,osrt,cudnn,cublas", "--sample=none", "--cpuctxsw=none"]
    return shlex.join(["nsys", "profile", *options, "--force-overwrite=true", f"--output={output}", *argv])
