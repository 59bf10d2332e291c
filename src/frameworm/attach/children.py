"""Follow the processes that a script starts with multiprocessing, whatever the start method.

A forked child inherits everything from its parent. A spawned child, or one of the fork server, first unpickles its
parent's data: the observation is part of that and begins before the child imports the script.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from frameworm.attach.script import AfterImport

_ROOT = str(Path(__file__).resolve().parents[2])
_Begin = Callable[[], Callable[[int], None]]
# Runs in a child that has imported nothing yet, with the import path that multiprocessing is about to set.
_BEGIN = """
import sys
before, sys.path = sys.path, {path!r}
try:
    from {module} import begin_child
    begin_child({settings!r}, [item.detach() for item in files])
except Exception:
    pass
finally:
    sys.path = before
"""


class Children:
    """Passes the observation on to child processes until `disarm`.

    Args:
        module: Module whose `begin_child(settings, files)` begins the observation in a spawned child.
        settings: What a child needs to know, as plain data.
        wanted: Whether a child that starts now may be one that trains.
        begin: Begins the observation in a forked child; returns a function that ends it, given the child's exit code.
        files: Open file descriptors to pass to a spawned child.
    """

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any],
        wanted: Callable[[], bool],
        begin: _Begin,
        files: Sequence[int] = (),
    ) -> None:
        self._module = module
        self._settings = dict(settings)
        self._wanted = wanted
        self._begin = begin
        self._files = files
        self._pid = os.getpid()
        self._finders = [
            AfterImport("multiprocessing.process", self._follow_forks),
            AfterImport("multiprocessing.spawn", self._follow_spawns),
        ]

    def arm(self) -> None:
        """Start following; a script that never imports multiprocessing is left alone."""
        for finder in self._finders:
            finder.arm()

    def disarm(self) -> None:
        """Stop following children."""
        self._wanted = lambda: False
        for finder in self._finders:
            finder.disarm()

    def join(self) -> None:
        """Wait for the children that Python itself would wait for at exit."""
        if "multiprocessing.process" in sys.modules:
            from multiprocessing.process import active_children

            for child in active_children():
                if not child.daemon:
                    child.join()

    def _follow_forks(self) -> None:
        def start(process: Any) -> Callable[[int], None] | None:
            forked_from_here = os.getpid() != self._pid and process._parent_pid == self._pid
            if not (forked_from_here and self._wanted()):
                return None
            self.disarm()  # inherited hooks belong to the parent
            return self._begin()

        around_bootstrap(start)

    def _follow_spawns(self) -> None:
        from multiprocessing import spawn

        original = spawn.get_preparation_data

        def get_preparation_data(*args: Any, **kwargs: Any) -> dict[str, Any]:
            data = original(*args, **kwargs)
            if os.getpid() == self._pid and self._wanted():
                path = [*sys.path, _ROOT]
                code = _BEGIN.format(module=self._module, path=path, settings=self._settings)
                data["frameworm"] = _RunsCode(code, self._files)
            return data

        spawn.get_preparation_data = get_preparation_data


class _RunsCode:
    """Runs code when unpickled; a child that cannot import frameworm ignores it."""

    def __init__(self, code: str, files: Sequence[int]) -> None:
        self._code, self._files = code, files

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str, dict[str, Any]]]:
        from multiprocessing.reduction import DupFd

        return exec, (self._code, {"files": [DupFd(number) for number in self._files]})


def around_bootstrap(start: Callable[[Any], Callable[[int], None] | None]) -> None:
    """Call `start` with each process object as its child begins, and the function it returns with the exit code."""
    from multiprocessing.process import BaseProcess

    kind: Any = BaseProcess
    original = kind._bootstrap

    def _bootstrap(self: Any, *args: Any, **kwargs: Any) -> Any:
        end = None
        try:
            end = start(self)
        except Exception as error:
            print(f"frameworm: {self.name} is not observed: {type(error).__name__}: {error}", file=sys.stderr)
        code = original(self, *args, **kwargs)
        if end is not None:
            try:
                end(code)
            except Exception as error:
                print(f"frameworm: {self.name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return code

    kind._bootstrap = _bootstrap
