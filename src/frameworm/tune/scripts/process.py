"""A process that runs a user's script: started, told to go, listened to and killed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from frameworm.attach.trial.job import TrialJob
from frameworm.records.reading import read_tail

_LOG_TAIL = 2000


class ScriptError(Exception):
    """A trial of the script gave no answer; the message says why."""


class ScriptEndedError(ScriptError):
    """The script came to its end; `steps` says after how many updates."""

    def __init__(self, message: str, steps: int) -> None:
        super().__init__(message)
        self.steps = steps


@dataclass(frozen=True, slots=True)
class Stand:
    """What a script has told when it stood.

    Attributes:
        seconds: Of the steps since it stood last; None the first time.
        done: Steps so far.
        wait_s: How long it waited for batches in these steps.
        samples: Samples that loaders gave in them.
        age_s: Since it has imported torch.
        facts: What is known about it, the first time.
    """

    seconds: float | None
    done: int
    wait_s: float
    samples: int
    age_s: float
    facts: dict[str, Any]


class ScriptProcess:
    """One trial; to be used in a `with` statement, which kills it and all that it has started.

    Args:
        job: What to run.
        place: Folder for its job and its output.
        deadline: Time of `time.monotonic` at which it counts as hung.
    """

    def __init__(self, job: TrialJob, place: Path, deadline: float) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.job = job
        self.log = place / f"{job.name or job.role}.log"
        self._deadline = deadline
        self._waiting = b""
        commands, self._commands = os.pipe()
        self._reports, reports = os.pipe()
        path = place / f"{job.name or job.role}.json"
        replace(job, commands=commands, reports=reports).write(path)
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "frameworm.attach.trial.main", str(path)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(commands, reports),
                    start_new_session=True,
                )
        finally:
            os.close(commands)
            os.close(reports)

    def __enter__(self) -> ScriptProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stand(self) -> Stand:
        """Wait until it stands.

        Raises:
            ScriptError: It does not.
        """
        told = self.hear("stand")
        return Stand(
            told["seconds"], told["done"], told["wait_s"], told["samples"], told["age_s"], told.get("facts", {})
        )

    def go(self, steps: int) -> Stand:
        """Let it make so many steps.

        Raises:
            ScriptError: It ends or fails on the way.
        """
        with suppress(BrokenPipeError):
            os.write(self._commands, json.dumps({"go": steps}).encode() + b"\n")
        return self.stand()

    def hear(self, event: str) -> dict[str, Any]:
        """The next report of a kind; others before it are passed over.

        Raises:
            ScriptError: There is none.
        """
        while True:
            told = self._next()
            if told["event"] == event:
                return told
            if told["event"] == "end":
                if told["status"] != "completed":
                    tail = self._tail()
                    asks = "; it asks for input: give that as arguments or a file" if "EOFError" in tail else ""
                    raise ScriptError(f"the script itself fails{tail}{asks}")
                raise ScriptEndedError(_why_ended(told), told["steps"])

    def _next(self) -> dict[str, Any]:
        while b"\n" not in self._waiting:
            left_s = self._deadline - time.monotonic()
            ready, _, _ = select.select([self._reports], [], [], max(0.0, left_s))
            if not ready:
                raise ScriptError("it made no further step before its time was over")
            read = os.read(self._reports, 65536)
            if not read:
                raise ScriptError(self._why_gone())
            self._waiting += read
        line, _, self._waiting = self._waiting.partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        return told

    def _why_gone(self) -> str:
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return f"it closed the files that it was given, and still runs{self._tail()}"
        if code == 0:
            return "its process ended at once: where it goes on in the background it cannot be tuned; let it stay"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"its process died ({how}){self._tail()}"

    def _tail(self) -> str:
        """The last line that it has printed, if any."""
        with suppress(OSError):
            lines = [line.strip() for line in read_tail(self.log, _LOG_TAIL).splitlines() if line.strip()]
            return f": {lines[-1]}" if lines else ""
        return ""

    def close(self) -> None:
        """Kill it: an end by itself would run what the script has left for its end."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for number in (self._commands, self._reports):
            with suppress(OSError):
                os.close(number)
        self._commands = self._reports = -1


def _why_ended(told: dict[str, Any]) -> str:
    if not told["imported"]:
        return "the script ended without importing torch: there is no training to tune in this process"
    if not told["steps"]:
        return "the script ended and no optimizer of torch has stepped: there is no training to tune in this process"
    return f"the script ended after {told['steps']} steps"
