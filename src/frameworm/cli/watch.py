"""`watch`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Optional

import typer

from frameworm.cli.output import log_to_screen, say
from frameworm.errors import MissingPackageError, RunFolderError

RUNS = Path("runs")


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("watch")(watch)


def watch(
    path: Path = typer.Argument(RUNS, metavar="RUN|ROOT", help="A run folder, or a folder that holds run folders."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; what is not this machine's own is unencrypted."),
    port: Optional[int] = typer.Option(  # noqa: UP045
        None, min=0, max=65535, help="Port; 7007 unless given, or a free one where that is taken.", show_default=False
    ),
    token: Optional[str] = typer.Option(  # noqa: UP045
        None, help="What a visitor must know; a random one unless given.", show_default=False
    ),
    alert: Optional[list[str]] = typer.Option(  # noqa: UP045
        None,
        metavar="COMMAND|URL",
        help="Gets JSON when a run fails, slows down, has a straggler or a loss of NaN, or the disk is nearly full.",
    ),
    tui: bool = typer.Option(False, "--tui", help="Show it in the terminal instead of a page; nothing is served."),
    as_json: bool = typer.Option(False, "--json", help="Print address and token as one line of JSON, then serve."),
) -> None:
    """Show runs as a live page: running or finished, trained by the engine or profiled scripts. Nothing is changed.

    The page is for those who have the token in the printed address. Ctrl-C ends it.

    Example: frameworm watch runs
    """
    if not path.is_dir() and path != RUNS:
        what = "is not a folder" if path.exists() else "does not exist"
        raise RunFolderError(f"{path} {what}; give a run folder, or a folder with runs (`frameworm runs` lists them)")
    if tui:
        from rich.console import Console

        from frameworm.watch.terminal import show

        if as_json:
            raise typer.BadParameter("it is for programs, and --tui for people: give one of them", param_hint="--json")
        show(path, Console(), alert or [])
        return
    try:
        from frameworm.watch.security import is_loopback
        from frameworm.watch.server import WatchServer
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("frameworm"):
            raise
        raise MissingPackageError(f"the page needs {error.name}: pip install 'frameworm[watch]'") from None
    server = WatchServer(path, host, port, token)
    if alert:
        from frameworm.watch.alerts import Alerts

        log_to_screen(True)
        Alerts(server.catalogue, alert).start()
    if as_json:
        facts = {"url": server.url, "host": host, "port": server.port, "token": server.token, "root": str(path)}
        say(json.dumps(facts), flush=True)
    else:
        say(f"watching {path}: {server.url}", flush=True)
        say("Ctrl-C ends it", flush=True)
    if not is_loopback(host):
        say(
            "frameworm: others can reach this address, and what it sends is not encrypted; on a shared network keep "
            f"127.0.0.1 and use ssh -L {server.port}:127.0.0.1:{server.port}",
            file=sys.stderr,
        )
    server.serve()
