"""torch.compile for a run: which mode, how long it took, and whether it had to be done again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from frameworm.config.schema import GPUConfig
from frameworm.observe.clocks.compiling import compilation_since, compilations_so_far
from frameworm.records.schema import Compilation


class Compiler:
    """Compiles the model of one run and keeps count.

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

    def apply(self, model: nn.Module) -> None:
        """Let the model be compiled at its first call."""
        if self.enabled:
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
