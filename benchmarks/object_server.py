"""A real S3 server on this machine (moto), and a network to it that can be taken away."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from types import TracebackType
from typing import Any

BUCKET = "bucket"
_START_S = 60.0


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class ObjectServer:
    """An S3 server with one bucket, in a process of its own; a context manager.

    Attributes:
        port: Where it listens on 127.0.0.1.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def variables(self, port: int | None = None) -> dict[str, str]:
        """What to put into the environment, so that s3:// means this server, or a proxy before it."""
        return {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",  # s3fs and the uploader try again, too: together it takes a minute to give up
        }

    def __enter__(self) -> ObjectServer:
        command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        quiet = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=quiet, start_new_session=True
        )
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError):
                self._request("GET", "moto-api/")
                break
            assert self._process.poll() is None, "moto's server does not start: is moto[server] installed?"
            assert time.monotonic() < deadline, "moto's server does not answer"
            time.sleep(0.1)
        self.make_bucket()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(30)

    def make_bucket(self) -> None:
        """Make the bucket, or empty it by beginning afresh."""
        with contextlib.suppress(OSError):
            self._request("POST", "moto-api/reset")
        self._request("PUT", BUCKET)

    def _request(self, method: str, path: str) -> None:
        authorization = {"Authorization": "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}",
            method=method,
            headers=authorization,
            data=b"" if method != "GET" else None,
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()


class Proxy:
    """A network to a server: connections through it can be cut (`cut`), and come back (`mend`); a context manager.

    Attributes:
        port: Where it listens on 127.0.0.1.
        bytes_up: What has gone to the server.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.bytes_up = 0
        self._up = threading.Event()
        self._up.set()
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *rest: Any) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Reset every connection, and each new one."""
        self._up.clear()
        for item in self._open:
            with contextlib.suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
                item.close()
        self._open.clear()

    def mend(self) -> None:
        """Let connections through again."""
        self._up.set()

    def _accept(self) -> None:
        for client in self._clients():
            if not self._up.is_set():
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target), timeout=10)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            self._open += [client, server]
            for source, sink, up in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pump, args=(source, sink, up), daemon=True).start()

    def _clients(self) -> Iterator[socket.socket]:
        while True:
            try:
                yield self._listener.accept()[0]
            except OSError:
                return

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(2**16):
                if up:
                    self.bytes_up += len(content)
                sink.sendall(content)
        for item in (source, sink):
            with contextlib.suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
                item.close()
