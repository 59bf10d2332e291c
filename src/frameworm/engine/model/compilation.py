"""torch.compile for a run: which mode, how long it took, and whether it had to be done again."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from frameworm.config.schema import GPUConfig
from frameworm.observe.clocks.compiling import compilation_since, compilations_so_far
from frameworm.records.schema import Compilation

log = logging.getLogger("frameworm")


class Compiler:
    """Compiles the model of one run and keeps count.

    Attributes:
        note: Why the model was not compiled after all, if so.

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
        self._combines = gpu.combine_kernels
        self._earlier = 0
        self._model: nn.Module | None = None
        self.note: str | None = None

    def apply(self, model: nn.Module) -> None:
        """Let the model be compiled at its first call."""
        if self.enabled:
            self._model = model
            self._earlier = compilations_so_far()
            # As model.compile() does it, but from a frame of ours: the compiler passes over torch's own files, so that
            # an nn.Sequential would not be compiled at all.
            call = _called(model._call_impl)
            if self._combines:
                # torch takes a mode or options, not both; a mode is a name for options.
                options = dict(torch._inductor.list_mode_options(self.mode)) if self.mode else {}
                model._compiled_call_impl = torch.compile(call, options={**options, "combo_kernels": True})
            else:
                model._compiled_call_impl = torch.compile(call, mode=self.mode)

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
            with torch._dynamo.config.patch(suppress_errors=True):
                yield
        finally:
            torch_log.removeFilter(self._take_failure)

    def _take_failure(self, record: logging.LogRecord) -> bool:
        """A filter of torch's log: says in one line what torch says in a hundred."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        if self.note is None and self._model is not None:
            self._model._compiled_call_impl = None
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


def _called(call: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*inputs: Any, **named: Any) -> Any:
        return call(*inputs, **named)

    return forward
