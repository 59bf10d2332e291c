"""torch.compile for a run: in which mode, how long it took, and whether it recompiled."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from frameworm.config.schema import GPUConfig
from frameworm.data.prefetch import tensors_in
from frameworm.models.blocks import CONTAINERS, alike, find_block_classes
from frameworm.observe.clocks.compiling import compilation_since, compilations_so_far
from frameworm.records.schema import Compilation
from frameworm.torch_private import compiler
from frameworm.torch_private.compiler import options_of, patched_settings, recompile_limit
from frameworm.torch_private.modules import compiled_call, plain_call, pre_hooks, set_compiled_call
from frameworm.torch_private.names import COMPILER_FAILURES

log = logging.getLogger("frameworm")


_numbers = itertools.count()


class Compiler:
    """Compiles the model of one run and counts compilations.

    Attributes:
        note: Why the model was not compiled, or not as asked; None if it was.

    Args:
        gpu: The settings. Deterministic mode forbids choosing kernels by timing them.
        captured: Whether the whole step is captured as a graph; if so, the compiler records none of its own.
    """

    def __init__(self, gpu: GPUConfig, *, captured: bool) -> None:
        self.enabled = gpu.compile_model
        self.mode: str | None = gpu.compile_mode
        if self.mode == "default" or (self.mode == "max-autotune" and gpu.deterministic):
            self.mode = None
        elif captured:
            self.mode = "max-autotune-no-cudagraphs" if self.mode == "max-autotune" else None
        self._scope = gpu.compile_scope
        self._combines = gpu.combine_kernels
        self._earlier = 0
        self._compiled: list[nn.Module] = []
        self._settings: dict[str, Any] = {}
        self.note: str | None = None

    def apply(self, model: nn.Module) -> None:
        """Set up the model, or the blocks it repeats, to be compiled at the first call."""
        if not self.enabled:
            return
        self._earlier = compilations_so_far()
        kinds = [alike(blocks) for blocks in find_block_classes(model)] if self._scope == "blocks" else []
        groups = [group for kind in kinds for group in kind]
        for group in groups:
            compiled = self._compile(type(group[0]).__name__)
            for block in group:
                self._set(block, functools.partial(compiled, plain_call(block)))
        if groups:
            # Numbers that differ between blocks, such as a layer's index, become inputs of one shared graph. Blocks
            # that differ in other ways, such as the cache entry they fill, may each need their own graph.
            most = recompile_limit() + max(map(len, groups))
            self._settings.update(allow_unspec_int_on_nn_module=True, recompile_limit=most)
            callers = _callers(model, [block for group in groups for block in group])
            if model in callers:
                return  # the compiler cannot break a graph in the middle of a loop, and skips the whole forward
            for caller in callers:
                # The compiler ignores `_compiled_call_impl` unless the module has a hook.
                if _stay_outside not in pre_hooks(caller):
                    caller.register_forward_pre_hook(_stay_outside)
                self._set(caller, torch.compiler.disable(plain_call(caller)))
        elif self._scope == "blocks":
            self.note = f"gpu.compile_scope: {type(model).__name__} repeats no block, so it was compiled as a whole"
            log.warning("%s", self.note)
        self._set(model, functools.partial(self._compile(type(model).__name__), plain_call(model)))

    def _compile(self, name: str) -> Callable[..., Any]:
        """Return a compiled function that makes a call; everything called through it shares its graphs."""
        # Like model.compile(), but from a frame of our own: the compiler skips torch's files, so an nn.Sequential would
        # not be compiled at all. The compiler stores graphs, their limit and what it learned about sizes per code
        # object and name.
        code = _call.__code__.replace(co_name=f"{name}_{next(_numbers)}")
        call = types.FunctionType(code, globals())
        if not self._combines:
            return torch.compile(call, mode=self.mode)
        options = options_of(self.mode) if self.mode else {}
        return torch.compile(call, options={**options, "combo_kernels": True})

    def _set(self, module: nn.Module, call: Callable[..., Any]) -> None:
        set_compiled_call(module, call)
        self._compiled.append(module)

    def keep_graphs_whole(self) -> None:
        """Do not split graphs where DDP's buckets end; to be called where nothing is sent during backward."""
        self._settings["optimize_ddp"] = False

    @contextlib.contextmanager
    def eager_if_it_fails(self) -> Iterator[None]:
        """If compilation fails in this context, run the model eagerly, starting with the call that failed."""
        if not self.enabled:
            yield
            return
        torch_log = logging.getLogger(COMPILER_FAILURES)
        torch_log.addFilter(self._take_failure)
        try:
            # torch runs eagerly what it could not compile, without running anything twice, and logs the error.
            with patched_settings(suppress_errors=True, **self._settings):
                yield
        finally:
            torch_log.removeFilter(self._take_failure)

    def _take_failure(self, record: logging.LogRecord) -> bool:
        """Filter torch's log: replace its long report of a failed compilation by one line."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        if self._compiled:
            for module in self._compiled:
                set_compiled_call(module, None)
            self._compiled.clear()
            cause = getattr(error, "inner_exception", None) or error
            reason = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
            self.note = f"torch.compile failed, and training continued eagerly: {reason}"
            log.warning("%s", self.note)
        return False

    def uncompiled(self) -> AbstractContextManager[object]:
        """Run the model eagerly in this context, for batches too few to be worth another compilation."""
        return torch.compiler.set_stance("force_eager") if self.enabled else contextlib.nullcontext()

    def record(self) -> Compilation | None:
        """Return what the compiler did in this run; None if compilation is off."""
        return compilation_since(self._earlier) if self.enabled else None


def compiled_around(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any] | None:
    """Wrap another call so that it shares the graphs of the module's compiled call; None if that is not compiled."""
    own = compiled_call(module)
    return functools.partial(own.func, call) if isinstance(own, functools.partial) else None


def sizes_of(batches: Iterable[Any]) -> list[tuple[torch.Size, ...]]:
    """Return the sizes of the tensors in each batch."""
    return [tuple(tensor.shape for tensor in tensors_in(batch)) for batch in batches]


def mark_varying(earlier: list[tuple[torch.Size, ...]], batches: Sequence[Any]) -> None:
    """Tell the compiler which sizes of these batches differ between them or from earlier ones.

    Otherwise it compiles for the first sizes and then again for varying ones.

    Args:
        earlier: The sizes of earlier batches, from `sizes_of`.
        batches: The batches that the compiler is about to see.
    """
    for kinds, *tensors in zip(zip(*earlier, *sizes_of(batches)), *map(tensors_in, batches)):
        if len({len(size) for size in kinds}) > 1:
            continue
        for dimension, sizes in enumerate(zip(*kinds)):
            if len(set(sizes)) > 1:
                for tensor in tensors:
                    compiler.mark_varying(tensor, dimension)


def _call(call: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    return call(*inputs, **named)


def _stay_outside(_module: nn.Module, _inputs: Any) -> None:
    """Do nothing: the compiler respects a module's compiled call only if the module has a hook."""


def _callers(model: nn.Module, blocks: Collection[nn.Module]) -> set[nn.Module]:
    """Find the modules whose own forward calls the blocks."""
    found: set[nn.Module] = set()
    waiting = [(model, model)]
    while waiting:
        module, caller = waiting.pop()
        for child in module.children():
            if child in blocks:
                found.add(caller)
            else:
                waiting.append((child, caller if isinstance(child, CONTAINERS) else child))
    return found
