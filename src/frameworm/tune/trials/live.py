"""The controlling side of a live run: starts its ranks, lets them run window by window, and removes them again."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from frameworm.config.schema import Config
from frameworm.hardware.host import oom_kills
from frameworm.records.atomic import written_anew
from frameworm.records.reading import read_tail
from frameworm.tune.processes.batch_trial import RankJob
from frameworm.tune.processes.forkserver import BAD_FORK, start, stop_forking, warm_up, without_script
from frameworm.tune.processes.neighbours import Neighbours
from frameworm.tune.processes.process_tree import RankEnd, free_port, judge, remove
from frameworm.tune.trials.live_rank import Go, LiveJob, Lockstep, run_live
from frameworm.tune.trials.outcomes import Failure, FailureKind
from frameworm.tune.trials.warmth import StepNote

_LOG_TAIL = 4000
_GRACE_S = 2.0
_KINDS: dict[str, FailureKind] = {"cuda_oom": "oom", "host_oom": "oom", "hang": "hang"}


class LiveError(Exception):
    """A live run gave no result; `failure` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Stand:
    """The measurements when all ranks have paused again.

    Attributes:
        seconds: Duration of the window; None before the first.
        samples: Samples of the window, over all ranks.
        done: Steps so far.
        age_s: Time since the process began, without pauses.
        ahead_s: How long the device was still busy after the last step.
        notes: The window's steps, if watched; with several ranks those of the slowest.
        disturbed: Fraction of the window lost to other work on the machine; see `Neighbours`.
    """

    seconds: float | None
    samples: int
    done: int
    age_s: float
    ahead_s: float = 0.0
    notes: tuple[StepNote, ...] = ()
    disturbed: float = 0.0


