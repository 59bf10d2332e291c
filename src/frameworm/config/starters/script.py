"""Checks a training script without running it."""

from __future__ import annotations

import ast
import tokenize
from pathlib import Path

from frameworm.config.describe import CLOSE, nearest
from frameworm.errors import EnvironmentSetupError

# Packages that train with torch; a script may use it through one of these alone.
TRAINS = {
    "accelerate",
    "fastai",
    "frameworm",
    "ignite",
    "lightning",
    "pytorch_lightning",
    "sentence_transformers",
    "torch",
    "transformers",
    "trl",
    "ultralytics",
}
# Methods that compute gradients, or run a loop that does.
STEPS = {"backward", "fit", "manual_backward", "train"}


def check_script(path: Path) -> list[str]:
    """Refuse anything but a Python script, and return reasons why frameworm may not see it train.

    Args:
        path: The script.

    Returns:
        Notes for its author; empty if everything is as expected.

    Raises:
        EnvironmentSetupError: The script is missing, unreadable or not Python.
    """
    if not path.exists():
        raise EnvironmentSetupError(
            f"{path} does not exist; {_similar_script(path) or 'give the Python file of your training script'}"
        )
    if path.suffix != ".py" or path.is_dir():
        raise EnvironmentSetupError(f"{path} is not a Python script (.py); give the file that `python` runs")
    try:
        with tokenize.open(path) as file:  # in the encoding that the script declares
            tree = ast.parse(file.read())
    except (SyntaxError, UnicodeDecodeError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise EnvironmentSetupError(f"{path}{line}: Python cannot read this script: {reason}") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise EnvironmentSetupError(f"{path} cannot be read: {reason}") from None
    return list(_doubts(tree, path.name))


def _doubts(tree: ast.AST, name: str) -> list[str]:
    nodes = list(ast.walk(tree))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    called = {node.func.attr for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)}
    if not TRAINS & {module.split(".")[0] for module in imported}:
        return [f"{name} does not import torch: frameworm sees its training only if a module that it imports does"]
    if not STEPS & called:
        return [f"{name} calls no backward(), fit() or train(): is it the file that trains?"]
    return []


def _similar_script(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix == ".py"]
    except OSError:
        return ""
    if not names:
        return ""
    name, alike = nearest(path.name, names)
    return f"did you mean {path.parent / name}?" if alike >= CLOSE else ""
