"""Which worker failed first, and why.

A worker records the exception it ends with. When one fails, its peers fail moments later on the broken connection. The
launcher reads all records and names the first cause.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from frameworm.errors import FramewormError, TrainingInterruptedError, TrainingPreemptedError
from frameworm.launch.environment import reported_by_launcher

# A failed worker that hangs on exit (in threads of a collective that will never finish) is ended after this time.
LEAVE_WITHIN_S = 8.0

# A peer notices a sudden death within milliseconds, but the launcher only at its next poll.
_NOTICED_LATE_S = 1.0

_CONNECTION_LOST = ("Connection closed by peer", "Connection reset by peer", "gloo/transport", "NCCL error")
_PR_SET_PDEATHSIG = 1
# Errors whose text can be shown to the user without a traceback.
_OURS = (FramewormError, TrainingInterruptedError)
_STOPPED = (TrainingInterruptedError.exit_code, TrainingPreemptedError.exit_code)


@dataclass(frozen=True)
class WorkerFailure:
    """How one worker ended."""

    rank: int
    exit_code: int  # negative: killed by that signal
    observed: float  # time at which the launcher noticed
    stopped_by_launcher: bool = False  # it was still running when the launcher stopped the others
    message: str | None = None  # recorded by the worker itself
    meant_to_exit: int | None = None  # the exit code it was about to use before the launcher stopped it
    trace: str | None = None  # its traceback, if the worker did not print it itself
    time: float | None = None
    consequence: bool = False  # of a kind that another rank's failure causes
    final: bool = False  # a restart would fail in the same way


@dataclass(frozen=True)
class FirstCause:
    """The failure that caused the others."""

    text: str | None  # None: nothing to add, the ranks stopped as requested
    exit_code: int
    trace: str | None = None


@contextmanager
def worker_errors() -> Iterator[None]:
    """Wrap a worker's main function, so that the launcher learns how it ends.

    Under frameworm's launcher, frameworm's own errors, Ctrl-C and the loss of another rank end the process quietly with
    their exit code, because the launcher prints the first cause once for all ranks. Other errors are raised.
    """
    handler = _WorkerErrorHandler()
    if handler.error_file is None:
        yield
        return
    handler.initialize()
    quiet = reported_by_launcher()
    if quiet:
        _end_with_parent()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        exit_code = _exit_code(error)
        handler.record_exception(error)
        _leave_for_certain(exit_code)
        if quiet and (isinstance(error, (FramewormError, KeyboardInterrupt)) or is_consequence(error)):
            raise SystemExit(exit_code) from None
        raise


def report_error(error: BaseException) -> None:
    """Record an error for the launcher, from any thread; without a launcher, do nothing."""
    _WorkerErrorHandler().record_exception(error)


class _WorkerErrorHandler(ErrorHandler):
    """torch's error file, with an exact time and what the launcher needs to distinguish cause and effect."""

    @property
    def error_file(self) -> str | None:
        """Where torch's agent looks for the error; None without an agent."""
        return self._get_error_file_path()

    def record_exception(self, e: BaseException) -> None:
        """Write the exception to the file."""
        if self.error_file is None:
            return
        now = time.time()
        ours = isinstance(e, _OURS)
        callstack = _describe(e) if ours else "".join(traceback.format_exception(e))
        data = {
            "message": {
                "message": _describe(e),
                "extraInfo": {
                    "py_callstack": callstack,
                    "timestamp": str(int(now)),
                    "time": now,
                    "consequence": is_consequence(e),
                    "exit_code": _exit_code(e),
                    "final": isinstance(e, _OURS) and not e.may_heal,
                    "trace": callstack if is_consequence(e) and not ours else None,
                },
            }
        }
        with suppress(OSError):
            Path(self.error_file).write_text(json.dumps(data), encoding="utf-8")


def is_consequence(error: BaseException) -> bool:
    """True if an exception is of the kind that a rank sees when another one has failed."""
    if isinstance(error, (TrainingInterruptedError, TrainingPreemptedError)):
        return True
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, DistError) or (
            isinstance(link, RuntimeError) and any(sign in str(link) for sign in _CONNECTION_LOST)
        ):
            return True
        link = link.__cause__
    return False


def worker_failure(
    rank: int, exit_code: int, error_data: Mapping[str, Any], stopped_by_launcher: bool, observed: float
) -> WorkerFailure:
    """Combine what the launcher saw of a worker with what the worker recorded."""
    message = error_data.get("message")
    extra: Mapping[str, Any] = {}
    text: str | None = None
    if isinstance(message, Mapping):
        extra = message.get("extraInfo") or {}
        text = str(message.get("message"))
    written = extra.get("time", extra.get("timestamp"))
    return WorkerFailure(
        rank=rank,
        exit_code=exit_code,
        observed=observed,
        stopped_by_launcher=stopped_by_launcher,
        message=text,
        trace=extra.get("trace"),
        meant_to_exit=extra.get("exit_code"),
        time=None if written is None else float(written),
        consequence=bool(extra.get("consequence", False)),
        final=bool(extra.get("final", False)),
    )


def first_cause(failures: Iterable[WorkerFailure]) -> FirstCause:
    """Return the failure that caused the others."""
    first = min(failures, key=_precedence)
    if first.message is not None:
        text = first.message
    elif first.exit_code in _STOPPED:
        return FirstCause(None, first.exit_code)
    elif first.exit_code < 0:
        text = f"killed by {_signal_name(-first.exit_code)}"
        if -first.exit_code == signal.SIGKILL:
            text += "; the usual reason is that the machine ran out of memory"
    else:
        text = f"ended with exit code {first.exit_code}"
    code = first.exit_code if first.meant_to_exit is None else first.meant_to_exit
    return FirstCause(f"rank {first.rank}: {text}", code if code > 0 else 1, first.trace)


def _precedence(failure: WorkerFailure) -> tuple[bool, bool, float, int]:
    killed_by_launcher = failure.stopped_by_launcher and failure.message is None
    moment = failure.observed - _NOTICED_LATE_S if failure.time is None else failure.time
    return killed_by_launcher, failure.consequence, moment, failure.rank


def _describe(error: BaseException) -> str:
    if isinstance(error, _OURS):
        return str(error)
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _exit_code(error: BaseException) -> int:
    if isinstance(error, _OURS):
        return error.exit_code
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _leave_for_certain(exit_code: int) -> None:
    """End the process soon even if a regular exit hangs; the launcher stops the other ranks only after that."""

    def leave() -> None:
        time.sleep(LEAVE_WITHIN_S)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(exit_code)

    threading.Thread(target=leave, name="leave_for_certain", daemon=True).start()


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM if the launcher dies without stopping its workers."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
