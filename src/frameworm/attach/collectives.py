"""Measure how long a step waits for other ranks: in blocking calls, and in waits for earlier communication.

On a CPU a collective blocks its caller, either in the call or in the wait for its `Work`. On a GPU it runs in a stream.
If that is not the step's own stream, as under FSDP, the step waits when its stream waits for an event that was recorded
after the collective.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch.compiler import is_dynamo_compiling

from frameworm.attach.patches import Patches
from frameworm.attach.steps import COMMUNICATION
from frameworm.attach.watch import Watch
from frameworm.torch_private.compiler import keep_compiler_out

_Function = Callable[..., Any]

# Collectives that scripts and frameworks such as FSDP call; DDP itself measures those that it calls from C++.
COLLECTIVES = (
    *("all_reduce", "reduce", "broadcast", "barrier", "monitored_barrier"),
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "gather", "scatter"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    *("all_to_all", "all_to_all_single", "send", "recv"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
)


def install_collective_hooks(patches: Patches, watch: Watch) -> None:
    """Watch calls that wait for other ranks."""
    if not torch.distributed.is_available():
        return
    for function in (SideStreams.runs_here, SideStreams.follows, SideStreams.ends_wait):
        keep_compiler_out(function, also_of_calls=True)
    keep_compiler_out(_is_so)
    keep_compiler_out(_call_timed)
    side = SideStreams(watch)
    for owner in (torch.distributed, torch.distributed.distributed_c10d):
        for name in COLLECTIVES:
            patches.set(owner, name, functools.partial(_collective, watch, side))
    patches.set(torch.distributed.Work, "wait", functools.partial(wait_of, watch))
    patches.set(torch.cuda.Event, "record", functools.partial(_record, watch, side))
    patches.set(torch.cuda.Event, "wait", functools.partial(_wait_for_event, watch, side))


class SideStreams:
    """Tracks streams other than the step's own in which collectives run, and events recorded after those."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._streams: set[Any] = set()
        self._events: weakref.WeakSet[Any] = weakref.WeakSet()

    def runs_here(self) -> bool:
        """Whether a collective called now runs in a stream other than the step's own."""
        if self._watch.stream is None:
            return False
        current = torch.cuda.current_stream()
        if current == self._watch.stream:
            return False
        self._streams.add(current)
        return True

    def follows(self, event: Any, stream: Any) -> bool:
        """Whether an event recorded in a stream (the current one if None) comes after a collective."""
        if not self._streams:
            return False
        known = (torch.cuda.current_stream() if stream is None else stream) in self._streams
        (self._events.add if known else self._events.discard)(event)
        return known

    def ends_wait(self, event: Any, stream: Any) -> bool:
        """Whether the step itself waits for a collective when this stream waits for this event."""
        if not self._streams or event not in self._events:
            return False
        return bool((torch.cuda.current_stream() if stream is None else stream) == self._watch.stream)


def wait_of(watch: Watch, original: _Function) -> _Function:
    """Wrap a call that waits for communication started earlier."""

    @functools.wraps(original)
    def wait(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        return _call_timed(watch, True, original, *args, **kwargs)

    return wait


def _collective(watch: Watch, side: SideStreams, original: _Function) -> _Function:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or _is_so(watch, side.runs_here):
            return original(*args, **kwargs)
        return _call_timed(watch, False, original, *args, **kwargs)

    return call


def _record(watch: Watch, side: SideStreams, original: _Function) -> _Function:
    @functools.wraps(original)
    def record(self: Any, stream: Any = None) -> Any:
        result = original(self, stream)
        if not is_dynamo_compiling():
            _is_so(watch, side.follows, self, stream)
        return result

    return record


def _wait_for_event(watch: Watch, side: SideStreams, original: _Function) -> _Function:
    @functools.wraps(original)
    def wait(self: Any, stream: Any = None) -> Any:
        if is_dynamo_compiling() or not _is_so(watch, side.ends_wait, self, stream):
            return original(self, stream)
        return _call_timed(watch, True, original, self, stream)

    return wait


def _is_so(watch: Watch, question: Callable[..., bool], *args: Any) -> bool:
    """Answer a question; an internal error ends the observation."""
    try:
        return watch.active and question(*args)
    except Exception as error:
        watch.fail(error)
        return False


def _call_timed(watch: Watch, waits: bool, original: _Function, *args: Any, **kwargs: Any) -> Any:
    """Time a call as communication; `waits` marks a wait for communication started earlier."""
    if not watch.enter(COMMUNICATION):
        return original(*args, **kwargs)
    try:
        return original(*args, **kwargs)
    finally:
        watch.leave()
        if waits:
            watch.waited()
