"""torch.compile for a run: which mode, how long it took, and whether it had to be done again."""

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

log = logging.getLogger("frameworm")


_numbers = itertools.count()


class Compiler:
    """Compiles the model of one run and keeps count.

    Attributes:
        note: Why the model was not compiled after all, or not as asked, if so.

    Args:
        gpu: What was asked for. Deterministic mode forbids choosing kernels by timing them.
        captured: The whole step is recorded as a graph, so the compiler must not record graphs of its own.
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
        """Let the model, or the blocks it repeats, be compiled at the first call."""
        if not self.enabled:
            return
        self._earlier = compilations_so_far()
        kinds = [alike(blocks) for blocks in find_block_classes(model)] if self._scope == "blocks" else []
        groups = [group for kind in kinds for group in kind]
        for group in groups:
            compiled = self._compile(type(group[0]).__name__)
            for block in group:
                self._set(block, functools.partial(compiled, block._call_impl))
        if groups:
            # Numbers that differ from block to block, such as a layer's index, become inputs of the one graph. Blocks
            # that differ otherwise, such as in which entry of a cache they fill, may each need a graph of their own.
            most = torch._dynamo.config.recompile_limit + max(map(len, groups))
            self._settings = {"allow_unspec_int_on_nn_module": True, "recompile_limit": most}
            callers = _callers(model, [block for group in groups for block in group])
            if model in callers:
                return  # the compiler gives up a forward that leaves its graph in the middle of a loop
            for caller in callers:
                # The compiler passes over `_compiled_call_impl` unless the module has a hook.
                if _stay_outside not in caller._forward_pre_hooks.values():
                    caller.register_forward_pre_hook(_stay_outside)
                self._set(caller, torch.compiler.disable(caller._call_impl))
        elif self._scope == "blocks":
            self.note = f"gpu.compile_scope: {type(model).__name__} repeats no block, so it was compiled as a whole"
            log.warning("%s", self.note)
        self._set(model, functools.partial(self._compile(type(model).__name__), model._call_impl))

    def _compile(self, name: str) -> Callable[..., Any]:
        """A compiled function that makes a call; all that is called through it shares its graphs."""
        # As model.compile() does it, but from a frame of ours: the compiler passes over torch's own files, so that
        # an nn.Sequential would not be compiled at all. It keeps graphs, their limit and what it learned about sizes
        # by code object and name.
        code = _call.__code__.replace(co_name=f"{name}_{next(_numbers)}")
        call = types.FunctionType(code, globals())
        if not self._combines:
            return torch.compile(call, mode=self.mode)
        # torch takes a mode or options, not both; a mode is a name for options.
        options = dict(torch._inductor.list_mode_options(self.mode)) if self.mode else {}
        return torch.compile(call, options={**options, "combo_kernels": True})

    def _set(self, module: nn.Module, call: Callable[..., Any]) -> None:
        module._compiled_call_impl = call
        self._compiled.append(module)

    @contextlib.contextmanager
    def eager_if_it_fails(self) -> Iterator[None]:
        """Inside it, a model whose compilation fails runs as written, from the call that failed on."""
        if not self.enabled:
            yield
            return
        torch_log = logging.getLogger("torch._dynamo.convert_frame")
        torch_log.addFilter(self._take_failure)
        try:
            # torch runs as written what it could not compile, without running anything twice, and logs the error.
            with torch._dynamo.config.patch(suppress_errors=True, **self._settings):
                yield
        finally:
            torch_log.removeFilter(self._take_failure)

    def _take_failure(self, record: logging.LogRecord) -> bool:
        """A filter of torch's log: says in one line what torch says in a hundred."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        if self._compiled:
            for module in self._compiled:
                module._compiled_call_impl = None
            self._compiled.clear()
            cause = getattr(error, "inner_exception", None) or error
            reason = f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
            self.note = f"torch.compile failed, and training went on eagerly: {reason}"
            log.warning("%s", self.note)
        return False

    def uncompiled(self) -> AbstractContextManager[object]:
        """Inside it the model runs as written: for batches too few to be worth another compilation."""
        return torch.compiler.set_stance("force_eager") if self.enabled else contextlib.nullcontext()

    def record(self) -> Compilation | None:
        """What the compiler did in this run; None when it was not asked to."""
        return compilation_since(self._earlier) if self.enabled else None


def compiled_around(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any] | None:
    """Another call that shares the graphs of a module's own, as `Compiler` compiles it; None: it is not compiled."""
    own = module._compiled_call_impl
    return functools.partial(own.func, call) if isinstance(own, functools.partial) else None


def sizes_of(batches: Iterable[Any]) -> list[tuple[torch.Size, ...]]:
    """The sizes of the tensors in each batch."""
    return [tuple(tensor.shape for tensor in tensors_in(batch)) for batch in batches]


def mark_varying(earlier: list[tuple[torch.Size, ...]], batches: Sequence[Any]) -> None:
    """Tell the compiler which sizes of these batches differ between them or from earlier ones.

    It would find out by itself, by compiling for the first sizes and then once more.

    Args:
        earlier: The sizes of other batches, by `sizes_of`.
        batches: What the compiler is about to see.
    """
    for kinds, *tensors in zip(zip(*earlier, *sizes_of(batches)), *map(tensors_in, batches)):
        if len({len(size) for size in kinds}) > 1:
            continue
        for dimension, sizes in enumerate(zip(*kinds)):
            if len(set(sizes)) > 1:
                for tensor in tensors:
                    torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def _call(call: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    return call(*inputs, **named)


def _stay_outside(_module: nn.Module, _inputs: Any) -> None:
    """A hook that does nothing."""


def _callers(model: nn.Module, blocks: Collection[nn.Module]) -> set[nn.Module]:
    """The modules in whose own forward the blocks are called."""
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
