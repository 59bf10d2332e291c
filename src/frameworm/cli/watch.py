"""`watch`."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Optional

import typer

from frameworm.cli.output import log_to_screen, say
from frameworm.errors import FramewormError, MissingPackageError, RunFolderError

RUNS = Path("runs")
REFRESH_S = 10.0  # between two looks at object storage


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("watch")(watch)


def watch(
    given: str = typer.Argument(
        str(RUNS), metavar="RUN|ROOT", help="A run folder, a folder of run folders, or a URL of either."
    ),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; traffic to other machines is not encrypted."),
    port: Optional[int] = typer.Option(  # noqa: UP045
        None, min=0, max=65535, help="Port; default: 7007, or a free one if that is taken.", show_default=False
    ),
    token: Optional[str] = typer.Option(  # noqa: UP045
        None, help="Token that visitors need; default: a random one.", show_default=False
    ),
    alert: Optional[list[str]] = typer.Option(  # noqa: UP045
        None,
        metavar="COMMAND|URL",
        help="Command or URL that gets JSON when a run fails or slows down, a rank straggles, a loss is NaN, or the "
        "disk is nearly full.",
    ),
    tui: bool = typer.Option(False, "--tui", help="Show runs in the terminal instead of serving a page."),
    as_json: bool = typer.Option(False, "--json", help="Print address and token as one line of JSON, then serve."),
) -> None:
    """Show running and finished runs, and profiled scripts, on a live page. Changes nothing.

    Visitors need the token in the printed address. Ctrl-C stops the server.

    Example: frameworm watch runs
    """
    path = _followed(given)
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
        facts = {"url": server.url, "host": host, "port": server.port, "token": server.token, "root": given}
        say(json.dumps(facts), flush=True)
    else:
        say(f"watching {given}: {server.url}", flush=True)
        say("Ctrl-C ends it", flush=True)
    if not is_loopback(host):
        say(
            "frameworm: others can reach this address, and what it sends is not encrypted; on a shared network keep "
            f"127.0.0.1 and use ssh -L {server.port}:127.0.0.1:{server.port}",
            file=sys.stderr,
        )
    server.serve()


def _followed(given: str) -> Path:
    """What to watch; of a URL a copy of the records there, which is kept up to date from now on."""
    from frameworm.records.objects.place import is_url
    from frameworm.records.objects.runs import local_root

    path = local_root(given)
    if is_url(given):

        def follow() -> None:
            lost = False
            while True:
                time.sleep(REFRESH_S)
                try:
                    local_root(given)
                except FramewormError as error:
                    if not lost:
                        say(f"frameworm: {error}; trying again", file=sys.stderr, flush=True)
                    lost = True
                else:
                    lost = False

        threading.Thread(target=follow, name="storage", daemon=True).start()
    return path
