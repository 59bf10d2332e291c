"""frameworm's own command line in a process of its own, for callers in Python."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from multiprocessing import process
from pathlib import Path

from frameworm.errors import EnvironmentSetupError, StateError, TrainingFailedError
from frameworm.launch.environment import added_to_environment, detect, inside_verb, mark_inside, own_command

_TAIL = 15  # lines
_GRACE_S = 5.0


@contextlib.contextmanager
def starting(verb: str) -> Iterator[None]:
    """Let processes be started for a verb, which they know: one that calls a verb again would start itself endlessly.

    Raises:
        StateError: This is such a process, or one that still imports its script.
        EnvironmentSetupError: No process can be started, or this one is a worker of a launcher.
    """
    if getattr(process.current_process(), "_inheriting", False):
        raise StateError(
            f"{verb}() was called while multiprocessing imports the script again in a process that it has started: put "
            "the call under `if __name__ == '__main__':`"
        )
    outer = inside_verb()
    if outer is not None:
        raise StateError(
            f"{verb}() was called in a process that {outer}() has started, so it would start itself without end: call "
            "it in another file than the one that is run, or under a condition that does not hold there"
        )
    if not sys.executable:
        raise EnvironmentSetupError(
            f"{verb}() starts processes, and this Python is embedded in a program that does not say how "
            "(sys.executable is empty): set sys.executable to a Python interpreter"
        )
    if detect().world_size > 1:
        raise EnvironmentSetupError(
            f"{verb}() starts its processes itself: call it in one process, without torchrun or srun"
        )
    with added_to_environment(mark_inside(verb)):
        yield


def run_own(arguments: list[str], output: Path) -> None:
    """Run frameworm with arguments of its command line, to its end.

    Args:
        arguments: The verb and what follows it.
        output: File for all that is printed.

    Raises:
        EnvironmentSetupError: The process cannot be started.
        TrainingFailedError: It ended with an error; the message has its last lines.
    """
    try:
        with output.open("wb") as file:
            child = subprocess.Popen(
                own_command(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a notebook interrupts this process alone, which then ends the whole group
            )
    except OSError as error:
        raise EnvironmentSetupError(f"cannot start {sys.executable}: {error.strerror or error}") from error
    try:
        code = child.wait()
    except BaseException:
        _end(child)
        raise
    if code != 0:
        with output.open(encoding="utf-8", errors="replace") as file:
            last = "".join(deque(file, _TAIL)).strip()
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise TrainingFailedError(f"it ended with {ended}, and said ({output}):\n{last}")


def _end(child: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
