"""Named ranges around steps and phases, for Nsight Systems and for torch.profiler."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

import torch

from frameworm.observe.clocks.phases import BACKWARD, CHECKPOINT, DATA_WAIT, FORWARD, OPTIMIZER, OTHER, VALIDATION

REPLAY = "captured step"
STEP = "step"
EPOCH = "epoch"

# A mark names a phase when it ends, but a range needs its name when it begins, so the next phase must be predicted.
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

    A step that begins like the previous one is assumed to continue like it; otherwise each phase is followed by its
    usual successor. If the number of micro-batches changes, a range can therefore have the wrong name in the first such
    step.

    Args:
        push: Opens a range with a name.
        pop: Closes the innermost range.
        prefix: Prepended to the name of each phase.
        around: Name of a range around each step; None: no such range.
        epoch: Name of a range around each epoch, including its validation; None: no such range.
    """

    def __init__(
        self,
        push: Callable[[str], object],
        pop: Callable[[], object],
        prefix: str = "",
        around: str | None = None,
        epoch: str | None = None,
    ) -> None:
        self._push = push
        self._pop = pop
        self._prefix = prefix
        self._around = around
        self._epoch = epoch
        self._in_epoch = False
        self._before: list[str] = []
        self._now: list[str] = []
        self._in_step = False
        self._open = False

    def begin_epoch(self) -> None:
        """Begin an epoch, ending the previous one."""
        self.end_epoch()
        if self._epoch is not None:
            self._in_epoch = True
            self._push(self._epoch)

    def end_epoch(self) -> None:
        """End the step and the epoch."""
        self.end()
        if self._in_epoch:
            self._in_epoch = False
            self._pop()

    def begin(self) -> None:
        """Begin a step."""
        self.end()
        self._now = []
        self._in_step = True
        if self._around is not None:
            self._push(self._around)
        self._enter(self._before[0] if self._before else OTHER)

    def mark(self, name: str) -> None:
        """End a phase and begin the next."""
        if not self._in_step:
            return
        self.pause()
        self._now.append(name)
        count = len(self._now)
        as_before = len(self._before) > count and self._before[:count] == self._now
        self._enter(self._before[count] if as_before else self._usual(name))

    def end_step(self) -> None:
        """End the step normally, and remember its phases."""
        if self._in_step:
            self._before = self._now
        self.end()

    def end(self) -> None:
        """End the step; marks are ignored until the next one begins."""
        self.pause()
        if self._in_step and self._around is not None:
            self._pop()
        self._in_step = False

    def pause(self) -> None:
        """Close the open range, if any; the name of the time up to the next mark is unknown."""
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


class LiveRanges:
    """Ranges around the phases and steps of a loop that does not say where its steps end.

    After an optimizer step, the next fetched batch or model call ends the step's range; so a validation between two
    steps belongs to the second.

    Args:
        push: Opens a range with a name.
        pop: Closes the innermost range.
        ready: Returns whether there is a device to create ranges for yet.
    """

    def __init__(
        self, push: Callable[[str], object], pop: Callable[[], object], ready: Callable[[], bool] = lambda: True
    ) -> None:
        self._push = push
        self._pop = pop
        self._ready = ready
        self._named: list[bool] = []  # for each phase in progress: whether it has a range
        self._in_step = False
        self._stepped = False

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        ready = self._ready()
        if ready and not self._named:
            self._outermost(phase)
        self._named.append(ready)
        if ready:
            self._push(phase)

    def leave(self) -> None:
        """End the innermost phase."""
        if self._named and self._named.pop():
            self._pop()

    def stepped(self) -> None:
        """Note that an optimizer has stepped."""
        self._stepped = True

    def close(self) -> None:
        """Close all open ranges."""
        while self._named:
            self.leave()
        if self._in_step:
            self._in_step = False
            self._pop()

    def _outermost(self, phase: str) -> None:
        if self._stepped and phase in (DATA_WAIT, FORWARD, BACKWARD):
            self.close()
        if not self._in_step:
            self._in_step = True
            self._stepped = False
            self._push(STEP)


def nvtx_functions() -> tuple[Callable[[str], object], Callable[[], object]] | None:
    """The functions that open and close NVTX ranges; None without a CUDA device."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop


def nsys_command(argv: Sequence[str], output: str = "frameworm-nsys") -> str:
    """The command line that runs a command under Nsight Systems, with its NVTX ranges.

    Args:
        argv: The command and its arguments, for instance `["frameworm", "train", "--config", "F"]`.
        output: Name of the report; `%q{RANK}` in it gives each rank of torchrun its own.
    """
    options = ["--trace=cuda,nvtx,osrt,cudnn,cublas", "--cuda-memory-usage=true", "--sample=none", "--cpuctxsw=none"]
    return shlex.join(["nsys", "profile", *options, "--force-overwrite=true", f"--output={output}", *argv])
