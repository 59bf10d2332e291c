"""Hooks at the places in torch that any training loop must call.

Each wrapper calls the wrapped function with the same arguments and returns its result. While torch.compile traces,
wrappers are transparent: they are inlined to the plain call and leave nothing in the graph.
"""

from __future__ import annotations

import builtins
import functools
import logging
import types
import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.optim
import torch.utils.data.dataloader as dataloader
from torch.compiler import is_dynamo_compiling

from frameworm.attach.collectives import install_collective_hooks
from frameworm.attach.device_hooks import install_device_hooks, install_graph_hooks
from frameworm.attach.patches import Patches
from frameworm.attach.watch import Watch
from frameworm.observe.clocks.phases import BACKWARD, CHECKPOINT, DATA_WAIT, OPTIMIZER
from frameworm.torch_private.compiler import keep_compiler_out
from frameworm.torch_private.distributed import set_timing_rate, times_of
from frameworm.torch_private.loaders import any_iterator

_Function = Callable[..., Any]

_OURS = "_frameworm_watches"


def install(watch: Watch) -> Patches:
    """Hook torch to report to the watch.

    Returns:
        The patches; call `remove` to restore torch.
    """
    for method in vars(Watch).values():
        if isinstance(method, types.FunctionType):
            keep_compiler_out(method, also_of_calls=True)
    keep_compiler_out(_ask_replicas, also_of_calls=True)
    patches = Patches()
    try:
        _loaders(patches, watch)
        _models(patches, watch)
        _optimizers(patches, watch)
        install_collective_hooks(patches, watch)
        install_graph_hooks(patches, watch)
        patches.set(torch, "save", functools.partial(phase_of_its_own, watch, CHECKPOINT))
        patches.set(builtins, "print", functools.partial(_logging, watch))
        patches.set(logging.Logger, "handle", functools.partial(_logging, watch))
        if torch.version.cuda is not None or torch.version.hip is not None:
            install_device_hooks(patches, watch)
    except BaseException:
        patches.remove()
        raise
    return patches


