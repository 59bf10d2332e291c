"""Whoever writes checkpoints, seen from training: a process of its own, or this one."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from frameworm.engine.checkpoint.rank_writer import ShareWriter
from frameworm.engine.checkpoint.writer_process import perform
from frameworm.errors import CheckpointError

# Signals first: what stops training must not end the writer, not even while it starts.
_PROGRAM = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sys.path[:] = {path!r}
from {module} import main
main({arguments})
"""
_WRITER = "frameworm.engine.checkpoint.writer_process"
_END_S = 5.0


def start_process(module: str, *arguments: object, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start `main` of a module in a process of its own, which takes orders from a pipe and answers on another.

    Raises:
        OSError: It cannot be started; also ValueError and TypeError.
    """
    program = _PROGRAM.format(
        path=sys.path, module=module, arguments=", ".join(map(repr, arguments)), parent=os.getpid()
    )
    # Isolated and without site-packages' start-up files: it imports only what is in sys.path above, at once.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=pass_fds,
        bufsize=0,
    )


class WriterGoneError(Exception):
    """The writing process is not there (any more)."""


class SharedMemory:
    """Memory that another process can read: it has no name, and is gone when both are."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("frameworm-checkpoint", os.MFD_CLOEXEC)
        self.size_bytes = 0
        self.mapped: mmap.mmap | None = None
        self._filled: set[tuple[int, int]] = set()

    def grow(self, size_bytes: int) -> bool:
        """At least so large; what was in it is there still. True where it had to be mapped anew."""
        if size_bytes <= self.size_bytes:
            return False
        page = mmap.PAGESIZE
        self.size_bytes = -(-size_bytes // page) * page
        os.ftruncate(self.descriptor, self.size_bytes)
        self.mapped = mmap.mmap(self.descriptor, self.size_bytes)
        return True

    def fill(self, place: int, size_bytes: int) -> None:
        """Have real memory behind a stretch of it.

        Raises:
            OSError: There is not enough; without this call a write to it would end the process.
        """
        if size_bytes and (place, size_bytes) not in self._filled:
            os.posix_fallocate(self.descriptor, place, size_bytes)
            self._filled.add((place, size_bytes))

    def close(self) -> None:
        """Give it back; what is still mapped goes with its last user."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self.mapped = None


class HereWriter:
    """Writes in this process."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._share_writer = ShareWriter()

    def perform(self, order: dict[str, Any], taken: Callable[[], None]) -> dict[str, Any]:
        """Do it, and say what came of it."""
        return perform(order, self._memory.descriptor, self._share_writer, taken)


class ProcessWriter:
    """Has a process of its own write."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; it gets ready by itself.

        Raises:
            WriterGoneError: It cannot be started.
        """
        memory = self._memory.descriptor
        try:
            self._process = start_process(_WRITER, memory, os.getpid(), pass_fds=[memory])
        except (OSError, ValueError, TypeError) as error:
            raise WriterGoneError(f"cannot be started: {error}") from None

    def perform(self, order: dict[str, Any], taken: Callable[[], None]) -> dict[str, Any]:
        """Hand over an order and wait for the answer.

        Raises:
            WriterGoneError: It is not there (any more).
        """
        if self._closed:
            raise WriterGoneError("has been ended")
        if self._process is None:
            self.start()
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            line = memoryview(json.dumps(order).encode() + b"\n")
            while line:
                line = line[self._process.stdin.write(line) or 0 :]
            answer: dict[str, Any] = {"taken": 1}
            unread = b""
            while "taken" in answer:
                while b"\n" not in unread:
                    content = self._process.stdout.read(2**20)
                    if not content:
                        raise WriterGoneError(f"has ended ({self._exit_code()})")
                    unread += content
                first, unread = unread.split(b"\n", 1)
                answer = json.loads(first)
                if "taken" in answer:
                    taken()
            return answer
        except (OSError, ValueError):
            raise WriterGoneError(f"has ended ({self._exit_code()})") from None

    def _exit_code(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "its pipe is closed"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    @property
    def process_id(self) -> int | None:
        """Of the process, once it has been started."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End it; it has nothing to do, or will not get it done."""
        self._closed = True
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError, ValueError):
            process.stdin.write(b"{}\n")  # somebody who was forked meanwhile may hold the pipe open
        process.stdin.close()
        for _ in range(2):
            try:
                process.wait(_END_S)
                process.stdout.close()
                return
            except subprocess.TimeoutExpired:
                process.kill()
        process.returncode = -9  # in the middle of a call to a storage that hangs: nobody can wait for it


class Writer:
    """Has checkpoints written by a process beside training, and by this one where that is not there.

    Args:
        memory: Where the tensors are.
        beside: Use a process of its own, started when it is first needed.
        say: Told when that process is gone.
    """

    def __init__(self, memory: SharedMemory, *, beside: bool, say: Callable[[str], None]) -> None:
        self._here = HereWriter(memory)
        self._process = ProcessWriter(memory) if beside else None
        self._say = say
        self._closed = False

    def start(self) -> None:
        """Start the process, if there is to be one; where it cannot be started, `perform` finds out."""
        if self._process is not None and self._process.process_id is None:
            with suppress(WriterGoneError):
                self._process.start()

    def stay_here(self) -> None:
        """Start no process, if none has been started."""
        assert self.process_id is None
        self._process = None

    @property
    def beside(self) -> bool:
        """Whether training need not wait."""
        return self._process is not None

    @property
    def process_id(self) -> int | None:
        """Of the writing process, if it runs."""
        return None if self._process is None else self._process.process_id

    def perform(
        self,
        order: dict[str, Any],
        taken: Callable[[], None] = lambda: None,
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> dict[str, Any]:
        """Have it done and return the answer; where the process has died, do it here, from now on.

        Args:
            order: What to do.
            taken: Called when the memory is no longer needed.
            may_repeat: Whether the memory still holds what the order is about.

        Raises:
            CheckpointError: It was not done.
        """
        if self._process is not None:
            try:
                return self._process.perform(order, taken)
            except WriterGoneError as error:
                if self._closed:
                    raise CheckpointError("the training has ended") from None
                self._say(
                    f"the process that writes checkpoints {error}: training writes them itself from now on, and waits"
                )
                self._process.close()
                self._process = None
                if not may_repeat():
                    raise CheckpointError("the process that wrote it has died") from None
        return self._here.perform(order, taken)

    def close(self) -> None:
        """End the process."""
        self._closed = True
        if self._process is not None:
            self._process.close()
