"""Follow a config from `frameworm train` to the first step: which modules it enters, and where it goes back up.

    python scripts/config_path.py [SOURCE]

`SOURCE` is the `src` folder of a checkout (this one's unless given), so that two versions can be compared. Counted are
calls of functions of frameworm that are given the config, one of its sections, or an object that holds it. A hand-over
is upwards if the called module is not below its caller in the graph of imports, or lies on a circle with it.
"""

from __future__ import annotations

import ast
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

SOURCE = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "src").resolve()
CONFIG = SOURCE.parent / "configs" / "quickstart.yaml"
BEGIN, IGNORED = "frameworm.cli.train", "frameworm.config.schema"


class FirstStepReached(BaseException):
    """Ends the training from inside."""


def find_modules() -> dict[str, Path]:
    """Names and files of all modules."""
    found = {}
    for path in (SOURCE / "frameworm").rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def find_imports(modules: dict[str, Path]) -> dict[str, set[str]]:
    """What each module imports, also inside functions and for type checkers."""
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    imported.add(full if full in modules else node.module)
        found[name] = {item for item in imported if item in modules and item != name}
    return found


def reached_from(name: str, imports: dict[str, set[str]]) -> set[str]:
    """All modules below a module."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        for item in imports[waiting.pop()] - seen:
            seen.add(item)
            waiting.append(item)
    return seen


class Follower:
    """Listens to calls as `sys.setprofile` reports them."""

    def __init__(self) -> None:
        modules = find_modules()
        imports = find_imports(modules)
        self._files = {str(path): name for name, path in modules.items()}
        self._below = {name: reached_from(name, imports) for name in modules}
        self._began = False
        self.entered: dict[str, None] = {}
        self.hand_overs: list[tuple[str, str, str]] = []

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Take in one event."""
        module = self._files.get(frame.f_code.co_filename)
        if event != "call" or module is None:
            return
        self._began = self._began or module == BEGIN
        if frame.f_code.co_name == "run" and type(frame.f_locals.get("self")).__name__ == "TrainStep":
            sys.setprofile(None)
            raise FirstStepReached
        if self._began and module != IGNORED and self._takes_config(frame):
            self.entered[module] = None
            caller = self._caller(frame)
            if caller not in (None, module):
                self.hand_overs.append((str(caller), module, frame.f_code.co_name))

    def upwards(self) -> list[tuple[str, str, str]]:
        """Hand-overs that do not go down."""
        return [
            (caller, called, function)
            for caller, called, function in self.hand_overs
            if called not in self._below[caller] or caller in self._below[called]
        ]

    def _caller(self, frame: FrameType) -> str | None:
        above = frame.f_back
        while above is not None and above.f_code.co_filename not in self._files:
            above = above.f_back
        return None if above is None else self._files[above.f_code.co_filename]

    def _takes_config(self, frame: FrameType) -> bool:
        from frameworm.config.section import Section

        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = [(name, frame.f_locals.get(name)) for name in names]
        return any(
            isinstance(value, Section) or (name != "self" and isinstance(getattr(value, "config", None), Section))
            for name, value in given
        )


def main() -> None:
    """Train until the first step and print what was seen."""
    sys.path.insert(0, str(SOURCE))
    import frameworm.cli.main as command_line

    follower = Follower()
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["frameworm", "train", "--config", str(CONFIG), "--out", f"{folder}/run"]
        sys.setprofile(follower)
        try:
            command_line.main()
        except FirstStepReached:
            pass
        finally:
            sys.setprofile(None)
        upwards = follower.upwards()
        print(f"modules entered: {len(follower.entered)}")
        print("  " + " ".join(name.removeprefix("frameworm.") for name in follower.entered))
        print(f"hand-overs between modules: {len(follower.hand_overs)}, of them upwards or in a circle: {len(upwards)}")
        for caller, called, function in upwards:
            print(f"  {caller} -> {called} ({function})")


if __name__ == "__main__":
    main()
