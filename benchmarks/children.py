"""Jobs in processes of their own, forked from one that has imported everything: each starts in a fraction of a second.

A job that raises, dies or takes too long fails alone, with its reason.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any

import psutil

# Whether there is a GPU is then asked of NVML: CUDA's own count would be in every child, which then cannot use CUDA.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "frameworm.engine.run",
    "frameworm.engine.memory.planner",
    "frameworm.parallel.sharded",
]
LONGEST_REASON = 600
BAD_FORK = "CUDA was in use where it was forked from"

_way = "forkserver"


class Job:
    """One function in one process.

    Args:
        name: For messages.
        function: Top-level function of a script; its result is picklable.
        arguments: Picklable too.
        limit_s: After that it is killed.
        environ: Variables it gets before anything else happens.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        limit_s: float,
        environ: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self._late = f"not done after {limit_s:.0f} s"
        self._deadline = monotonic() + limit_s
        self._arguments = (function, arguments, environ or {})
        self._outcome: tuple[bool, Any] | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context(_way)
        if _way == "forkserver":
            context.set_forkserver_preload(PRELOADED)
        self._link, other = context.Pipe(duplex=False)
        self._process: Any = context.Process(target=_run, args=(other, *self._arguments))  # type: ignore[attr-defined]
        self._process.start()
        other.close()

    @property
    def link(self) -> Connection:
        """Readable when there is something to `poll` for."""
        return self._link

    def poll(self) -> tuple[bool, Any] | None:
        """None while it runs; then whether it went well, and its result or the reason."""
        global _way
        if self._outcome is None:
            try:
                if self._link.poll():
                    self._outcome = self._link.recv()
                    if self._outcome == (False, BAD_FORK):
                        # Slower: each imports everything anew.
                        _way, self._outcome = "spawn", None
                        self._start()
                elif monotonic() > self._deadline:
                    self._outcome = (False, self._late)
            except (EOFError, OSError):
                self._process.join(5)
                self._outcome = (False, f"its process ended with code {self._process.exitcode}")
            if self._outcome is not None:
                self.end(10 if self._outcome[0] else 1)
        return self._outcome

    def hurry(self, seconds: float, reason: str) -> None:
        """Give it no more than that from now on."""
        if monotonic() + seconds < self._deadline:
            self._deadline, self._late = monotonic() + seconds, reason

    def end(self, patience_s: float = 0.0) -> None:
        """Stop it and whatever it started; to be called at least once."""
        if patience_s:
            self._process.join(patience_s)
        if self._process.is_alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                own = psutil.Process(self._process.pid)
                for member in [*own.children(recursive=True), own]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        member.kill()
            self._process.join(5)
        self._link.close()


def _run(link: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], environ: dict[str, str]) -> None:
    os.environ.update(environ)
    try:
        import torch

        if torch.cuda._is_in_bad_fork():  # type: ignore[no-untyped-call, unused-ignore]
            link.send((False, BAD_FORK))
            return
        outcome: tuple[bool, Any] = (True, function(*arguments))
    except BaseException as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        frame = traceback.extract_tb(error.__traceback__)[-1]
        outcome = (False, f"{text[:LONGEST_REASON]} ({Path(frame.filename).name}:{frame.lineno})")
    with contextlib.suppress(OSError):
        link.send(outcome)
    link.close()
    if not outcome[0]:
        os._exit(1)  # a thread of a collective that nobody will answer would hold the process


def run_all(jobs: list[Job]) -> list[tuple[bool, Any]]:
    """Wait for all; as soon as one has failed the others get a few seconds, for they may wait for it."""
    while True:
        outcomes = [job.poll() for job in jobs]
        if all(outcome is not None for outcome in outcomes):
            return [outcome for outcome in outcomes if outcome is not None]
        if any(outcome is not None and not outcome[0] for outcome in outcomes):
            for job in jobs:
                job.hurry(5, "stopped: another one had failed")
        waiting = [job.link for job, outcome in zip(jobs, outcomes) if outcome is None]
        multiprocessing.connection.wait(waiting, timeout=0.2)
