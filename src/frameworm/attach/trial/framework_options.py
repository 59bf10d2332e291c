"""Set options of training frameworks where a script creates the object that takes them.

Trainer's arguments, Lightning's Trainer, Fabric and Accelerator have options for much of what is otherwise set in
torch. An object gets the options that its script has not passed; where it is created and what the script passes is
recorded.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from frameworm.attach.frames import FrameReader
from frameworm.attach.framework import LOOPS
from frameworm.attach.patches import Patches
from frameworm.attach.script import AfterImport

_Function = Callable[..., Any]
_OURS = "_frameworm_options"


@dataclasses.dataclass
class _Made:
    """An object that takes options: its class, the script's line or the library that creates it, and its arguments."""

    kind: type
    line: int | None
    maker: str | None
    given: set[str] = dataclasses.field(default_factory=set)


class FrameworkOptions:
    """Sets options, and records where the objects that take them are created.

    Args:
        script: The file whose lines are recorded.
        options: Options by class.
    """

    def __init__(self, script: str, options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._script = script
        self._options = options or {}
        self._frames = FrameReader(script)
        self._seen: list[_Made] = []

    def watch(self, patches: Patches) -> list[AfterImport]:
        """Watch the classes of frameworks as soon as the script imports them.

        Returns:
            Import hooks to `disarm` at the end.
        """
        finders = [
            AfterImport(module, functools.partial(self._follow, patches, module, name))
            for module, name in sorted({loop.taker for loop in LOOPS})
        ]
        for finder in finders:
            finder.arm()
        return finders

    def facts(self, arguments: str | None) -> dict[str, Any]:
        """Return the options that the script passes to a class, and the library that creates its objects."""
        seen = self._of(arguments)
        return {
            "options_given": sorted({name for made in seen for name in made.given}),
            "options_made_by": next((made.maker for made in seen if made.maker is not None), None),
        }

    def places(self, arguments: str | None) -> list[tuple[str, int, str]]:
        """Return lines of the script that create an object of a class, as kind, line and class name."""
        return [("options", made.line, made.kind.__name__) for made in self._of(arguments) if made.line is not None]

    def _of(self, arguments: str | None) -> list[_Made]:
        return [made for made in self._seen if arguments in [kind.__name__ for kind in made.kind.__mro__]]

    def _follow(self, patches: Patches, module: str, name: str) -> None:
        owner = getattr(sys.modules[module], name, None)
        if not isinstance(owner, type):
            return  # another version of the library: switches are set in torch
        if dataclasses.is_dataclass(owner):
            # Each subclass gets its own __init__, which exists only once the subclass does.
            if owner.__new__ is object.__new__:
                owner.__new__ = _new_with(inspect.signature(owner.__init__))  # type: ignore[method-assign]
            patches.set(owner, "__new__", functools.partial(self._around_new, patches))
        else:
            patches.set(owner, "__init__", self._around_making)

    def _around_new(self, patches: Patches, original: _Function) -> _Function:
        @functools.wraps(original)
        def new(kind: type, *args: Any, **kwargs: Any) -> Any:
            if not hasattr(kind.__init__, _OURS):  # type: ignore[misc]
                patches.set(kind, "__init__", self._around_making)
            return original(kind, *args, **kwargs)

        return new

    def _around_making(self, original: _Function) -> _Function:
        parameters = inspect.signature(original).parameters

        @functools.wraps(original)
        def initialise(made: Any, *args: Any, **kwargs: Any) -> None:
            placed = dict(zip(parameters, (made, *args)))
            values = {**placed, **kwargs}
            seen = self._note(type(made), sys._getframe(1))
            if seen.maker is not None:  # a parser passes all options
                values = {name: item for name, item in values.items() if _differs(parameters, name, item)}
            seen.given.update(values)
            for kind in type(made).__mro__:
                wanted = self._options.get(kind.__name__, {}).items()
                free = parameters.keys() - values.keys() - placed.keys()
                kwargs |= {name: item for name, item in wanted if name in free}
            original(made, *args, **kwargs)

        setattr(initialise, _OURS, self)
        return initialise

    def _note(self, kind: type, frame: FrameType | None) -> _Made:
        maker = self._frames.library_around(frame)
        spot = self._frames.read(frame) if maker is None else None
        line = spot.line if spot is not None and spot.file == self._script else None
        self._seen.append(_Made(kind, line, maker))
        return self._seen[-1]


def _differs(parameters: Mapping[str, inspect.Parameter], name: str, value: Any) -> bool:
    return name not in parameters or bool(value != parameters[name].default)


def _new_with(signature: inspect.Signature) -> _Function:
    """Create a `__new__` that can stay: a class whose `__new__` was deleted no longer accepts arguments."""

    def new(kind: type, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(kind)

    new.__signature__ = signature  # type: ignore[attr-defined]
    return new
