"""The help texts of the command line, without what only the drawing of them decides."""

from __future__ import annotations

import json
import re
from importlib.metadata import version

import typer.main
from golden_cases import STORED, command

from frameworm.cli.main import app

FOLDER = STORED / "help"
VERSIONS = FOLDER / "versions.json"
ROOT = "frameworm"  # the file of the help before any verb
_DRAWN = re.compile(r"\x1b\[[0-9;]*m|[\u2500-\u257f]")
_OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


def verbs() -> list[str]:
    """Names of all verbs, those of a group after its own, and of the help before them."""
    found = [ROOT]
    for name, verb in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        found += [name, *(f"{name} {part}" for part in getattr(verb, "commands", ()))]
    return found


def help_of(verb: str) -> str:
    """The help of a verb: its words in order, one line for each drawn line that has any."""
    code, text = command(*([] if verb == ROOT else verb.split()), "--help")
    assert code == 0
    lines = (" ".join(_DRAWN.sub(" ", line).split()) for line in text.splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def options_in(text: str) -> set[str]:
    """The options that a help text names."""
    return set(_OPTION.findall(text))


def drawn_with() -> dict[str, str]:
    """The packages that draw help texts, and add words of their own to them."""
    return {package: version(package) for package in ("click", "rich", "typer")}


def drawn_alike() -> bool:
    """True if the goldens were drawn with the packages that are installed here."""
    return bool(json.loads(VERSIONS.read_text(encoding="utf-8")) == drawn_with())
