"""Run a Python file as `python` would, and report how it ended."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from frameworm.errors import EnvironmentSetupError

INTERRUPTED = 130

_OWN_FILES = f"{Path(__file__).parent}{os.sep}"


class Ending(NamedTuple):
    """How a script ended: `completed`, `failed` or `interrupted`, and the value for `sys.exit`."""

    status: str
    code: int | str | None


def check_script(path: Path) -> None:
    """Check that a script can be run.

    Raises:
        EnvironmentSetupError: If there is no such file.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise EnvironmentSetupError(f"{path} {what}; give the Python file of a training script")


def find_module(name: str) -> Path:
    """Find the file that `python -m NAME` would run, looking in the working folder first.

    Only its parent packages are imported, as Python does: importing the module itself may start training.

    Raises:
        EnvironmentSetupError: If there is none.
    """
    path = sys.path[:]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, str(Path.cwd()))
    try:
        with contextlib.suppress(ImportError):
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{name}.__main__")
            if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
                return Path(spec.origin)
    finally:
        sys.path[:] = path
    raise EnvironmentSetupError(f"-m {name}: there is no such module to run; is its package installed?")


def run_script(path: Path, arguments: Sequence[str], name: str | None = None, source: str | None = None) -> Ending:
    """Run a file as `__main__` with these arguments; errors are shown as Python would show them.

    Args:
        path: The file.
        arguments: Its command-line arguments.
        name: Its module name, to run it as with `python -m`.
        source: Source code to run in place of the file's.
    """
    sys.argv = [str(path), *arguments]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(path.resolve().parent) if name is None else str(Path.cwd())
    filename = str(path.absolute())
    module = types.ModuleType("__main__")
    module.__file__ = filename
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", filename)
    module.__spec__ = None
    module.__dict__.update({"__annotations__": {}, "__builtins__": __builtins__, "__cached__": None})
    module.__package__ = None if name is None else name if path.name == "__main__.py" else name.rpartition(".")[0]
    # The command line's runner may have installed its own hook.
    sys.excepthook = sys.__excepthook__
    sys.modules["__main__"] = module
    try:
        code = compile(path.read_bytes() if source is None else source, filename, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except SystemExit as stop:
        failed = stop.code not in (None, 0)
        return Ending("failed" if failed else "completed", _exit_code(stop))
    except KeyboardInterrupt as error:
        _show(error)
        return Ending("interrupted", INTERRUPTED)
    except BaseException as error:
        _show(error)
        return Ending("failed", 1)
    return Ending("completed", 0)


def _exit_code(stop: SystemExit) -> int | str | None:
    """Return what the script passed to `sys.exit`; Python prints anything but a number and exits with 1."""
    code: Any = stop.code
    return code if code is None or isinstance(code, int) else str(code)


def _show(error: BaseException) -> None:
    without_own_frames(error)
    sys.excepthook(type(error), error, error.__traceback__)


def without_own_frames(error: BaseException) -> None:
    """Remove our frames from the tracebacks of an error and of its causes."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        kept = []
        trace = current.__traceback__
        while trace is not None:
            if not trace.tb_frame.f_code.co_filename.startswith(_OWN_FILES):
                kept.append(trace)
            trace = trace.tb_next
        following: types.TracebackType | None = None
        for trace in reversed(kept):
            trace.tb_next = following
            following = trace
        current.__traceback__ = following
        waiting += [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function right after the script has imported a module.

    torch reads variables when it is imported, and a script may set them first, so we must not import it earlier.
    Libraries may also check whether a module exists long before it is imported.
    """

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action
        self._looking = False

    def arm(self) -> None:
        """Wait for the import, or act now if it has already happened."""
        if self._name in sys.modules:
            self._action()
        else:
            sys.meta_path.insert(0, self)

    def disarm(self) -> None:
        """Stop waiting."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's spec with a loader that calls the action when done."""
        if fullname != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # already gone if another finder waits for the same module
            execute(module)
            self.disarm()
            self._action()

        loader.exec_module = exec_module
        return spec
