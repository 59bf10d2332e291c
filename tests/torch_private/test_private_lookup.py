"""What frameworm says when torch lacks a private name, and that every such name has a test."""

from __future__ import annotations

import ast
import importlib.util
import re
import types
from pathlib import Path

import pytest

import frameworm.torch_private as room
from frameworm.errors import TorchVersionError
from frameworm.torch_private import names
from frameworm.torch_private.lookup import attribute, function

HERE = Path(__file__).parent
SOURCE = Path(room.__file__).parent


def test_missing_names_are_said_clearly() -> None:
    owner = types.SimpleNamespace(_there=lambda: 3)
    assert attribute(owner, "_there")() == 3
    assert function(owner, "_there")() == 3
    with pytest.raises(TorchVersionError, match="has no `_gone`"):
        attribute(owner, "_gone")
    missing = function(owner, "_gone")  # not before it is used
    with pytest.raises(TorchVersionError, match="has no `_gone`"):
        missing(1, more=2)


@pytest.mark.parametrize(
    "module", [names.COMPILER, names.COMPILER_STATISTICS, names.GPU_COMPILER, names.FUNCTIONAL_COLLECTIVES]
)
def test_named_modules_exist(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


def test_named_loggers_and_types_exist() -> None:
    assert importlib.util.find_spec(names.COMPILER_FAILURES) is not None
    import torch._utils

    for name in names.PICKLED_TENSORS:
        module, _, kind = name.partition(" ")
        assert module == torch._utils.__name__
        assert hasattr(torch._utils, kind)


@pytest.mark.parametrize("path", sorted(SOURCE.glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_every_use_has_a_test(path: Path) -> None:
    tree = ast.parse(path.read_text())
    defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ImportFrom) and re.search(r"torch.*\._", node.module or ""):
            defined |= {alias.asname or alias.name for alias in node.names}
    tested = (HERE / f"test_private_{path.stem}.py").read_text()
    untested = [name for name in sorted(defined) if not name.startswith("_") and not re.search(rf"\b{name}\b", tested)]
    assert not untested
