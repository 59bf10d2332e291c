"""Records when each gradient becomes available in backward, in a few steps of a run on one device.

With many ranks the optimizer waits for gradients that are sent while backward goes on; these times predict how much of
that is hidden. They are taken by hooks on the parameters in some early steps; later steps have no overhead. If steps
are replayed as CUDA graphs, the first replays use a graph with such events in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from frameworm.observe.clocks.phases import BACKWARD, FORWARD
from frameworm.records.gradients import GradientTime, GradientTimes

FIRST_STEP = 4  # the first steps include allocation, thread start-up and compilation
LAST_STEP = 10
REPLAYS = 5  # replays of the graph that contains events

Mark = Callable[[str], None]


class _Backward:
    """The moments of one backward pass."""

    __slots__ = ("begin", "end", "ready")

    def __init__(self, begin: Any) -> None:
        self.begin = begin
        self.end: Any = None
        self.ready: dict[int, Any] = {}


class GradientWatch:
    """Records gradient times in steps FIRST_STEP to LAST_STEP.

    Args:
        model: The model that is trained.
        device: Its device: times are events on a GPU and the host's clock on a CPU.
        marking: Redirects the phase marks of a step while the watch is active.
        mark: Where the marks normally go.
        unseen: Why this run's times cannot be recorded; None if they can.
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
        """Store the last step's times; start or stop recording."""
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
        # Parameters may have been frozen or unfrozen since the beginning.
        self._parameters = [item for item in self._all if item.requires_grad]
        for index, parameter in enumerate(self._parameters):
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(index)))

    def _mark(self, name: str) -> None:
        assert self._usual is not None
        if name == BACKWARD and self._current is not None:
            self._current.end = self._now()
        self._usual(name)
        if name == FORWARD:  # with several micro-batches the last one is kept
            self._current = _Backward(self._now())

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def there(parameter: torch.Tensor) -> None:
            if self._current is not None:
                self._current.ready[index] = self._now()

        return there

    def stop(self) -> None:
        """Stop recording."""
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

    def take(self, begin: Any, end: Any, ready: dict[int, Any]) -> None:
        """Add a replayed backward pass; its events are read now, because the next replay records them again."""
        seen = _Backward(0.0)
        seen.end = self._seconds(begin, end)
        seen.ready = {index: self._seconds(begin, moment) for index, moment in ready.items()}
        self._seen.append(seen)

    def result(self) -> GradientTimes:
        """The recorded times; call it when the device is idle."""
        self.stop()
        whole = [item for item in self._seen if item.end is not None and len(item.ready) == len(self._parameters)]
        note = None if whole else self._unseen
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
        return float(end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3)


class ReplayedGradients:
    """Takes the same times inside a captured step, in its first replays.

    Args:
        watch: Receives the times.
    """

    def __init__(self, watch: GradientWatch) -> None:
        self._watch = watch
        self._begin: Any = None
        self._end: Any = None
        self._ready: dict[int, Any] = {}
        self._left = REPLAYS
        self._recording = False
        self._held: list[torch.cuda.Event] = []  # a graph does not keep its events alive

    @property
    def over(self) -> bool:
        """Whether enough replays were recorded."""
        return self._left <= 0

    @contextmanager
    def recorded(self, leaves: Iterable[tuple[int, torch.Tensor]]) -> Iterator[None]:
        """Record events into the graph that is captured in this block.

        Args:
            leaves: The tensors that receive gradients, each with the index of its parameter among the trained ones.
        """
        self._ready, self._recording = {}, True
        handles: list[Any] = [leaf.register_post_accumulate_grad_hook(self._hook(index)) for index, leaf in leaves]
        try:
            yield
        finally:
            self._recording = False
            for handle in handles:
                handle.remove()

    def marked(self, mark: Mark) -> Mark:
        """A mark that also notes where backward begins and ends; with several micro-batches the last one is kept."""

        def marking(name: str) -> None:
            if name == BACKWARD and self._recording:
                self._end = self._event()
            mark(name)
            if name == FORWARD and self._recording:
                self._begin = self._event()

        return marking

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def there(leaf: torch.Tensor) -> None:
            self._ready[index] = self._event()

        return there

    def _event(self) -> torch.cuda.Event:
        event = _event_in_graph()
        self._held.append(event)
        return event

    def read(self) -> None:
        """Wait for the last replay and read its events."""
        self._left -= 1
        self._end.synchronize()
        self._watch.take(self._begin, self._end, self._ready)


def _event_in_graph() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True, external=True)
    event.record()
    return event


def unseen_because(captured: bool, world_size: int, sharded: bool) -> str | None:
    """Why hooks would see nothing, or something other than a run on one device; None if they can be used."""
    if world_size > 1 or sharded:
        return "not a run on one device"
    if captured:
        return "steps are replayed as CUDA graphs"
    return None


def watched(watch: GradientWatch, before: Callable[[int], None]) -> Callable[[int], None]:
    """The function to call before each step: `before`, and the watch until it is done."""

    def before_step(number: int) -> None:
        if not watch.over:
            watch.before_step(number)
        before(number)

    return before if watch.over else before_step
