"""`init quickstart`, `init model` and `init script`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer

from frameworm.cli.output import say

if TYPE_CHECKING:
    from frameworm.config.starters.starter import Starter

_FOLDER = typer.Argument(Path(), metavar="[DIR]", help="Folder to write to; made if it does not exist.")
_AS_JSON = typer.Option(False, "--json", help="Print files and commands as JSON.")


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    group = typer.Typer(no_args_is_help=True)
    group.command("quickstart")(quickstart)
    group.command("model")(model)
    # What follows the script belongs to the script, options included.
    group.command("script", context_settings={"allow_interspersed_args": False})(script)
    group.callback()(init)
    app.add_typer(group, name="init")


def init() -> None:
    """Write first files to start from, and say what to run next. Existing files are never changed.

    Example: frameworm init quickstart

    A model of your own, in a new folder: frameworm init model waves

    The commands for a training script that you have: frameworm init script train.py --its-own-options
    """


def quickstart(folder: Path = _FOLDER, as_json: bool = _AS_JSON) -> None:
    """Write a config that trains in seconds on a CPU, on data that it generates itself.

    Example: frameworm init quickstart
    """
    from frameworm.config.starters.starter import start_with

    _show(start_with("quickstart", folder), as_json)


def model(folder: Path = _FOLDER, as_json: bool = _AS_JSON) -> None:
    """Write a model, data and loss to replace with your own, with a config and a test.

    Example: frameworm init model waves
    """
    from frameworm.config.starters.starter import start_with

    _show(start_with("model", folder), as_json)


def script(
    where: Path = typer.Argument(
        Path(), metavar="[SCRIPT.py|DIR]", help="Your training script; or the folder to write a small one to."
    ),
    arguments: Optional[list[str]] = typer.Argument(  # noqa: UP045
        None, metavar="[ARGS]...", help="Arguments of the script.", show_default=False
    ),
    as_json: bool = _AS_JSON,
) -> None:
    """Write the commands to profile, tune, run and watch a training script; without one, also a small script.

    The script is read, not run. The commands go into a file in this folder.

    Example: frameworm init script train.py --its-own-options
    """
    from frameworm.config.starters.starter import start_with_script

    _show(start_with_script(where, arguments or []), as_json)


def _show(starter: Starter, as_json: bool) -> None:
    if as_json:
        say(json.dumps({**dataclasses.asdict(starter), "folder": str(starter.folder)}))
        return
    width = max(len(str(starter.folder / name)) for name in starter.files)
    for name, about in starter.files.items():
        what = "was there" if name in starter.unchanged else "wrote"
        say(f"{what:<10} {starter.folder / name!s:<{width}}  {about}")
    for note in starter.notes:
        say(f"{'note':<10} {note}")
    for number, command in enumerate(starter.next):
        say(f"{'' if number else 'next':<10} {command}")
