"""The processes of one trial: started, watched against a deadline, judged, and removed with everything they started."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from frameworm.hardware.host import oom_kills
from frameworm.records.reading import read_json, read_tail
from frameworm.scaling.batch_search import Outcome
from frameworm.tune.processes.batch_trial import RankJob, out_of_in, run_rank
from frameworm.tune.processes.forkserver import (
    BAD_FORK,
    refers_to_main,
    start,
    stop_forking,
    warm_up,
    without_script,
)

# Time for the other ranks to report as well after one has failed; they often hang in a collective.
_GRACE_S = 2.0
_LOG_TAIL = 4000
_LOST = 255  # multiprocessing's exit code for a process whose server is gone


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: The rank.
        exit_code: Negative: killed by that signal; None: it was still running and was removed.
        result: The result it wrote.
        log: The end of its log.
    """

    rank: int
    exit_code: int | None
    result: dict[str, Any] = field(default_factory=dict)
    log: str = ""

    @property
    def failure(self) -> dict[str, Any] | None:
        """The exception that it recorded."""
        return self.result.get("failure")


@dataclass(frozen=True)
class Verdict:
    """The outcome of a trial, decided by the worst rank."""

    outcome: Outcome
    message: str | None = None
    rank: int | None = None


def run_family(job: RankJob, deadline_s: float, ranks: int | None = None) -> tuple[list[RankEnd], Verdict]:
    """Run the ranks of a job until they end, one fails or the deadline passes; no process is left behind.

    Args:
        job: The job.
        deadline_s: Time limit.
        ranks: Start only the first `ranks` ranks; None: all.
    """
    before = oom_kills()
    server = warm_up()
    needs_script = job.payload is not None and refers_to_main(job.payload)
    started: list[BaseProcess] = []
    try:
        for rank in range(ranks or job.world_size):
            process = server.Process(target=run_rank, args=(job, rank))
            with nullcontext() if needs_script else without_script():
                start(process)
            started.append(process)
        in_time = _wait(started, deadline_s)
        codes = [one.exitcode for one in started]
    finally:
        remove(started)
    ends = [_end(job, rank, code) for rank, code in enumerate(codes)]
    for ended in started:
        ended.close()
    if BAD_FORK in codes:
        stop_forking()
        return run_family(job, deadline_s, ranks)
    return ends, judge(ends, in_time, oom_kills() > before, deadline_s)


def _wait(processes: Sequence[BaseProcess], deadline_s: float) -> bool:
    """Wait until all have ended or one has failed; returns False if time ran out first."""
    deadline = time.monotonic() + deadline_s
    failed = False
    while any(process.exitcode is None for process in processes):
        if not failed and any(process.exitcode not in (None, 0) for process in processes):
            failed, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() >= deadline:
            return failed
        time.sleep(0.02)
    return True


def remove(processes: Sequence[BaseProcess]) -> None:
    """Kill the ranks and everything they have started, including orphans."""
    ranks = [process.pid for process in processes if process.pid is not None]
    doomed: dict[int, psutil.Process] = {}
    for pid in ranks:
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(pid) == pid:  # otherwise the id has been reused by another process
                rank = psutil.Process(pid)
                doomed.update({one.pid: one for one in [*rank.children(recursive=True), rank]})
    for one in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getsid(one.pid) in ranks:
                doomed[one.pid] = one
    for process in processes:
        if process.exitcode is None and process.pid is not None:
            process.kill()
    for one in doomed.values():
        with suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(list(doomed.values()), timeout=10)
    for process in processes:
        process.join(10)


def judge(ends: Sequence[RankEnd], in_time: bool, oom_killed: bool, deadline_s: float) -> Verdict:
    """The outcome of the trial as a whole, and why.

    Args:
        ends: How all ranks ended.
        in_time: Whether the trial ended before the deadline.
        oom_killed: Whether the kernel's OOM killer was active meanwhile.
        deadline_s: The deadline, for the message.
    """
    if in_time and all(end.exit_code == 0 for end in ends):
        return Verdict("fits")
    told = [end for end in ends if end.failure is not None]
    for end in told:
        assert end.failure is not None
        if end.failure["kind"] is not None:
            return Verdict(end.failure["kind"], end.failure["message"], end.rank)
    silent = [end for end in ends if end.exit_code not in (None, 0) and end.failure is None]
    for end in silent:
        kind = out_of_in(end.log)
        if kind is not None:
            return Verdict(kind, _last_line(end.log), end.rank)
    killed = [end for end in silent if end.exit_code == _LOST or (end.exit_code or 0) < 0]
    if killed:
        name = _signal_name(-(killed[0].exit_code or 0))
        if oom_killed and killed[0].exit_code in (-signal.SIGKILL, _LOST):
            return Verdict("host_oom", f"killed by {name} at the memory limit of the cgroup", killed[0].rank)
        return Verdict("killed", f"killed by {name}", killed[0].rank)
    own = [end for end in told if end.failure is not None and not end.failure["consequence"]]
    for end in (*own, *silent):
        message = end.failure["message"] if end.failure else _last_line(end.log)
        return Verdict("error", message, end.rank)
    if not in_time:
        stuck = [end.rank for end in ends if end.exit_code is None]
        return Verdict("hang", f"not done after {deadline_s:.0f} s", stuck[0] if stuck else None)
    end = told[0]
    assert end.failure is not None
    return Verdict("error", end.failure["message"], end.rank)


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _end(job: RankJob, rank: int, code: int | None) -> RankEnd:
    folder = Path(job.folder)
    result: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        result = read_json(folder / f"rank-{rank}.json")
    log = ""
    with suppress(OSError):
        log = read_tail(folder / f"rank-{rank}.log", _LOG_TAIL)
    return RankEnd(rank, code, result, log)


def _last_line(log: str) -> str:
    lines: Iterable[str] = (line.strip() for line in reversed(log.splitlines()))
    return next((line for line in lines if line), "ended without any output")[:500]


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return "an unknown signal"
