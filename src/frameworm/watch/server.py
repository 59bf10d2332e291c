"""The page and its data over HTTP: static files, JSON, and changes as server-sent events."""

from __future__ import annotations

import contextlib
import importlib.resources
import math
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import uvicorn
from anyio.to_thread import run_sync
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from frameworm.errors import EnvironmentSetupError
from frameworm.watch import view
from frameworm.watch.catalogue import RUNNING, Catalogue
from frameworm.watch.exposition import CONTENT_TYPE, exposition
from frameworm.watch.run import WatchedRun
from frameworm.watch.security import SHORTEST_TOKEN, Guard, host_names
from frameworm.watch.sharing import Answers, Feeds, Shared

DEFAULT_PORT = 7007
NICENESS = 10
MOST_STREAMS = 64
MOST_BINS = 2_000
MOST_COLUMNS = 400
_KEEP_CONNECTION_S = 30  # longer than between two updates of a page
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class Service:
    """Answers the page's requests from one catalogue."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.feeds = Feeds(self._look)
        self._answers: WeakKeyDictionary[WatchedRun, Answers] = WeakKeyDictionary()
        self._shared = Shared()
        self._files = _static_files()

    async def page(self, request: Request) -> Response:
        """The page itself."""
        return _file(self._files, "index.html")

    async def static(self, request: Request) -> Response:
        """A static file of the page; only known names are served."""
        return _file(self._files, request.path_params["name"])

    async def runs(self, request: Request) -> Response:
        """The rows of all runs."""
        return JSONResponse(await run_sync(self._rows))

    async def run(self, request: Request) -> Response:
        """Everything about one run except its curves."""
        found = await run_sync(self._head, request.path_params["run"])
        return _unknown() if found is None else JSONResponse(found)

    async def series(self, request: Request) -> Response:
        """Curves over the steps; `first`, `last` and `bins` choose the range and the resolution."""
        first, last = (_number(request, name) for name in ("first", "last"))
        most = _whole(request, "bins", 600, MOST_BINS)
        return await self._of_run(request, ("series", first, last, most), lambda run: run.series(first, last, most))

    async def system(self, request: Request) -> Response:
        """Curves of the machine samples."""
        most = _whole(request, "bins", 400, MOST_BINS)
        return await self._of_run(request, ("system", most), lambda run: run.machine(most))

    async def ranks(self, request: Request) -> Response:
        """Ranks side by side."""
        channel = request.query_params.get("channel", "work_s")
        columns = _whole(request, "columns", 120, MOST_COLUMNS)
        return await self._of_run(request, ("ranks", channel, columns), lambda run: run.heat(channel, columns))

    async def log(self, request: Request) -> Response:
        """The end of a log, by its name."""
        name = request.query_params.get("name", "")
        run_id = request.path_params["run"]

        def read() -> bytes | None:
            run = self.catalogue.find(run_id)
            text = None if run is None else view.log_tail(run, self.catalogue.inside, name)
            return None if text is None else text.encode()

        text = await self._shared.get((run_id, "log", name), read)
        return _unknown() if text is None else PlainTextResponse(text)

    async def metrics(self, request: Request) -> Response:
        """The table of runs for Prometheus."""
        text = await run_sync(lambda: exposition(self.catalogue.rows()))
        return Response(text, media_type=CONTENT_TYPE)

    async def stream(self, request: Request) -> Response:
        """A stream of changes: of the table, or of the run that `run` names."""
        if self.feeds.followers >= MOST_STREAMS:
            return PlainTextResponse("503: too many pages are open\n", 503)
        events = self.feeds.follow(request.query_params.get("run"))
        return StreamingResponse(events, media_type="text/event-stream")

    def _look(self, run_id: str | None) -> tuple[str, dict[str, Any]]:
        """The data of a stream: `runs` with all rows, or `run` with one run's head."""
        if run_id is None:
            return "runs", self._rows()
        return "run", self._head(run_id) or {"id": run_id, "status": "gone"}

    def _rows(self) -> dict[str, Any]:
        rows = self.catalogue.rows()
        return {
            "root": self.catalogue.root.name,
            "runs": [row.to_dict() for row in rows],
            "single": self.catalogue.is_run,
            "running": sum(row.status == RUNNING for row in rows),
        }

    def _head(self, run_id: str) -> dict[str, Any] | None:
        self.catalogue.rows()
        return view.head_of(self.catalogue, run_id)

    async def _of_run(self, request: Request, question: tuple[Any, ...], make: Callable[[WatchedRun], Any]) -> Response:
        run_id = request.path_params["run"]

        def answer() -> bytes | None:
            run = self.catalogue.find(run_id)
            if run is None:
                return None
            answers = self._answers.setdefault(run, Answers())
            return answers.get(question, lambda: run.version, lambda: make(run))

        found = await self._shared.get((run_id, *question), answer)
        return _unknown() if found is None else Response(found, media_type="application/json")


