"""Hooks for copies to a GPU, calls that make the host wait for it, and replays of CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from frameworm.attach.patches import Patches
from frameworm.attach.steps import GRAPH
from frameworm.attach.watch import Watch
from frameworm.observe.clocks.phases import TRANSFER
from frameworm.torch_private.compiler import keep_compiler_out

_Function = Callable[..., Any]

# Each reads a value on the host; whether that waits depends on the tensor's device.
READS = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__")


def install_device_hooks(patches: Patches, watch: Watch) -> None:
    """Watch copies from the host to a GPU, and waits for a GPU."""
    for function in (_transfer, _waiting, goes_to):
        keep_compiler_out(function)
    patches.set(torch.Tensor, "to", functools.partial(_to, watch))
    patches.set(torch.Tensor, "cuda", functools.partial(_to_cuda, watch))
    patches.set(torch.Tensor, "copy_", functools.partial(_copy, watch))
    for name in READS:
        patches.set(torch.Tensor, name, functools.partial(_read, watch))
    patches.set(torch.cuda, "synchronize", functools.partial(_synchronize, watch))


def install_graph_hooks(patches: Patches, watch: Watch) -> None:
    """Watch captures of CUDA graphs and their replays."""
    graph = torch.cuda.CUDAGraph
    patches.set(graph, "capture_begin", functools.partial(_capture_begin, watch))
    patches.set(graph, "capture_end", functools.partial(_capture_end, watch))
    patches.set(graph, "replay", functools.partial(_replay, watch))


def goes_to(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return the device type that the arguments of `Tensor.to` name, or None."""
    target = kwargs.get("device", args[0] if args else None)
    if isinstance(target, torch.device):
        return str(target.type)
    if isinstance(target, str):
        return target.partition(":")[0]
    if isinstance(target, int) and not isinstance(target, bool):
        return "cuda"
    other = kwargs.get("other", target)
    return str(other.device.type) if isinstance(other, torch.Tensor) else None


def _to(watch: Watch, original: _Function) -> _Function:
    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or not watch.active:
            return original(self, *args, **kwargs)
        if self.is_cuda:
            if goes_to(args, kwargs) == "cpu" and not kwargs.get("non_blocking"):
                return _waiting(watch, original, self, *args, **kwargs)
        elif goes_to(args, kwargs) == "cuda":
            return _transfer(watch, self, original, self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return to


def _to_cuda(watch: Watch, original: _Function) -> _Function:
    @functools.wraps(original)
    def cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or not watch.active or self.is_cuda:
            return original(self, *args, **kwargs)
        return _transfer(watch, self, original, self, *args, **kwargs)

    return cuda


def _copy(watch: Watch, original: _Function) -> _Function:
    @functools.wraps(original)
    def copy_(self: Any, *args: Any, **kwargs: Any) -> Any:
        source = args[0] if args else kwargs.get("src")
        if is_dynamo_compiling() or not watch.active or not isinstance(source, torch.Tensor):
            return original(self, *args, **kwargs)
        if self.is_cuda and source.is_cpu:
            return _transfer(watch, source, original, self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return copy_


def _transfer(watch: Watch, source: torch.Tensor, original: _Function, *args: Any, **kwargs: Any) -> Any:
    """Time a copy to the device; for unpinned memory the host takes part and waits."""
    if not watch.enter(TRANSFER):
        return original(*args, **kwargs)
    begin_s = perf_counter()
    try:
        return original(*args, **kwargs)
    finally:
        if torch.cuda.is_initialized() and not source.is_pinned():
            watch.spent("pageable_s", perf_counter() - begin_s)
        watch.leave()


def _read(watch: Watch, original: _Function) -> _Function:
    @functools.wraps(original)
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or not watch.active or not self.is_cuda:
            return original(self, *args, **kwargs)
        return _waiting(watch, original, self, *args, **kwargs)

    return read


def _synchronize(watch: Watch, original: _Function) -> _Function:
    @functools.wraps(original)
    def synchronize(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or not watch.active:
            return original(*args, **kwargs)
        return _waiting(watch, original, *args, **kwargs)

    return synchronize


def _waiting(watch: Watch, original: _Function, *args: Any, **kwargs: Any) -> Any:
    begin_s = perf_counter()
    try:
        return original(*args, **kwargs)
    finally:
        watch.spent("sync_s", perf_counter() - begin_s, "syncs")


def _capture_begin(watch: Watch, original: _Function) -> _Function:
    @functools.wraps(original)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        watch.graphs.begin(self)
        return result

    return capture_begin


def _capture_end(watch: Watch, original: _Function) -> _Function:
    @functools.wraps(original)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        finally:
            watch.graphs.end()

    return capture_end


def _replay(watch: Watch, original: _Function) -> _Function:
    @functools.wraps(original)
    def replay(self: Any) -> Any:
        if is_dynamo_compiling() or not watch.enter(GRAPH, starts=watch.graphs.find(self).trains):
            return original(self)
        try:
            return original(self)
        finally:
            watch.leave()
            watch.replayed(self)

    return replay
