"""The rules of the house, held by a test so that nobody has to remember them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "frameworm"
FLOORS = {
    "errors": 1,
    "config": 2,
    "records": 2,
    "diagnose": 3,
    "scaling": 3,
    "guard": 3,
    "report": 4,
    "launch": 4,
    "hardware": 4,
    "data": 5,
    "parallel": 5,
    "observe": 5,
    "models": 6,
    "engine": 7,
    "attach": 7,
    "tune": 8,
    "cli": 9,
}
FRONT_DOORS = {"__init__", "__main__", "distributed", "pytest_plugin"}
WITHOUT_TORCH = {"errors", "config", "records", "diagnose", "scaling", "guard", "report"}
READS_ENVIRONMENT = {"launch/environment.py", "config/load.py"}
MOST_LINES = 500

MODULES = sorted(SOURCE.rglob("*.py"))


def _name(path: Path) -> str:
    parts = list(path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(["frameworm", *(part for part in parts if part != "__init__")])


def _floor(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def _imports(path: Path, *, at_top: bool = False) -> set[str]:
    """Modules a file imports; `at_top` leaves out those inside functions and for type checkers."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and at_top:
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside = True
        if not (at_top and inside):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module)
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(tree, False)
    return found


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


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_modules_have_one_job(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MOST_LINES, f"{_name(path)} has {lines} lines: two jobs in one?"
    assert path.name != "utils.py"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_low_floors_need_no_torch(path: Path) -> None:
    if _floor(path) in WITHOUT_TORCH:
        heavy = {name for name in _imports(path) if name.split(".")[0] in {"torch", "lightning", "transformers"}}
        assert not heavy, f"{_name(path)} imports {heavy}"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_environment_is_read_in_two_places(path: Path) -> None:
    if path.relative_to(SOURCE).as_posix() in READS_ENVIRONMENT:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb", "putenv"}:
            pytest.fail(f"{_name(path)}, line {node.lineno}: environment variables belong to {READS_ENVIRONMENT}")
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            assert not {alias.name for alias in node.names} & {"environ", "getenv"}, _name(path)


def test_no_import_cycles() -> None:
    names = {_name(path): path for path in MODULES}
    graph = {name: {item for item in _imports(path, at_top=True) if item in names} for name, path in names.items()}
    done: set[str] = set()

    def walk(name: str, trail: list[str]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name in done:
            return
        for following in graph[name] - {"frameworm"}:
            walk(following, [*trail, name])
        done.add(name)

    for name in graph:
        walk(name, [])


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from frameworm.cli.main import app\n"
        "result = CliRunner().invoke(app, ['train', '--help'])\n"
        "assert result.exit_code == 0 and '--config' in result.output, result.output\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
