"""Replace attributes of torch and other libraries by wrappers, and restore them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from frameworm.torch_private.compiler import keep_compiler_out

_Function = Callable[..., Any]

_MISSING = object()


class Patches:
    """Records replaced attributes in order to restore them."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, wrap: Callable[[_Function], _Function]) -> None:
        """Replace an attribute by a wrapper around it; do nothing if it does not exist."""
        found = getattr(owner, name, None)
        if found is None:
            return
        wrapper = keep_compiler_out(wrap(found))
        own = vars(owner).get(name, _MISSING) if isinstance(owner, type) else found
        self._before.append((owner, name, own))
        setattr(owner, name, wrapper)

    def undo_by(self, undo: Callable[[], None]) -> None:
        """Register a function that undoes another change."""
        self._undo.append(undo)

    def remove(self) -> None:
        """Restore everything."""
        while self._undo:
            self._undo.pop()()
        while self._before:
            owner, name, found = self._before.pop()
            if found is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, found)
