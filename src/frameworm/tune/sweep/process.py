"""One training of a sweep, in a process that ends with the sweep."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from frameworm.errors import TrainingInterruptedError, TrainingPreemptedError
from frameworm.records.atomic import written_anew
from frameworm.records.reading import read_tail

_PR_SET_PDEATHSIG = 1
STOP_GRACE_S = 45.0  # the launcher gives its workers 30 s to save
_LAST_BYTES = 2**16


class _Stopped(BaseException):
    """The sweep received a signal to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_to_end(command: Sequence[str], log: Path, keep_open: int | None = None) -> tuple[int, str]:
    """Run a command to its end, with its output in a file.

    Args:
        command: Program and arguments.
        log: Receives stdout and stderr.
        keep_open: A file descriptor that stays open in the process, so that a lock on it lasts as long as the process.

    Returns:
        Exit code (negative: a signal), and the last line of output.

    Raises:
        TrainingInterruptedError: Ctrl-C; the process has ended.
        TrainingPreemptedError: SIGTERM; the process has ended.
    """
    with written_anew(log) as output, _signals_raise():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it gets a Ctrl-C only once, from us
            pass_fds=() if keep_open is None else (keep_open,),
            preexec_fn=_end_with_parent(),
        )
        try:
            code = process.wait()
        except _Stopped as stop:
            _stop(process, stop.number)
            again = "continue it with --resume"
            if stop.number == signal.SIGINT:
                raise TrainingInterruptedError(f"interrupted: completed runs are kept; {again}") from None
            raise TrainingPreemptedError(f"told to stop: completed runs are kept; {again}") from None
        except BaseException:
            _stop(process, signal.SIGTERM)
            raise
    return code, _last_line(log)


def _stop(process: subprocess.Popen[bytes], number: int) -> None:
    """Pass a signal on; if the process has not ended in time, kill it with all its children."""
    with suppress(ProcessLookupError):
        process.send_signal(number)
    with suppress(subprocess.TimeoutExpired, _Stopped):
        process.wait(STOP_GRACE_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into an exception; the previous handlers are restored."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_parent() -> Callable[[], None] | None:
    """Make the kernel send the process SIGTERM if the sweep dies without stopping it."""
    if sys.platform != "linux":
        return None
    # Loaded before the fork: afterwards an import or allocation may wait for a lock held by another thread.
    control = ctypes.CDLL(None).prctl
    return lambda: control(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) and None


def _last_line(log: Path) -> str:
    """The last line of output; of a progress line that overwrites itself, its last state."""
    last = [line.strip() for line in read_tail(log, _LAST_BYTES).split("\n") if line.strip()]
    return last[-1].rpartition("\r")[2] if last else "it said nothing"
