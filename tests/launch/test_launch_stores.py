"""Joining a store: a clear error in time from whatever listens on the port, and nothing of C++ on the screen."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from frameworm.errors import EnvironmentSetupError
from frameworm.launch.environment import ProcessInfo
from frameworm.launch.stores import host_store, join_store, open_store

Answer = Callable[[socket.socket], None]


def silent(_: socket.socket) -> None:
    """Accept, and say nothing."""


def answers_like_a_web_server(client: socket.socket) -> None:
    client.recv(100)
    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    client.close()


def hangs_up(client: socket.socket) -> None:
    client.close()


@pytest.fixture
def foreign_port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A port on which a program listens that is no store."""
    answer: Answer = request.param
    clients: list[socket.socket] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    client = listener.accept()[0]
                    clients.append(client)
                    client.settimeout(5.0)
                    answer(client)
                except OSError:
                    if listener.fileno() < 0:
                        return

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
    server.join(20.0)  # it may have taken another client at the last moment
    for client in clients:
        client.close()


@pytest.mark.parametrize("foreign_port", [silent, answers_like_a_web_server, hangs_up], indirect=True)
def test_a_foreign_program_on_the_port_is_told_in_time(
    foreign_port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    info = ProcessInfo(1, 1, 2, 2, master_address="127.0.0.1", master_port=foreign_port)
    began = time.monotonic()
    with pytest.raises(EnvironmentSetupError, match=r"did not answer as rank 0.*set another MASTER_PORT") as caught:
        open_store(info, 2.0)
    assert time.monotonic() - began < 20
    assert "frame #" not in str(caught.value)
    assert "frame #" not in capfd.readouterr().err


def test_nobody_on_the_port_is_told_in_time(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(OSError, match=r"nothing listened there within 1 s.*start rank 0"):
        join_store("127.0.0.1", port, 1.0)
    assert "frame #" not in capfd.readouterr().err


def test_a_host_that_comes_late_is_waited_for() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    hosts = []
    late = threading.Timer(1.0, lambda: hosts.append(host_store("127.0.0.1", port, timedelta(seconds=60))))
    late.start()
    store = join_store("127.0.0.1", port, 60.0)
    store.set("key", "value")
    late.join()
    assert hosts[0].get("key") == b"value"
