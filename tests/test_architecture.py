"""The rules of the house, held by a test so that nobody has to remember them."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "frameworm"
FLOORS = {
    "errors": 1,
    "compat": 1,
    "config": 2,
    "records": 2,
    "diagnose": 3,
    "scaling": 3,
    "guard": 3,
    "torch_private": 3,
    "report": 4,
    "launch": 4,
    "hardware": 4,
    "data": 5,
    "parallel": 5,
    "observe": 5,
    "models": 6,
    "numerics": 6,
    "engine": 7,
    "attach": 7,
    "tune": 8,
    "watch": 8,
    "cli": 9,
}
FRONT_DOORS = {"__init__", "__main__", "api", "distributed", "pytest_plugin"}
# Floors that judge and draw stored runs where there is no torch. `torch_private` lies as low because `launch` needs it.
WITHOUT_TORCH = {"compat", "errors", "config", "records", "diagnose", "scaling", "guard", "report", "watch"}
READS_ENVIRONMENT = {"launch/environment.py", "config/load.py"}
MOST_LINES = 500
MOST_MODULES = 22
SPLINTER_LINES = 40

MODULES = sorted(SOURCE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in MODULES} - {SOURCE})


def _name(path: Path) -> str:
    parts = list(path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(["frameworm", *(part for part in parts if part != "__init__")])


def _floor(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


@dataclass(frozen=True)
class Facts:
    """What the rules need to know of a module. The trees themselves are dropped: all together they take a gigabyte.

    Attributes:
        imports: Everything it imports, wherever it says so: at its top, inside functions or for type checkers only.
        own: Names that it defines.
        private: Lines and names with an underscore that it takes from other objects.
        torch_names: Lines and strings that name a private module of torch.
        environment: Lines that read the environment.
    """

    imports: frozenset[str]
    own: frozenset[str]
    private: tuple[tuple[int, str], ...]
    torch_names: tuple[tuple[int, str], ...]
    environment: tuple[int, ...]


@functools.cache
def _facts(path: Path) -> Facts:
    imports: set[str] = set()
    own: set[str] = set()
    private: list[tuple[int, str]] = []
    torch_names: list[tuple[int, str]] = []
    environment: list[int] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{_name(path)}, line {node.lineno}: imports name their modules in full"
            assert not node.level, f"{_name(path)}, line {node.lineno}: imports name their modules in full"
            imports.add(node.module)
            imports.update(f"{node.module}.{alias.name}" for alias in node.names)
            if node.module == "os" and {alias.name for alias in node.names} & {"environ", "getenv"}:
                environment.append(node.lineno)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute):
            holder = node.value.id if isinstance(node.value, ast.Name) else ""
            if holder == "self":
                own.add(node.attr)
            if holder not in {"self", "cls", "super"} and _is_private(node.attr):
                private.append((node.lineno, node.attr))
            if node.attr in {"environ", "getenv", "environb", "putenv"}:
                environment.append(node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            said = node.args[1]
            if node.func.id in {"getattr", "hasattr", "setattr", "delattr"} and isinstance(said, ast.Constant):
                private += [(node.lineno, name) for name in [str(said.value)] if _is_private(name)]
        elif isinstance(node, ast.Constant) and re.match(r"torch(\.\w+)*\._\w", str(node.value)):
            torch_names.append((node.lineno, str(node.value)))
    return Facts(frozenset(imports), frozenset(own), tuple(private), tuple(torch_names), tuple(environment))


def _imports(path: Path) -> frozenset[str]:
    return _facts(path).imports


@functools.cache
def _graph() -> dict[str, frozenset[str]]:
    """Modules and the modules they import."""
    names = {_name(path): path for path in MODULES}
    return {
        name: frozenset(item for item in _imports(path) if item in names and item not in (name, "frameworm"))
        for name, path in names.items()
    }


def _rooms() -> dict[str, set[str]]:
    """Folders and the folders that their modules import from."""
    packages = {_name(path / "__init__.py") for path in FOLDERS}

    def room(module: str) -> str:
        return module if module in packages else module.rpartition(".")[0]

    found: dict[str, set[str]] = {}
    for module, imported in _graph().items():
        if module.count(".") > 1 or module in packages:
            found.setdefault(room(module), set()).update(room(item) for item in imported)
    return {name: {item for item in others if item in found and item != name} for name, others in found.items()}


def _circle(graph: Mapping[str, Collection[str]]) -> list[str]:
    """A circle in a graph, or nothing."""
    done: set[str] = set()

    def walk(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        for following in sorted(graph[name]):
            found = walk(following, [*trail, name])
            if found:
                return found
        done.add(name)
        return []

    for name in graph:
        found = walk(name, [])
        if found:
            return found
    return []


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_imports_go_down_only(path: Path) -> None:
    floor = _floor(path)
    if floor in FRONT_DOORS:
        return
    assert floor in FLOORS, f"{floor} is not a floor of the house"
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] != "frameworm" or len(parts) == 1 or parts[1] not in FLOORS:
            continue
        below = FLOORS[parts[1]] < FLOORS[floor]
        assert parts[1] == floor or below, f"{_name(path)} imports {name}, which is not below it"


def test_functions_of_the_verbs_need_no_command_line() -> None:
    assert not [name for name in _imports(SOURCE / "api.py") if name.startswith("frameworm.cli")]


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_modules_have_one_job(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MOST_LINES, f"{_name(path)} has {lines} lines: two jobs in one?"
    assert path.name != "utils.py"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: _name(path / "__init__.py"))
def test_rooms_are_small_and_say_what_they_are_for(folder: Path) -> None:
    modules = list(folder.glob("*.py"))
    assert len(modules) <= MOST_MODULES, f"{folder.name} has {len(modules)} modules: make rooms inside it"
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    lines = [line for line in text.splitlines() if line.strip()]
    assert 3 <= len(lines) <= 8, f"{folder.name}/__init__.py says in {len(lines)} lines what the room is for"


def test_no_module_is_a_splinter_of_its_only_neighbour() -> None:
    users: dict[str, set[str]] = {}
    for module, imported in _graph().items():
        for item in imported:
            users.setdefault(item, set()).add(module)
    for path in MODULES:
        name = _name(path)
        if path.name == "__init__.py" or len(path.read_text().splitlines()) >= SPLINTER_LINES:
            continue
        only = users.get(name, set())
        alone = len(only) == 1 and next(iter(only)).rpartition(".")[0] == name.rpartition(".")[0]
        assert not alone, f"{name} is short and serves {only} alone: join them"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_low_floors_need_no_torch(path: Path) -> None:
    if _floor(path) in WITHOUT_TORCH:
        heavy = {
            name
            for name in _imports(path)
            if name.split(".")[0] in {"torch", "lightning", "transformers"}
            or name.startswith("frameworm.torch_private")
        }
        assert not heavy, f"{_name(path)} imports {heavy}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def _own_private_names() -> frozenset[str]:
    """Private names that frameworm's own classes, functions and modules have, less those that it takes from torch."""
    own = frozenset(name for path in MODULES for name in _facts(path).own)
    return own - _taken_from_torch()


