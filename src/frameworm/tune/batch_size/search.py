"""The batch-size finder: the largest micro-batch that fits and the fastest, by trials of the real step.

Every trial is a group of processes with a deadline (`tune.processes`), so a size that runs out of memory, crashes or
hangs costs only that trial. It starts from the planner's guess, so that few trials are needed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

import psutil

from frameworm.config.schema import Config
from frameworm.errors import ConfigError, TrainingFailedError
from frameworm.hardware.resolve import resolve_here
from frameworm.scaling.batch_search import (
    BatchSearch,
    BatchSizeReport,
    BatchTrial,
    Purpose,
    divisors,
)
from frameworm.tune.processes.batch_trial import RankJob, TrialMemory
from frameworm.tune.processes.process_tree import RankEnd, Verdict, free_port, run_family

DEADLINE_S = 120.0
BUDGET_S = 600.0
PREPARE_S = 1800.0  # the data of a config is tokenised once, before the trials
UPPER_END = 512  # if nothing limits the memory
STEPS, VERIFY_STEPS = 6, 12
_UNLIMITED = 2**20
_MOST_TRIALS = 20  # a planner that is off by less than a third needs 8 at most
_SPEED_SIZES = (2, 4, 8)  # divisors of the largest size whose speed is measured
_OF_FREE = 0.8  # of a machine's free memory, if no limit protects its other processes
_ALLOCATED = 0.97  # of the available memory: the rest is lost to fragmentation

Tell = Callable[[str], None]


class BatchSizeFinder:
    """Finds the largest and the fastest micro-batch of a config.

    Args:
        config: As loaded; its batch settings say what is kept.
        world_size: Ranks of each trial, all on this machine.
        most: Largest micro-batch to try; None: as memory, data and global batch allow, 512 if memory is not limited.
        free_global_batch: Let the global batch grow with the micro-batch instead of keeping it by accumulation.
        deadline_s: Time limit of one trial.
        budget_s: Time limit of everything except preparing the data; then the search ends with what it knows.
        limit_bytes: Memory that each process may use in addition to what it has mapped at its start (CPU).
        payload: A file with the workload, if it is not the config's own.
        speed: Also measure smaller sizes, to find the fastest.
        tell: Called with progress messages.
    """

    def __init__(
        self,
        config: Config,
        *,
        world_size: int = 1,
        most: int | None = None,
        free_global_batch: bool = False,
        deadline_s: float = DEADLINE_S,
        budget_s: float = BUDGET_S,
        limit_bytes: int | None = None,
        payload: str | None = None,
        speed: bool = True,
        tell: Tell | None = None,
    ) -> None:
        resolved = resolve_here(config, world_size)
        if resolved.parallel.strategy == "dp":
            raise ConfigError("parallel.strategy: dp is one process over several GPUs; use ddp and --nproc-per-node")
        assert resolved.training.global_batch is not None
        self._most = most
        self._deadline_s, self._budget_s = deadline_s, budget_s
        self._speed = speed
        self._tell: Tell = tell or (lambda _text: None)
        self._least_bytes: int | None = None
        self._machine: TrialMemory | None = None
        self._killed: set[int] = set()
        self._hung: set[int] = set()
        share = None if free_global_batch else resolved.training.global_batch // world_size
        self._job = RankJob(config, "", share=share, steps=STEPS, world_size=world_size)
        self._job = replace(self._job, payload=payload, limit_bytes=limit_bytes)
        self.report = BatchSizeReport(
            name=config.name,
            device=resolved.gpu.device,
            world_size=world_size,
            global_batch=None if free_global_batch else resolved.training.global_batch,
            upper_end=0,
        )

    def run(self) -> BatchSizeReport:
        """Search, verify, compare speeds.

        Raises:
            TrainingFailedError: A trial failed for another reason than memory, with the trial's message.
        """
        began = monotonic()
        with tempfile.TemporaryDirectory(prefix="frameworm-batch-size-") as folder:
            self._job = replace(self._job, folder=folder)
            machine = self._look()
            searching = monotonic()
            candidates = self._candidates(machine)
            search = BatchSearch(candidates, self.report.guess)
            self._find(search, candidates[-1], searching)
            report = self.report
            report.largest, report.ends_below = search.largest, search.ends_below
            report.verified = report.largest in self._verified()
            if report.largest is not None and self._speed and self._time_left(searching):
                self._compare_speeds(candidates, report.largest)
            report.choose_fastest()
        report.seconds = monotonic() - began
        self._add_notes()
        return report

    def _look(self) -> TrialMemory:
        """Prepare the data in a separate process, and find out how much memory there is."""
        self._tell("looking at the data and the machine")
        ends, verdict = run_family(self._job, PREPARE_S, ranks=1)
        if verdict.outcome != "fits":
            raise TrainingFailedError(f"the trials cannot begin ({verdict.outcome}): {verdict.message}")
        machine = TrialMemory(**ends[0].result["machine"])
        room = machine.room_bytes
        if room is not None and machine.shared:
            machine = replace(machine, room_bytes=room // self.report.world_size)
        self._machine = machine
        self.report.limit_bytes, self.report.limit_name = machine.room_bytes, machine.limit_name
        return machine

    def _candidates(self, machine: TrialMemory) -> Sequence[int]:
        """The sizes that may be tried; also sets the guess."""
        report = self.report
        limited = machine.room_bytes is not None
        most = self._most or (_UNLIMITED if limited else UPPER_END)
        if machine.samples is not None:
            most = min(most, max(machine.samples // report.world_size, 1))
        if self._job.share is not None:
            most = min(most, self._job.share)
        room = machine.room_bytes
        if room is None:
            room = int(psutil.virtual_memory().available * _OF_FREE) // report.world_size
        guess = self._plan(room)
        if guess is not None:
            report.guess = guess
            if not limited and guess < most:
                most = max(guess, 1)
                report.notes.append(f"not looked beyond {most:,}: the planner sees no free memory for it")
        report.upper_end = most
        return range(1, most + 1) if self._job.share is None else divisors(self._job.share, most)

    def _plan(self, room_bytes: int) -> int | None:
        """The planner's estimate of the largest size; None if it has none.

        Runs in a separate process, because a dry run executes the user's own model code.
        """
        if self._job.payload is not None:
            return None
        self._tell("planning")
        ends, verdict = run_family(replace(self._job, plan_bytes=room_bytes), self._deadline_s, ranks=1)
        if verdict.outcome != "fits":
            self.report.notes.append(f"no plan to begin with, sizes are doubled ({verdict.message})")
            return None
        self._least_bytes = int(ends[0].result["plan"]["least_bytes"])
        return max(int(ends[0].result["plan"]["largest"]), 1)

    def _find(self, search: BatchSearch, last: int, began: float) -> None:
        """Run trials until the largest size is known and verified, or time is up."""
        report, most_trials = self.report, _MOST_TRIALS
        while self._time_left(began):
            size = search.next()
            if size is None or len(report.trials) >= most_trials:
                size = search.largest
                if size is None or size in self._verified():
                    return
                trial = self._try(size, "verify")
                search.tell(size, trial.fits)
                if trial.fits:
                    return
                most_trials += 2
                continue
            # Nothing is above the upper end, so a single trial can verify it at once.
            trial = self._try(size, "verify" if size == last else "search")
            if trial.outcome == "error" and search.largest is None:
                raise TrainingFailedError(
                    f"a trial of micro-batch {size} failed, and not for want of memory: {trial.message}"
                )
            if trial.outcome == "killed" and size not in self._killed:
                self._killed.add(size)  # may have been an accident: try the same size again
                continue
            search.tell(size, trial.fits, self._predict(trial))
            self._forgive(search, trial)

    def _forgive(self, search: BatchSearch, trial: BatchTrial) -> None:
        """Allow a size that hung another trial if, judging by one that fits, it should have been done in time."""
        if trial.outcome == "hang":
            if trial.micro_batch in self._hung:
                return
            self._hung.add(trial.micro_batch)
        fitting = [one for one in self.report.trials if one.fits and one.took_s is not None]
        if not fitting:
            return
        one = fitting[-1]
        assert one.took_s is not None
        for size in self._hung:
            if one.took_s * max(size / one.micro_batch, 1.0) < self._deadline_s / 3:
                search.forget(size)

    def _verified(self) -> set[int]:
        return {trial.micro_batch for trial in self.report.trials if trial.purpose == "verify" and trial.fits}

    def _try(self, size: int, purpose: Purpose) -> BatchTrial:
        self._tell(f"trial {len(self.report.trials) + 1}: micro-batch {size}" + (", verified" * (purpose == "verify")))
        began = monotonic()
        job = replace(self._job, sizes=(size,), steps=VERIFY_STEPS if purpose == "verify" else STEPS)
        ends, verdict = self._run(job)
        trial = self._trial(ends, verdict, size, purpose, monotonic() - began)
        self.report.trials.append(trial)
        return trial

    def _run(self, job: RankJob) -> tuple[list[RankEnd], Verdict]:
        for file in Path(job.folder).glob("rank-*"):
            file.unlink()
        return run_family(replace(job, port=free_port()), self._deadline_s)

    def _trial(
        self, ends: Sequence[RankEnd], verdict: Verdict, size: int, purpose: Purpose, took_s: float
    ) -> BatchTrial:
        """Combine all ranks' results for one size: the slowest time and the highest memory count."""
        figures = [item for end in ends for item in end.result.get("done", ()) if item["micro_batch"] == size]
        if len(figures) < len(ends):
            return BatchTrial(size, purpose, verdict.outcome, took_s=took_s, message=verdict.message, rank=verdict.rank)
        step_s = rate = None
        if all(item["micro_s"] is not None for item in figures):
            accumulation = self._job.accumulation(size)
            step_s = max(accumulation * item["micro_s"] + item["once_s"] for item in figures)
            rate = size * accumulation * self.report.world_size / step_s if step_s > 0 else None
        peak = max((item["peak_bytes"] or 0 for item in figures), default=0)
        return BatchTrial(size, purpose, "fits", rate, step_s, peak or None, figures[0]["steps"], took_s)

    def _predict(self, trial: BatchTrial) -> float | None:
        """Extrapolate the largest size from the memory of a trial that fitted, which grows linearly with the size."""
        machine, least = self._machine, self._least_bytes
        if not trial.fits or trial.peak_bytes is None or least is None or trial.peak_bytes <= least:
            return None
        if machine is None or machine.device != "cuda" or machine.room_bytes is None or trial.micro_batch == 1:
            return None
        growth = (_ALLOCATED * machine.room_bytes - least) / (trial.peak_bytes - least)
        return 1 + (trial.micro_batch - 1) * growth

    def _compare_speeds(self, candidates: Sequence[int], largest: int) -> None:
        """Measure smaller sizes, all in one group of processes, since they fit."""
        tried = {trial.micro_batch for trial in self.report.trials if trial.fits}
        wanted: list[int] = []
        for part in _SPEED_SIZES:
            size = max((one for one in candidates if one <= largest // part), default=None)
            if size is not None and size not in tried and size not in wanted:
                wanted.append(size)
        if not wanted:
            return
        self._tell(f"speed of micro-batches {', '.join(map(str, wanted))}")
        began = monotonic()
        ends, verdict = self._run(replace(self._job, sizes=tuple(wanted)))
        for size in wanted:
            trial = self._trial(ends, verdict, size, "speed", (monotonic() - began) / len(wanted))
            self.report.trials.append(trial)
            if not trial.fits:
                break  # later ones were not started

    def _time_left(self, began: float) -> bool:
        return monotonic() - began < self._budget_s

    def _add_notes(self) -> None:
        report = self.report
        if report.largest is not None and not report.verified:
            report.notes.append(f"not verified: the budget of {self._budget_s:.0f} s was spent; raise --budget")
        elif report.largest is None and not any(trial.micro_batch == 1 for trial in report.trials):
            report.notes.append(f"no size was found in {self._budget_s:.0f} s; raise --budget")
        odd = [trial for trial in report.trials if trial.outcome == "error"]
        if odd:
            report.notes.append(f"micro-batch {odd[0].micro_batch} failed, not for want of memory: {odd[0].message}")
