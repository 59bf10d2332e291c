"""A process that runs a user's script: started, controlled step by step, and killed."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from frameworm.attach.trial.job import ScriptJob
from frameworm.records.reading import read_tail
from frameworm.tune.scripts.elsewhere import ElsewhereWatch

_LOG_TAIL = 2000
_LOOK_S = 2.0
_GRACE_S = 1.0  # time for the other ranks to report after one has failed
_BY_TORCHRUN = "let torchrun start them: torchrun --nproc-per-node N -m frameworm tune SCRIPT.py"


class ScriptError(Exception):
    """A trial of the script gave no result; the message says why."""


class TrainsElsewhereError(ScriptError):
    """The script trains in processes that it starts itself; `world_size` is their number, 0 without a process group."""

    def __init__(self, world_size: int) -> None:
        if world_size:
            message = f"it trains in {world_size} processes that it starts itself: {_BY_TORCHRUN}"
        else:
            message = (
                "it trains in a process that it starts itself, without a process group: call the function that trains "
                f"directly, or {_BY_TORCHRUN}"
            )
        super().__init__(message)
        self.world_size = world_size


class ScriptEndedError(ScriptError):
    """The script ended; `steps` is the number of updates it made."""

    def __init__(self, message: str, steps: int) -> None:
        super().__init__(message)
        self.steps = steps


@dataclass(frozen=True, slots=True)
class Stand:
    """The report of a script when it pauses.

    Attributes:
        seconds: Duration of the steps since the last pause; None the first time.
        done: Steps so far.
        wait_s: Time spent waiting for batches in these steps.
        samples: Samples that loaders returned in them.
        age_s: Seconds since it imported torch.
        facts: What is known about it; only the first time.
    """

    seconds: float | None
    done: int
    wait_s: float
    samples: int
    age_s: float
    facts: dict[str, Any]


@dataclass
class _End:
    """Our ends of the pipes to a process, and the part of the next line read so far."""

    commands: int
    reports: int
    waiting: bytes = b""


class ScriptProcess:
    """One trial, used in a `with` statement, which kills it and everything it has started.

    Args:
        job: What to run.
        place: Folder for its job and its output.
        deadline: Time of `time.monotonic` at which it counts as hung.
    """

    def __init__(self, job: ScriptJob, place: Path, deadline: float) -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.job = job
        self.log = place / f"{job.name or job.role}.log"
        self._deadline = deadline
        self._has_stood = False
        pipes = [(os.pipe(), os.pipe()) for _ in job.ranks or [{}]]
        commands, reports = [to[0] for to, _ in pipes], [back[1] for _, back in pipes]
        self._ends = [_End(to[1], back[0]) for to, back in pipes]
        path = place / f"{job.name or job.role}.json"
        # Ranks started by a launcher have their own logs, so that one rank's output is not taken as another's error.
        own = [] if job.spawned else [self.log.with_suffix(f".rank{rank}.log") for rank in range(len(job.ranks))]
        self._logs = own or [self.log] * len(pipes)
        logs = [os.open(item, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for item in own]
        replace(job, commands=commands, reports=reports, logs=logs).write(path)
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "frameworm.attach.trial.main", str(path)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(*commands, *reports, *logs),
                    start_new_session=True,
                )
        finally:
            for number in (*commands, *reports, *logs):
                os.close(number)
        self._elsewhere = ElsewhereWatch(self._process.pid)

    def __enter__(self) -> ScriptProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stand(self) -> Stand:
        """Wait until all of its processes pause.

        Raises:
            ScriptError: It ends, fails or hangs instead.
        """
        told = self.hear("stand")
        self._has_stood = True
        seconds = [item["seconds"] for item in told if item["seconds"] is not None]
        return Stand(
            max(seconds, default=None),
            told[0]["done"],
            max(item["wait_s"] for item in told),
            sum(item["samples"] for item in told),
            max(item["age_s"] for item in told),
            {**told[0].get("facts", {}), "world_size": len(told)},
        )

    def go(self, steps: int) -> Stand:
        """Let it run `steps` steps.

        Raises:
            ScriptError: It ends or fails on the way.
        """
        for end in self._ends:
            with suppress(BrokenPipeError):
                os.write(end.commands, json.dumps({"go": steps}).encode() + b"\n")
        return self.stand()

    def hear(self, event: str) -> list[dict[str, Any]]:
        """The next report of a kind from each of its processes; other reports are skipped.

        Raises:
            ScriptError: There is none.
        """
        heard: dict[int, dict[str, Any]] = {}
        while True:
            place, told = self._next([place for place in range(len(self._ends)) if place not in heard])
            if told["event"] == event:
                heard[place] = told
                if len(heard) == len(self._ends):
                    return [heard[place] for place in range(len(heard))]
            if told["event"] == "elsewhere":
                raise TrainsElsewhereError(told["world_size"])
            if told["event"] == "end":
                if told["status"] != "completed":
                    raise ScriptError(self._why_failed(place, told))
                raise ScriptEndedError(_why_ended(told), told["steps"])

    def _next(self, places: Sequence[int]) -> tuple[int, dict[str, Any]]:
        """The next report of one of these processes, and the process's index."""
        while True:
            for place in places:
                end = self._ends[place]
                if b"\n" in end.waiting:
                    line, _, end.waiting = end.waiting.partition(b"\n")
                    return place, json.loads(line)
            left_s = self._deadline - time.monotonic()
            numbers = {self._ends[place].reports: place for place in places}
            begins = self.job.role == "time" and not self._has_stood
            wait_s = min(left_s, _LOOK_S) if begins else left_s
            ready, _, _ = select.select(list(numbers), [], [], max(0.0, wait_s))
            if not ready and wait_s < left_s:
                program = self._elsewhere.look()
                if program is not None:
                    raise ScriptError(
                        f"it waits for a program that it has started, which computes with torch: {program}; tune that "
                        f"one, or {_BY_TORCHRUN}"
                    )
                continue
            if not ready:
                if begins:
                    raise ScriptError(
                        "it had not made its first steps when the time was over; give it a longer --budget"
                    )
                raise ScriptError("it made no further step before its time was over")
            for number in ready:
                read = os.read(number, 65536)
                if not read:
                    raise ScriptError(self._why_gone(numbers[number]))
                self._ends[numbers[number]].waiting += read

    def _why_failed(self, place: int, told: dict[str, Any]) -> str:
        """The message of the process that failed first: the others fail soon after, because it is gone."""
        ended = {place: float(told["at"])}
        ends = min(self._deadline, time.monotonic() + _GRACE_S)
        while True:
            for other, end in enumerate(self._ends):
                heard = [json.loads(line) for line in end.waiting.split(b"\n")[:-1]]
                for item in (item for item in heard if item["event"] == "end"):
                    ended.setdefault(other, math.inf if item["status"] == "completed" else float(item["at"]))
            numbers = {end.reports: other for other, end in enumerate(self._ends) if other not in ended}
            ready, _, _ = select.select(list(numbers), [], [], max(0.0, ends - time.monotonic()))
            if not ready:
                break
            for number in ready:
                read = os.read(number, 65536)
                if not read:  # it died without a report
                    return self._why_gone(numbers[number])
                self._ends[numbers[number]].waiting += read
        tail = self._tail(min(ended, key=ended.__getitem__))
        asks = "; it asks for input: give that as arguments or a file" if "EOFError" in tail else ""
        return f"the script itself fails{tail}{asks}"

    def _why_gone(self, place: int) -> str:
        if len(self._ends) > 1 and not self.job.spawned:
            return f"the process of rank {place} died{self._tail(place)}"
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return f"it closed the files that it was given, and still runs{self._tail()}"
        if code == 0:
            return "its process ended at once: a script that continues in the background cannot be tuned"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"its process died ({how}){self._tail()}"

    def _tail(self, place: int = 0) -> str:
        """The last line printed by one of its processes, if any."""
        with suppress(OSError):
            lines = [line.strip() for line in read_tail(self._logs[place], _LOG_TAIL).splitlines() if line.strip()]
            return f": {lines[-1]}" if lines else ""
        return ""

    def numbers(self) -> list[int]:
        """The ids of the trial's processes, as seen from outside."""
        with suppress(psutil.NoSuchProcess):
            found = psutil.Process(self._process.pid).children(recursive=True)
            return [item.pid for item in found] or [self._process.pid]
        return []

    def close(self) -> None:
        """Kill it; a regular exit would run the script's own exit code."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for end in self._ends:
            os.close(end.commands)
            os.close(end.reports)
        self._ends = []


def _why_ended(told: dict[str, Any]) -> str:
    if not told["imported"]:
        return "the script ended without importing torch: there is no training to tune in this process"
    if not told["steps"] and told["started_processes"]:
        return (
            "no optimizer of torch has stepped in the script's own process, and it has started others. If they train, "
            f"{_BY_TORCHRUN}"
        )
    if not told["steps"]:
        return "the script ended and no optimizer of torch has stepped: there is no training to tune in this process"
    return f"the script ended after {told['steps']} steps"
