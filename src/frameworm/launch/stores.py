"""Key-value stores through which the ranks of a job find each other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from frameworm.errors import EnvironmentSetupError
from frameworm.launch.environment import ProcessInfo, agent_hosts_store, launch_id, restart_count
from frameworm.records.atomic import check_private, private_folder, replacing
from frameworm.records.reading import read_text

__all__ = ["PrefixStore", "Store", "TCPStore", "first_line", "host_store", "join_store", "open_store"]


def open_store(info: ProcessInfo, limit_s: float) -> Store:
    """Open the store of this job.

    Args:
        info: This process's place in the job.
        limit_s: Longest wait for the others.

    Returns:
        The store, without values from other jobs or earlier rounds of this one.

    Raises:
        EnvironmentSetupError: The processes cannot find each other.
    """
    if info.world_size == 1:
        return HashStore()
    if info.master_address is None or info.master_port is None:
        return _open_spawn_store(info, limit_s)
    is_master = info.rank == 0 and not agent_hosts_store()
    try:
        if is_master:
            store = host_store(info.master_address, info.master_port, timedelta(seconds=limit_s), info.world_size)
        else:
            store = join_store(info.master_address, info.master_port, limit_s, info.world_size)
    except (DistError, OSError) as error:
        doing = "listen on" if is_master else "join the job at"
        raise EnvironmentSetupError(
            f"rank {info.rank} cannot {doing} {info.master_address}:{info.master_port} (MASTER_ADDR, MASTER_PORT): "
            f"{first_line(error)}"
        ) from error
    # Restarted workers must not read what the previous round left in the agent's store, nor what a worker of an earlier
    # job writes that is still running and takes this store for its own.
    return PrefixStore(f"workers-{launch_id() or ''}-{restart_count()}", store)


def host_store(address: str, port: int, timeout: timedelta, world_size: int | None = None) -> TCPStore:
    """Open a store that listens on one address only; torch's own accepts connections from every network of the machine.

    Args:
        address: Name or address of this machine.
        port: Port; 0 for any free one.
        timeout: Longest wait of an operation.
        world_size: Number of clients, if known.

    Raises:
        OSError: The address is not this machine's, or the port is taken.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(512)
        # The store takes ownership of the descriptor and closes it.
        return TCPStore(
            address,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )


def join_store(address: str, port: int, limit_s: float, world_size: int | None = None) -> TCPStore:
    """Join the store that another process of this job hosts.

    If a host accepts the connection but never answers, torch waits without a deadline; if it answers with something
    else, torch prints C++ frames. So torch connects in a thread that can be abandoned, and its output is shown only on
    success.

    Args:
        address: Name or address of the host.
        port: Its port.
        limit_s: Longest wait, now and later for each operation.
        world_size: Number of clients, if known.

    Raises:
        OSError: Nothing listens there within the limit, or the listener is not a store.
    """
    made: list[TCPStore] = []
    failures: list[Exception] = []

    def connect() -> None:
        timeout = timedelta(seconds=limit_s)
        try:
            made.append(TCPStore(address, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False))
        except Exception as error:
            failures.append(error)

    with _standard_error_held_back() as show:
        thread = threading.Thread(target=connect, name="join store", daemon=True)
        thread.start()
        deadline = time.monotonic() + limit_s
        while thread.is_alive() and time.monotonic() < deadline:  # in short waits, so that Ctrl-C works meanwhile
            thread.join(0.1)
        if made:
            show()
            return made[0]
    why = f" ({first_line(failures[0])})" if failures else ""
    if _accepts_connections(address, port):
        raise OSError(
            f"a program accepts connections there, but did not answer as rank 0 of this job within {limit_s:.0f} s"
            f"{why}; if another program uses the port, set another MASTER_PORT for all ranks"
        )
    raise OSError(
        f"nothing listened there within {limit_s:.0f} s{why}; start rank 0 on that host, and check that no firewall "
        "closes the port"
    )


@contextlib.contextmanager
def _standard_error_held_back() -> Iterator[Callable[[], None]]:
    """Hold back everything this process writes to standard error, unless `show` is called."""
    shown = False

    def show() -> None:
        nonlocal shown
        shown = True

    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield show
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            if shown:
                held.seek(0)
                with os.fdopen(2, "wb", closefd=False) as screen:
                    shutil.copyfileobj(held, screen)


def _accepts_connections(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True


def _open_spawn_store(info: ProcessInfo, limit_s: float) -> Store:
    """Store for `torch.multiprocessing.spawn`: rank 0 listens on any free port and writes it to a file for others."""
    note = _spawn_note(info)
    limit_s = min(limit_s, 300.0)
    deadline = time.monotonic() + limit_s
    timeout = timedelta(seconds=limit_s)
    if info.rank == 0:
        store = host_store("127.0.0.1", 0, timeout)
        with replacing(note) as file:  # so that no one reads half of it
            file.write(str(store.port).encode())
    else:
        while (port := _read_port(note)) is None:
            if time.monotonic() > deadline:
                raise EnvironmentSetupError(
                    f"rank {info.rank} heard nothing from rank 0 within {limit_s:.0f} s. Start all {info.world_size} "
                    "processes by one torch.multiprocessing.spawn, or set MASTER_ADDR and MASTER_PORT."
                )
            time.sleep(0.02)
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    if store.add(f"rank-{info.rank}", 1) > 1:
        raise EnvironmentSetupError(
            f"two processes claim to be rank {info.rank}: spawn jobs were started at the same moment from threads of "
            "one process; set MASTER_ADDR and a MASTER_PORT of its own for each"
        )
    store.add("joined", 1)
    if info.rank == 0:
        try:
            while store.add("joined", 0) < info.world_size:
                if time.monotonic() > deadline:
                    raise EnvironmentSetupError(
                        f"only {store.add('joined', 0)} of {info.world_size} processes came within {limit_s:.0f} s"
                    )
                time.sleep(0.01)
        finally:
            note.unlink(missing_ok=True)
    return store


def _spawn_note(info: ProcessInfo) -> Path:
    """Return a file name that is the same for all processes of one spawn, and unique to it."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        raise EnvironmentSetupError(
            f"rank {info.rank} does not know where the other {info.world_size - 1} processes are. Start them with "
            "torchrun (or `frameworm train --distributed`), with torch.multiprocessing.spawn, or set MASTER_ADDR and "
            "MASTER_PORT for each."
        )
    # Children are numbered in the order of their start, so this number is the same for all ranks of one spawn.
    *above, own = multiprocessing.current_process()._identity
    family = "-".join(str(number) for number in [*above, own - info.rank])
    started = int(psutil.Process(parent.pid).create_time() * 1000)
    try:
        return private_folder() / f"spawn-{parent.pid}-{started}-{family}-{info.world_size}"
    except OSError as error:
        raise EnvironmentSetupError(f"cannot use {error.filename}: {error.strerror}") from None


def _read_port(note: Path) -> int | None:
    """Return the port that rank 0 has written; None if it has not, or if the folder is not private to this user."""
    try:
        check_private(note.parent)
        return int(read_text(note))
    except (OSError, ValueError):
        return None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, because torch's messages continue with C++ frames."""
    return (str(error).splitlines() or [type(error).__name__])[0]
