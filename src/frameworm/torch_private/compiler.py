"""torch.compile: its settings, what it did, and functions it is to leave alone. Most of this imports the compiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from frameworm.torch_private.lookup import attribute

_Function = TypeVar("_Function", bound=Callable[..., Any])


def recompile_limit() -> int:
    """How many graphs torch makes of one piece of code before it gives up."""
    limit: int = attribute(torch._dynamo.config, "recompile_limit")
    return limit


def patched_settings(**settings: Any) -> AbstractContextManager[Any]:
    """Settings of the tracer for the length of a context."""
    made: AbstractContextManager[Any] = attribute(torch._dynamo.config, "patch")(**settings)
    return made


def allow_graphs_of_alike_modules(more: int) -> None:
    """Numbers that differ between alike modules become inputs of one graph, and so many graphs more are allowed."""
    config = torch._dynamo.config
    config.allow_unspec_int_on_nn_module = True
    config.recompile_limit = recompile_limit() + more


def draw_as_eager() -> AbstractContextManager[Any]:
    """In it compiled kernels are made to draw the random numbers that eager ones do."""
    import torch._inductor.config as config

    made: AbstractContextManager[Any] = config.patch(fallback_random=True)
    return made


def options_of(mode: str) -> dict[str, Any]:
    """The options that a mode of torch.compile stands for; torch takes a mode or options, not both."""
    import torch._inductor as inductor

    return dict(attribute(inductor, "list_mode_options")(mode))


def compile_package(program: Any, path: str) -> None:
    """Compile an exported program ahead of time into one file."""
    import torch._inductor as inductor

    attribute(inductor, "aoti_compile_and_package")(program, package_path=path)


def mark_varying(tensor: torch.Tensor, dimension: int) -> None:
    """Tell the compiler that a size will change, so that it does not compile for the first one alone."""
    attribute(torch._dynamo, "maybe_mark_dynamic")(tensor, dimension)


def compilations(keep: int | None = None) -> list[Any]:
    """What the compiler has noted about each compilation of this process.

    Args:
        keep: How many notes it is to keep from now on.
    """
    import torch._dynamo.utils as statistics

    if keep is not None:
        attribute(statistics, "set_compilation_metrics_limit")(keep)
    return list(attribute(statistics, "get_compilation_metrics")())


def known_to_compiler(function: _Function) -> _Function:
    """Have the compiler call a function once and take its answer as a constant.

    `torch.compiler.assume_constant_result` would import the compiler. Without the mark, graphs break at the function.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def keep_compiler_out(function: _Function, *, also_of_calls: bool = False) -> _Function:
    """Let torch.compile run a function's frame as it is; the public way would import all of the compiler.

    All calls of all models go through one wrapper; compiled, it would be recompiled for each of them. What a wrapper
    calls may be the user's own work, which is to be compiled.

    Where torch has no such switch any more, nothing is done: the function is compiled, and again for each caller.

    Args:
        also_of_calls: The same for everything the function calls.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame as tracer

        action = tracer._FrameAction
        strategy = tracer._FrameExecStrategy(action.SKIP, action.SKIP if also_of_calls else action.DEFAULT)
        tracer.set_code_exec_strategy(function.__code__, strategy)
    return function