def make_app(catalogue: Catalogue, token: str, host: str, port: int) -> Guard:
    """The application: guarded, read-only, and with only the routes below."""
    service = Service(catalogue)
    app = Starlette(
        routes=[
            Route("/", service.page),
            Route("/static/{name:path}", service.static),
            Route("/api/runs", service.runs),
            Route("/api/runs/{run}", service.run),
            Route("/api/runs/{run}/series", service.series),
            Route("/api/runs/{run}/system", service.system),
            Route("/api/runs/{run}/ranks", service.ranks),
            Route("/api/runs/{run}/log", service.log),
            Route("/api/stream", service.stream),
            Route("/metrics", service.metrics),
        ]
    )
    return Guard(app, token, host_names(host), f"frameworm_watch_{port}")


class WatchServer:
    """A bound socket and the page behind it; `serve` answers requests until the process is interrupted.

    Args:
        root: Folder of runs, or one run.
        host: Address to listen on.
        port: Port; None: 7007, or a free one if that is taken. 0: a free one.
        token: The access token; None: a random one.

    Raises:
        EnvironmentSetupError: The address is not available, or the token is too short or has invalid characters.
    """

    def __init__(self, root: Path, host: str = "127.0.0.1", port: int | None = None, token: str | None = None) -> None:
        self.token = secrets.token_urlsafe(32) if token is None else token
        if not _is_fit(self.token):
            raise EnvironmentSetupError(
                f"--token needs {SHORTEST_TOKEN} or more letters, digits, '-' or '_'; leave it out for a random one"
            )
        self.host = host
        self.socket = _bind(host, port)
        self.port: int = self.socket.getsockname()[1]
        self.catalogue = Catalogue(root)

    @property
    def url(self) -> str:
        """The URL to open, including the token."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        if self.host in ("0.0.0.0", "::", ""):
            shown = socket.gethostname()
        return f"http://{shown}:{self.port}/?token={self.token}"

    def server(self) -> uvicorn.Server:
        """The web server, not yet started."""
        app = make_app(self.catalogue, self.token, self.host, self.port)
        # No access log, because URLs contain the token.
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            lifespan="off",
            timeout_keep_alive=_KEEP_CONNECTION_S,
            timeout_graceful_shutdown=1,
        )
        return uvicorn.Server(config)

    def serve(self) -> None:
        """Answer until interrupted, at a low priority, because a training on the same cores comes first."""
        with low_priority(), contextlib.suppress(KeyboardInterrupt):
            self.server().run(sockets=[self.socket])


@contextlib.contextmanager
def low_priority(autogroup: Path = Path("/proc/self/autogroup")) -> Iterator[None]:
    """Run the block at a low priority.

    Linux may share processors evenly between sessions first (`sched_autogroup_enabled`); then niceness counts only
    within a session, and a page in a second terminal would take as much as the training. So the session gets the
    niceness too, if this process leads it or has its terminal in the foreground, and its former one afterwards.
    """
    os.nice(NICENESS)
    former = None
    if _has_session():
        with contextlib.suppress(OSError, ValueError):  # other systems have no such file
            former = int(autogroup.read_text().rpartition("nice")[2])
            autogroup.write_text(str(max(former, NICENESS)))
    try:
        yield
    finally:
        if former is not None:
            with contextlib.suppress(OSError):
                autogroup.write_text(str(former))


def _has_session() -> bool:
    """Whether the processes of this session wait for this one, or belong to it."""
    if os.getsid(0) == os.getpid():
        return True
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _is_fit(token: str) -> bool:
    return len(token) >= SHORTEST_TOKEN and token.isascii() and all(item.isalnum() or item in "-_" for item in token)


def _bind(host: str, port: int | None) -> socket.socket:
    wanted = [DEFAULT_PORT, 0] if port is None else [port]
    for number in wanted:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
            found = socket.socket(family, kind, protocol)
        except (OSError, UnicodeError) as error:
            raise EnvironmentSetupError(f"--host {host} is not an address of this machine: {error}") from error
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(128)
            return found
        except (OSError, OverflowError) as error:
            found.close()
            problem = error
    raise EnvironmentSetupError(f"cannot listen on {host}, port {wanted[-1]}: {problem}; give another --host or --port")


def _static_files() -> dict[str, bytes]:
    """The files of the page by name; nothing else is served."""
    found: dict[str, bytes] = {}

    def collect(folder: Any, prefix: str) -> None:
        for item in folder.iterdir():
            if item.is_dir():
                collect(item, f"{prefix}{item.name}/")
            elif Path(item.name).suffix in _TYPES:
                found[prefix + item.name] = item.read_bytes()

    collect(importlib.resources.files("frameworm.watch").joinpath("static"), "")
    return found


def _file(files: dict[str, bytes], name: str) -> Response:
    content = files.get(name)
    return _unknown() if content is None else Response(content, media_type=_TYPES[Path(name).suffix])


def _unknown() -> Response:
    return JSONResponse({"error": "there is no such thing here (any more)"}, 404)


def _number(request: Request, name: str) -> float | None:
    try:
        value = float(request.query_params[name])
    except (KeyError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _whole(request: Request, name: str, usual: int, most: int) -> int:
    value = _number(request, name)
    return usual if value is None else int(max(1, min(value, most)))
