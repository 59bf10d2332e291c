"""CUDA graphs that a script captures and replays itself: their replay calls no model, backward pass or optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from frameworm.attach.patches import Patches
from frameworm.attach.watch import Watch

_Function = Callable[..., Any]


def install_graph_hooks(patches: Patches, watch: Watch) -> None:
    """Watch what is captured into graphs, and their replays."""
    graph = torch.cuda.CUDAGraph
    patches.set(graph, "capture_begin", functools.partial(_capture_begin, watch))
    patches.set(graph, "capture_end", functools.partial(_capture_end, watch))
    patches.set(graph, "replay", functools.partial(_replay, watch))


def _capture_begin(watch: Watch, original: _Function) -> _Function:
    @functools.wraps(original)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        watch.capture_begins(self)
        return result

    return capture_begin


def _capture_end(watch: Watch, original: _Function) -> _Function:
    @functools.wraps(original)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            watch.capture_ends()

    return capture_end


def _replay(watch: Watch, original: _Function) -> _Function:
    @functools.wraps(original)
    def replay(self: Any) -> Any:
        if is_dynamo_compiling() or not watch.replay_begins(self):
            return original(self)
        try:
            return original(self)
        finally:
            watch.replayed(self)

    return replay
