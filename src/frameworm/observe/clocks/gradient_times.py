"""Notes when in backward each gradient is there, in a few steps of a run on one device.

The optimizer of many ranks waits for gradients that travel while backward goes on: how much of that hides follows from
these times. They are taken by hooks on the parameters, in some early steps only; the rest of the run has none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from frameworm.observe.clocks.phases import BACKWARD, FORWARD
from frameworm.records.gradients import GradientTime, GradientTimes

FIRST_STEP = 4  # the first ones pay for memory, threads and compiling
LAST_STEP = 10

Mark = Callable[[str], None]


class _Backward:
    """The moments of one backward."""

    __slots__ = ("begin", "end", "ready")

    def __init__(self, begin: Any) -> None:
        self.begin = begin
        self.end: Any = None
        self.ready: dict[int, Any] = {}


class GradientWatch:
    """Looks at the gradients of steps FIRST_STEP to LAST_STEP.

    Args:
        model: Whose parameters are trained.
        device: Where it computes: times are events on a GPU, and the host's clock on a CPU.
        marking: Sends the borders between the phases of a step elsewhere for a while.
        mark: Where they usually go.
        unseen: Why the times of this run cannot be seen; None if they can.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        marking: Callable[[Mark], AbstractContextManager[None]] | None = None,
        mark: Mark | None = None,
        unseen: str | None = None,
    ) -> None:
        self._marking = marking
        self._usual = mark
        self._all = list(model.parameters())
        self._parameters = [item for item in self._all if item.requires_grad]
        self._on_cuda = device.type == "cuda"
        self._unseen = unseen
        self._handles: list[Any] = []
        self._open = ExitStack()
        self._seen: list[_Backward] = []
        self._current: _Backward | None = None
        self.over = unseen is not None

    def before_step(self, number: int) -> None:
        """Keep what was seen of the last step; begin or end looking."""
        if self._current is not None:
            self._seen.append(self._current)
            self._current = None
        if FIRST_STEP <= number < LAST_STEP and not self._handles:
            self._begin()
        elif number >= LAST_STEP:
            self.stop()

    def _begin(self) -> None:
        assert self._marking is not None
        self._open.enter_context(self._marking(self._mark))
        # Some may have been frozen since the beginning, or are trained only now.
        self._parameters = [item for item in self._all if item.requires_grad]
        for index, parameter in enumerate(self._parameters):
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(index)))

    def _mark(self, name: str) -> None:
        assert self._usual is not None
        if name == BACKWARD and self._current is not None:
            self._current.end = self._now()
        self._usual(name)
        if name == FORWARD:  # of several micro-batches the last one stays
            self._current = _Backward(self._now())

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def there(parameter: torch.Tensor) -> None:
            if self._current is not None:
                self._current.ready[index] = self._now()

        return there

    def stop(self) -> None:
        """Look no longer."""
        self.over = True
        self._open.close()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _now(self) -> Any:
        if not self._on_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def result(self) -> GradientTimes:
        """What was seen; to be asked when the device has nothing left to do."""
        self.stop()
        whole = [item for item in self._seen if item.end is not None and len(item.ready) == len(self._parameters)]
        note = self._unseen
        if note is None and not whole:
            note = "some parameters had no gradient" if self._seen else f"the run had no step {FIRST_STEP + 1}"
        gradients = []
        for index, parameter in enumerate(self._parameters):
            ready_s = median(self._seconds(item.begin, item.ready[index]) for item in whole) if whole else None
            size_bytes = parameter.numel() * parameter.element_size()
            gradients.append(GradientTime(size_bytes, tuple(parameter.shape), ready_s))
        backward_s = median(self._seconds(item.begin, item.end) for item in whole) if whole else None
        return GradientTimes(tuple(gradients), len(whole), backward_s, note)

    def _seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) / 1e3 if self._on_cuda else end - begin)


def unseen_because(captured: bool, world_size: int, sharded: bool) -> str | None:
    """Why hooks would see nothing, or not what one device does."""
    if world_size > 1 or sharded:
        return "not a run on one device"
    if captured:
        return "steps are replayed as CUDA graphs"
    return None


def watched(watch: GradientWatch, before: Callable[[int], None]) -> Callable[[int], None]:
    """What the loop is to call before each step: `before`, and the watch until it is over."""

    def before_step(number: int) -> None:
        if not watch.over:
            watch.before_step(number)
        before(number)

    return before if watch.over else before_step
