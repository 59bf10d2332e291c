"""Writes a starter: its files, and the commands to run next. Existing files are never changed."""

from __future__ import annotations

import importlib.resources
import importlib.util
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Literal

from frameworm.config.starters.script import check_script
from frameworm.errors import EnvironmentSetupError

_EXAMPLE = "train.py"
_FILES = {
    "quickstart": {"quickstart.yaml": "what is trained, and how", "quickstart.md": "what to do with it"},
    "model": {
        "my_model.py": "a model, its data and its loss: replace them with yours",
        "my_model.yaml": "how it is trained",
        "test_my_model.py": "checks that it learns, and that it can be resumed",
        "my_model.md": "what to do with them",
    },
}
_NEXT = {
    "quickstart": ["frameworm train --config quickstart.yaml", "frameworm tune --config quickstart.yaml --budget 3m"],
    "model": ["frameworm train --config my_model.yaml", "python -m pytest test_my_model.py"],
}


@dataclass
class Starter:
    """The files that were written.

    Attributes:
        folder: Folder of the files.
        files: Purpose of each file, by name.
        next: Commands to run, in order.
        unchanged: Names of files that already existed with the same content.
        notes: What the author of the script should know first.
    """

    folder: Path
    files: dict[str, str]
    next: list[str]
    unchanged: list[str]
    notes: list[str] = field(default_factory=list)


def start_with(name: Literal["quickstart", "model"], folder: Path) -> Starter:
    """Write the files of a starter.

    Args:
        name: Which starter.
        folder: Created if it does not exist.

    Raises:
        EnvironmentSetupError: One of the files exists with other content, and nothing was written; or the folder
            cannot be written to.
    """
    unchanged = _write(folder, {file: _stored(file) for file in _FILES[name]})
    then = list(_NEXT[name])
    if name == "model" and importlib.util.find_spec("pytest") is None:
        then.insert(1, "pip install pytest")
    return Starter(folder, _FILES[name], [*_enter(folder), *then], unchanged)


def start_with_script(where: Path, arguments: Sequence[str] = ()) -> Starter:
    """Write the commands for a training script into the working directory, or an example script with its commands.

    Args:
        where: The script, or the folder for the example, which is created if it does not exist.
        arguments: Arguments of the script.

    Raises:
        EnvironmentSetupError: As in `start_with`, or the script is missing or not Python.
    """
    if where.suffix == ".py" or where.is_file():
        notes = check_script(where)
        name, text, then = _commands(where, arguments)
        return Starter(Path(), {name: f"the commands for {where}"}, then, _write(Path(), {name: text}), notes)
    if arguments:
        raise EnvironmentSetupError(f"{where} is not a Python script (.py), so it takes no arguments")
    name, text, then = _commands(Path(_EXAMPLE), ())
    unchanged = _write(where, {_EXAMPLE: _stored(_EXAMPLE), name: text})
    files = {_EXAMPLE: "a training script in plain PyTorch", name: "the commands for it"}
    return Starter(where, files, [*_enter(where), *then], unchanged)


def _commands(script: Path, arguments: Sequence[str]) -> tuple[str, str, list[str]]:
    """Return name and text of the file of commands for a script, and the first two commands."""
    names = {"script": str(script), "name": shlex.quote(script.stem), "command": shlex.join([str(script), *arguments])}
    text = Template(_stored("script.md")).substitute(names)
    then = [line for line in text.splitlines() if line.startswith(("frameworm profile", "frameworm tune"))]
    return f"frameworm-{script.stem}.md", text, then


def _enter(folder: Path) -> list[str]:
    return [] if folder == Path() else [f"cd {shlex.quote(str(folder))}"]


def _stored(name: str) -> str:
    """Text of a packaged file. Python files are stored as text, because they are not modules of this package."""
    folder = importlib.resources.files("frameworm.config.starters").joinpath("files")
    return folder.joinpath(f"{name}.txt" if name.endswith(".py") else name).read_text(encoding="utf-8")


def _write(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Write the files that do not exist, and return the names of those that exist with the same content.

    Raises:
        EnvironmentSetupError: A file has other content, and nothing was written; or the folder cannot be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise EnvironmentSetupError(f"{folder} is a file; give the folder to write to")
    try:
        there = [name for name in texts if (folder / name).exists() or (folder / name).is_symlink()]
        taken = [str(folder / name) for name in there if not _holds(folder / name, texts[name])]
        if taken:
            files, them = ("files", "them") if len(taken) > 1 else ("file", "it")
            raise EnvironmentSetupError(
                f"nothing was written, to keep the {files} that you have: {', '.join(taken)}. Move {them} away, "
                "or use another folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            if name not in there:
                with (folder / name).open("x", encoding="utf-8") as file:
                    file.write(text)
    except OSError as error:
        raise EnvironmentSetupError(f"cannot write {error.filename or folder}: {error.strerror or error}") from None
    return there


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()
