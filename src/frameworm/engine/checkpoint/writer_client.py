"""The training's interface to the checkpoint writer: a separate process, or this one."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from frameworm.engine.checkpoint.rank_writer import ShardWriter
from frameworm.engine.checkpoint.writer_process import perform
from frameworm.errors import CheckpointError

# Signals first: a signal that stops training must not end the writer, not even while it starts.
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
    """Start a module's `main` in a separate process that reads orders from one pipe and answers on another.

    Raises:
        OSError: If it cannot be started; also ValueError and TypeError.
    """
    program = _PROGRAM.format(
        path=sys.path, module=module, arguments=", ".join(map(repr, arguments)), parent=os.getpid()
    )
    # Isolated and without site-packages' startup files, so it starts at once and imports only from sys.path above.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=pass_fds,
        bufsize=0,
    )


class WriterGoneError(Exception):
    """The writer process did not start or has died."""


class SharedMemory:
    """Memory that another process can read; it has no name and is freed when both processes have ended."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("frameworm-checkpoint", os.MFD_CLOEXEC)
        self.size_bytes = 0
        self.mapped: mmap.mmap | None = None
        self._filled: set[tuple[int, int]] = set()

    def grow(self, size_bytes: int) -> bool:
        """Grow to at least `size_bytes`, keeping the content; return True if it had to be mapped again."""
        if size_bytes <= self.size_bytes:
            return False
        page = mmap.PAGESIZE
        self.size_bytes = -(-size_bytes // page) * page
        os.ftruncate(self.descriptor, self.size_bytes)
        self.mapped = mmap.mmap(self.descriptor, self.size_bytes)
        return True

    def fill(self, place: int, size_bytes: int) -> None:
        """Allocate physical memory for a range.

        Raises:
            OSError: If there is not enough memory; without this call, writing to it would kill the process.
        """
        if size_bytes and (place, size_bytes) not in self._filled:
            os.posix_fallocate(self.descriptor, place, size_bytes)
            self._filled.add((place, size_bytes))

    def close(self) -> None:
        """Release it; mappings still in use last until their last user is done."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self.mapped = None


class HereWriter:
    """Executes write orders in this process."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._share_writer = ShardWriter()

    def perform(self, order: dict[str, Any], taken: Callable[[], None]) -> dict[str, Any]:
        """Execute an order and return the result."""
        return perform(order, self._memory.descriptor, self._share_writer, taken)


class ProcessWriter:
    """Executes write orders in a separate process."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process without waiting until it is ready.

        Raises:
            WriterGoneError: If it cannot be started.
        """
        memory = self._memory.descriptor
        try:
            self._process = start_process(_WRITER, memory, os.getpid(), pass_fds=[memory])
        except (OSError, ValueError, TypeError) as error:
            raise WriterGoneError(f"cannot be started: {error}") from None

    def perform(self, order: dict[str, Any], taken: Callable[[], None]) -> dict[str, Any]:
        """Send an order and wait for the answer.

        Raises:
            WriterGoneError: If the process cannot be started or has died.
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
        """ID of the process, once it has been started."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process, which is idle or will not finish in time."""
        self._closed = True
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError, ValueError):
            process.stdin.write(b"{}\n")  # a process forked meanwhile may hold the pipe open
        process.stdin.close()
        for _ in range(2):
            try:
                process.wait(_END_S)
                process.stdout.close()
                return
            except subprocess.TimeoutExpired:
                process.kill()
        process.returncode = -9  # stuck in a call to storage that hangs, so it cannot be waited for


class Writer:
    """Writes checkpoints in a separate process, and falls back to this one if that has died.

    Args:
        memory: Holds the tensors.
        beside: Whether to use a separate process, started when it is first needed.
        say: Called with a message when that process has died.
    """

    def __init__(self, memory: SharedMemory, *, beside: bool, say: Callable[[str], None]) -> None:
        self._here = HereWriter(memory)
        self._process = ProcessWriter(memory) if beside else None
        self._say = say
        self._closed = False

    def start(self) -> None:
        """Start the separate process, if wanted; if that fails, `perform` handles it."""
        if self._process is not None and self._process.process_id is None:
            with suppress(WriterGoneError):
                self._process.start()

    def stay_here(self) -> None:
        """Write in this process; only allowed before a process has been started."""
        assert self.process_id is None
        self._process = None

    @property
    def beside(self) -> bool:
        """Whether a separate process writes, so that training need not wait."""
        return self._process is not None

    @property
    def process_id(self) -> int | None:
        """ID of the writer process, if it runs."""
        return None if self._process is None else self._process.process_id

    def perform(
        self,
        order: dict[str, Any],
        taken: Callable[[], None] = lambda: None,
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> dict[str, Any]:
        """Execute an order and return the answer; if the process has died, execute in this one from now on.

        Args:
            order: The order.
            taken: Called when the memory is no longer needed.
            may_repeat: Whether the memory still holds the data to write.

        Raises:
            CheckpointError: If the order could not be executed.
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