class Live:
    """One live run of a config, with one process per rank; used in a `with` statement.

    Args:
        config: What to run.
        folder: Folder for the ranks' output: `rank-N.log`.
        deadline: Time of `time.monotonic` at which it counts as hung.
        world_size: Ranks.
        limit_bytes: Memory a rank may use in addition to what it has mapped at its start.
        learn_steps: See `LiveJob`.
        lockstep: See `LiveJob`.
        compiled: See `LiveJob`.
        whole_epoch: See `LiveJob`.
        seeds: See `LiveJob`.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        deadline: float,
        *,
        world_size: int = 1,
        limit_bytes: int | None = None,
        learn_steps: int | None = None,
        lockstep: Lockstep | None = None,
        compiled: Path | None = None,
        whole_epoch: bool = False,
        seeds: tuple[int, ...] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._deadline = deadline
        self._given_s = deadline - time.monotonic()
        # The value of `sizes` does not matter: a rank with any size takes part in the process group.
        rank_job = RankJob(config, str(folder), (1,), world_size=world_size, limit_bytes=limit_bytes)
        apart = None if compiled is None else str(compiled.resolve())
        self._job = LiveJob(rank_job, learn_steps, lockstep, apart, whole_epoch, seeds)
        self._processes: list[BaseProcess] = []
        self._links: list[Connection] = []
        self._forks = True
        self._oom_kills = oom_kills()
        self._start()

    def _start(self) -> None:
        world_size = self._job.rank_job.world_size
        job = replace(self._job, rank_job=replace(self._job.rank_job, port=free_port() if world_size > 1 else 0))
        server = warm_up(["frameworm.tune.trials.live_rank"])
        for rank in range(world_size):
            with written_anew(self.folder / f"rank-{rank}.log"):
                pass
            link, other = server.Pipe()
            process = server.Process(target=run_live, args=(job, rank, other))
            with without_script():
                start(process)
            other.close()
            self._processes.append(process)
            self._links.append(link)

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [process.pid for process in self._processes if process.pid is not None]

    def stand(self) -> Stand:
        """Wait until all ranks pause.

        Raises:
            LiveError: They end, fail or hang instead.
        """
        stands = self._expect("stand")
        seconds = [item["seconds"] for item in stands if item["seconds"] is not None]
        age_s = max(item["age_s"] for item in stands)
        ahead_s = min(item["ahead_s"] for item in stands)
        notes = [
            StepNote(max(note.host_s for note in step), min(note.visits for note in step))
            for step in zip(*(item["notes"] for item in stands))
        ]
        first = stands[0]
        return Stand(max(seconds, default=None), first["samples"], first["done"], age_s, ahead_s, tuple(notes))

    def go(self, lead_in: int, steps: int, *, watched: bool = False) -> Stand:
        """Run one window; see `stand`. With `watched`, each step is reported."""
        neighbours = Neighbours(self.pids)
        self._send(Go(lead_in, steps, watched))
        return replace(self.stand(), disturbed=neighbours.disturbance())

    def finish(self) -> list[Any]:
        """Let the run end regularly, and return each rank's result.

        Raises:
            LiveError: It fails.
        """
        if self._job.learn_steps is None and self._job.lockstep is None:
            self._send(None)
        return self._expect("done")

    def close(self) -> None:
        """Remove all processes."""
        for link in self._links:
            link.close()
        remove(self._processes)
        for process in self._processes:
            process.close()
        self._processes, self._links = [], []

    def _send(self, word: Go | None) -> None:
        for link in self._links:
            with suppress(OSError):  # a rank that is gone is noticed on receiving
                link.send(word)

    def _expect(self, kind: str) -> list[Any]:
        """One message of that kind from every rank."""
        told: dict[int, Any] = {}
        failed: dict[int, dict[str, Any]] = {}
        lost: set[int] = set()  # ranks that ended without a message
        deadline = self._deadline
        while len(told) < len(self._links):
            left_s = deadline - time.monotonic()
            silent = [rank for rank in range(len(self._links)) if not (rank in told or rank in failed or rank in lost)]
            links = {self._links[rank]: rank for rank in silent}
            ends = {process.sentinel: rank for rank, process in enumerate(self._processes) if rank in silent}
            ready = wait([*links, *ends], timeout=max(0.0, left_s))
            for rank in silent:
                # Messages sent before a process ended can still be received.
                if self._links[rank].poll():
                    self._receive(rank, self._links[rank], kind, told, failed, lost)
                elif self._processes[rank].sentinel in ready:
                    lost.add(rank)
            if lost and self._bad_fork():
                told, failed, lost = {}, {}, set()
                continue
            if failed or lost:
                # Wait for the other ranks' messages too: they often hang in a collective.
                if len(failed) + len(lost) + len(told) == len(self._links) or deadline < time.monotonic():
                    raise LiveError(self._why(failed, in_time=True))
                deadline = min(deadline, time.monotonic() + _GRACE_S)
            elif left_s <= 0:
                raise LiveError(self._why(failed, in_time=False))
        return [told[rank] for rank in sorted(told)]

    def _receive(
        self,
        rank: int,
        link: Connection,
        kind: str,
        told: dict[int, Any],
        failed: dict[int, dict[str, Any]],
        lost: set[int],
    ) -> None:
        try:
            word, facts = link.recv()
        except (EOFError, OSError):
            self._processes[rank].join(_GRACE_S)
            lost.add(rank)
            return
        if word == kind:
            told[rank] = facts
        elif word == "failed":
            failed[rank] = facts
        else:
            failed[rank] = {"kind": None, "message": f"ended early, at {word}", "consequence": False}

    def _bad_fork(self) -> bool:
        """Restart without the server if its processes cannot use CUDA."""
        if not self._forks or BAD_FORK not in [process.exitcode for process in self._processes]:
            return False
        stop_forking()
        self._forks = False
        self.close()
        self._start()
        return True

    def _why(self, failed: dict[int, dict[str, Any]], *, in_time: bool) -> Failure:
        ends = [
            RankEnd(
                rank,
                1 if rank in failed else process.exitcode,
                {"failure": failed[rank]} if rank in failed else {},
                self._log(rank),
            )
            for rank, process in enumerate(self._processes)
        ]
        refused = [item for item in failed.values() if item.get("refused")]
        if refused:
            return Failure("not_applicable", refused[0]["message"])
        verdict = judge(ends, in_time, oom_kills() > self._oom_kills, self._given_s)
        return Failure(_KINDS.get(verdict.outcome, "crash"), verdict.message or verdict.outcome)

    def _log(self, rank: int) -> str:
        with suppress(OSError):
            return read_tail(self.folder / f"rank-{rank}.log", _LOG_TAIL)
        return ""