def phase_of_its_own(watch: Watch, phase: str, original: _Function) -> _Function:
    """Wrap a call that is a phase of its own."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or not watch.enter(phase):
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            watch.leave()

    return call


def _logging(watch: Watch, original: _Function) -> _Function:
    # `frames` recognises output by the name of this function.
    @functools.wraps(original)
    def write_out(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        begin_s = perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            watch.spent("logging_s", perf_counter() - begin_s)

    return write_out


def _loaders(patches: Patches, watch: Watch) -> None:
    def iterate(original: _Function) -> _Function:
        @functools.wraps(original)
        def begin_pass(self: Any) -> Any:
            if not watch.enter(DATA_WAIT):
                return original(self)
            iterator = None
            try:
                iterator = original(self)
            finally:
                watch.passes_over(self, iterator)
            return iterator

        return begin_pass

    def advance(original: _Function) -> _Function:
        @functools.wraps(original)
        def fetch(self: Any) -> Any:
            if not watch.enter(DATA_WAIT):
                return original(self)
            try:
                batch = original(self)
            finally:
                watch.leave_fetch(self)
            watch.fetched(self, batch)
            return batch

        return fetch

    patches.set(dataloader.DataLoader, "__iter__", iterate)
    patches.set(any_iterator(), "__next__", advance)


def _models(patches: Patches, watch: Watch) -> None:
    replicas: weakref.WeakSet[Any] = weakref.WeakSet()

    def call_module(original: _Function) -> _Function:
        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return original(self, *args, **kwargs)
            if watch.busy:
                if watch.curious:
                    watch.look()
                return original(self, *args, **kwargs)
            if not watch.enter_module(self, args, kwargs):
                return original(self, *args, **kwargs)
            try:
                return original(self, *args, **kwargs)
            finally:
                watch.leave()
                if replicas:
                    _ask_replicas(replicas, watch)

        return call

    def make_replica(original: _Function) -> _Function:
        @functools.wraps(original)
        def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if watch.active:
                replicas.add(self)
                _ask_often(self, watch)

        return initialise

    patches.set(torch.nn.Module, "__call__", call_module)
    patches.set(torch.autograd, "backward", functools.partial(phase_of_its_own, watch, BACKWARD))
    patches.set(torch.autograd, "grad", functools.partial(phase_of_its_own, watch, BACKWARD))
    patches.set(torch.nn.parallel.DistributedDataParallel, "__init__", make_replica)


def _ask_often(replica: Any, watch: Watch) -> None:
    """Make DDP time every step instead of one in a hundred, if that needs no wait for a device."""
    try:
        from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]

        on_cpu = all(item.device.type == "cpu" for item in replica.parameters())
        # Otherwise DDP would print every one of them.
        quiet = get_debug_level() == DebugLevel.OFF
        if on_cpu and quiet:
            set_timing_rate(replica, 1)
        watch.facts["strategy"] = "ddp"
        watch.facts["gradient_bytes"] = sum(
            item.numel() * item.element_size() for item in replica.parameters() if item.requires_grad
        )
    except Exception as error:
        watch.notes.append(f"DDP's own times are not at hand: {type(error).__name__}: {error}")


def _ask_replicas(replicas: weakref.WeakSet[Any], watch: Watch) -> None:
    """Read the times that DDP has just recorded for its last reduced backward pass, if any."""
    if not watch.active:
        return
    try:
        for replica in list(replicas):
            data = times_of(replica)
            iteration = data.get("iteration")
            if iteration is None or iteration == watch.facts.get("ddp_iteration"):
                continue
            watch.facts["ddp_iteration"] = iteration
            end, computed = data.get("backward_comm_time_end", 0), data.get("backward_compute_time_end", 0)
            total = data.get("backward_comm_time", 0)
            if end > 0 and computed > 0:
                watch.communicated(total * 1e-9, max(0, end - computed) * 1e-9)
            elif total > 0:
                overlap = data.get("backward_compute_comm_overlap_time", 0)
                watch.communicated(total * 1e-9, max(0, total - overlap) * 1e-9)
    except Exception as error:
        replicas.clear()
        watch.notes.append(f"DDP's own times are not at hand: {type(error).__name__}: {error}")


def _optimizers(patches: Patches, watch: Watch) -> None:
    def begin(original: _Function) -> _Function:
        @functools.wraps(original)
        def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            _watch_class(patches, watch, type(self))

        return initialise

    patches.set(torch.optim.Optimizer, "__init__", begin)
    patches.set(torch.optim.Optimizer, "zero_grad", functools.partial(phase_of_its_own, watch, OPTIMIZER))
    patches.set(torch.nn.Module, "zero_grad", functools.partial(phase_of_its_own, watch, OPTIMIZER))
    clip = functools.partial(phase_of_its_own, watch, OPTIMIZER)
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            patches.set(owner, name, clip)
    scaler = torch.amp.GradScaler
    patches.set(scaler, "unscale_", functools.partial(phase_of_its_own, watch, OPTIMIZER))
    patches.set(scaler, "update", functools.partial(phase_of_its_own, watch, OPTIMIZER))
    # A scaler may skip the optimizer's step: it still counts as a step.
    patches.set(scaler, "step", functools.partial(_update, watch, 1))


def _watch_class(patches: Patches, watch: Watch, kind: type) -> None:
    """Watch the step of an optimizer class, outside torch's own wrapper."""
    found = getattr(kind, "step", None)
    if found is None or getattr(found, _OURS, None) is watch:
        return
    wrapper: Any = _update(watch, 0, found)
    setattr(wrapper, _OURS, watch)
    inner = getattr(found, "__wrapped__", None)
    if inner is not None:
        # When compiling a step, torch removes its own wrapper by following this attribute.
        wrapper.__wrapped__ = keep_compiler_out(_update(watch, 0, inner))
        setattr(wrapper.__wrapped__, _OURS, watch)
    patches.set(kind, "step", lambda _: wrapper)


def _update(watch: Watch, position: int, original: _Function) -> _Function:
    """Wrap a call that steps an optimizer, which is argument number `position`; a closure may follow it."""

    def counted(closure: _Function) -> _Function:
        @functools.wraps(closure, updated=())
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            watch.closure_begins()
            return closure(*args, **kwargs)

        return evaluate

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        if not watch.enter(OPTIMIZER, starts=True):
            result = original(*args, **kwargs)
            watch.update_captured(args[position] if len(args) > position else kwargs.get("optimizer"))
            return result
        try:
            watch.optimizer_begins()
            if len(args) > position + 1 and callable(args[position + 1]):
                closure = counted(args[position + 1])
                result = original(*args[: position + 1], closure, *args[position + 2 :], **kwargs)
            elif callable(kwargs.get("closure")):
                result = original(*args, **{**kwargs, "closure": counted(kwargs["closure"])})
            else:
                result = original(*args, **kwargs)
        finally:
            watch.leave()
        watch.optimizer_stepped(args[position] if len(args) > position else kwargs.get("optimizer"))
        return result

    return step
