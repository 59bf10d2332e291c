"""Two gloo ranks that serve one function call after another: starting processes for every cell would cost most of all.

A call that fails in an unforeseen way, hangs or kills a rank costs this pair; the next call gets a new one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

RANKS = 2
GRACE_S = 5.0  # what the other rank gets once one has failed
GROUP_TIMEOUT_S = 120.0


class RankError(Exception):
    """A rank did not answer in time, or not at all."""


class RankPair:
    """Runs functions on two ranks; leaves no process behind.

    Args:
        context: Starts the processes; a server that has imported torch unless given.
    """

    def __init__(self, context: Any = None) -> None:
        self._context = context
        if context is None:
            self._context = multiprocessing.get_context("forkserver")
            ours = ["frameworm.distributed", "frameworm.engine.run", "frameworm.parallel.sharded"]
            self._context.set_forkserver_preload(["torch", "torch._dynamo", *ours])
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> RankPair:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop(orderly=True)

    def call(self, function: Callable[..., Any], *args: Any, deadline_s: float = 120.0) -> list[Any]:
        """The results of `function(rank, *args)` on both ranks.

        Raises:
            RankError: A rank raised, ended or was too late; the message has its traceback.
        """
        if not self._processes:
            self._start()
        try:
            for connection in self._connections:
                connection.send((function, args))
            return self._results(time.monotonic() + deadline_s)
        except BaseException:
            self.stop()
            raise

    def _results(self, deadline: float) -> list[Any]:
        answers: dict[int, Any] = {}
        failures: list[str] = []
        while len(answers) < RANKS and time.monotonic() < deadline:
            waiting = {connection: rank for rank, connection in enumerate(self._connections) if rank not in answers}
            for connection in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                rank = waiting[connection]  # type: ignore[index]
                try:
                    succeeded, answers[rank] = connection.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    succeeded, answers[rank] = False, "it ended without an answer"
                if not succeeded:
                    failures.append(f"rank {rank}: {answers[rank]}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        late = [str(rank) for rank in range(RANKS) if rank not in answers]
        if late and not failures:
            failures.append(f"rank {' and '.join(late)}: no answer in time")
        if failures:
            raise RankError("\n".join(failures))
        return [answers[rank] for rank in range(RANKS)]

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank in range(RANKS):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, theirs, environ))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def stop(self, orderly: bool = False) -> None:
        """End both ranks, with all that they started.

        Args:
            orderly: They wait for the next call, so they can end by themselves.
        """
        for connection in self._connections:
            connection.close()
        if orderly:
            for process in self._processes:
                process.join(GRACE_S)
        family: list[psutil.Process] = []
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank = psutil.Process(process.pid)
                family += [*rank.children(recursive=True), rank]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        for process in self._processes:
            process.join(10)
        self._processes, self._connections = [], []


def _serve(rank: int, connection: Connection, environ: dict[str, str]) -> None:
    """Body of a rank: answer calls until the other end of the connection is gone."""
    os.environ.clear()
    os.environ.update(environ)
    multiprocessing.set_start_method("fork", force=True)  # as in a process that a user starts; here it were forkserver
    import torch

    from frameworm.distributed import cleanup, setup_ddp

    torch.set_num_threads(1)
    setup_ddp(rank, RANKS, backend="gloo", timeout_s=GROUP_TIMEOUT_S)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            function, args = connection.recv()
            try:
                answer = (True, function(rank, *args))
            except BaseException:
                answer = (False, traceback.format_exc())
            connection.send(answer)
    cleanup(aborting=True)
