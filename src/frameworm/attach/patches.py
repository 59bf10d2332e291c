"""Attributes of torch and other libraries, replaced by wrappers and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

_Function = Callable[..., Any]

_MISSING = object()


class Patches:
    """Attributes that were replaced, to be put back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, wrap: Callable[[_Function], _Function]) -> None:
        """Replace an attribute by a wrapper around it; one that does not exist is left alone."""
        found = getattr(owner, name, None)
        if found is None:
            return
        wrapper = keep_compiler_out(wrap(found))
        own = vars(owner).get(name, _MISSING) if isinstance(owner, type) else found
        self._before.append((owner, name, own))
        setattr(owner, name, wrapper)

    def undo_by(self, undo: Callable[[], None]) -> None:
        """Something else was changed, which this call takes back."""
        self._undo.append(undo)

    def remove(self) -> None:
        """Put everything back as it was."""
        while self._undo:
            self._undo.pop()()
        while self._before:
            owner, name, found = self._before.pop()
            if found is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, found)


def keep_compiler_out(function: _Function, *, also_of_calls: bool = False) -> _Function:
    """Let torch.compile run a function's frame as it is instead of compiling it.

    All calls of all models go through one wrapper; compiled, it would be recompiled for each of them. What a
    wrapper calls may be the script's own work, which is to be compiled.

    Args:
        also_of_calls: The same for everything the function calls.
    """
    # torch's own way to say so would import all of the compiler.
    with contextlib.suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame as tracer

        action = tracer._FrameAction
        strategy = tracer._FrameExecStrategy(action.SKIP, action.SKIP if also_of_calls else action.DEFAULT)
        tracer.set_code_exec_strategy(function.__code__, strategy)
    return function