@functools.cache
def _taken_from_torch() -> frozenset[str]:
    trees = [ast.parse(path.read_text()) for path in (SOURCE / "torch_private").glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    said = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return frozenset(name for name in said | used if _is_private(name) and name.isidentifier())


# Private names of others than torch, and what only looks like one. Of `os` and `sys` they are documented.
NOT_OF_TORCH = {
    "_exit", "_getframe", "_current_frames", "_identity", "_parent_pid", "_inst", "_rand", "_bit_generator",
    "_replace", "_asdict", "_fields",  # of named tuples
    "_inheriting",  # of a process that multiprocessing still sets up
    "_fingerprint", "_attn_implementation",  # datasets, transformers
    "_update_count", "_reductions",  # torchmetrics
}  # fmt: skip


@pytest.mark.parametrize("path", [path for path in MODULES if _floor(path) != "torch_private"], ids=_name)
def test_private_names_of_torch_are_in_one_place(path: Path) -> None:
    facts, known = _facts(path), NOT_OF_TORCH | _own_private_names()
    named = [*facts.torch_names, *((line, name) for line, name in facts.private if name not in known)]
    found = [f"line {line}: {name}" for line, name in named]
    found += [name for name in facts.imports if re.match(r"torch(\.\w+)*\._\w", name)]
    assert not found, f"{_name(path)}: what torch keeps to itself belongs to frameworm.torch_private: {found}"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_environment_is_read_in_two_places(path: Path) -> None:
    if path.relative_to(SOURCE).as_posix() in READS_ENVIRONMENT:
        return
    lines = _facts(path).environment
    assert not lines, f"{_name(path)}, line {lines[0]}: environment variables belong to {READS_ENVIRONMENT}"


def test_no_circles_between_modules() -> None:
    circle = _circle(_graph())
    assert not circle, " -> ".join(circle)


def test_no_circles_between_rooms() -> None:
    """So a room never imports from the folder it lies in, which may import from its rooms."""
    circle = _circle(_rooms())
    assert not circle, " -> ".join(circle)


@pytest.mark.parametrize(
    "module",
    ["engine.checkpoint.writer_process", "engine.upload.service", "tune.processes.forkserver", "watch.server"],
)
def test_processes_that_must_start_quickly_need_no_torch(module: str) -> None:
    code = f"import sys, frameworm.{module}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from frameworm.cli.main import app\n"
        "result = CliRunner().invoke(app, ['train', '--help'])\n"
        "assert result.exit_code == 0 and '--config' in result.output, result.output\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
