"""The process of a trial: `python -m frameworm.attach.trial.main JOB.json`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frameworm.attach.children import Children, around_bootstrap
from frameworm.attach.script import AfterImport, run_script
from frameworm.attach.trial.job import ScriptJob
from frameworm.attach.trial.link import Link
from frameworm.attach.trial.switches import Switches
from frameworm.launch.environment import become_rank, keep_compiled_in

if TYPE_CHECKING:
    from frameworm.attach.trial.steps import StepCounter

# The name of this module, which is __main__ when run itself.
_MODULE = "frameworm.attach.trial.main"


def main() -> None:
    """Run the script as the job says."""
    job = ScriptJob.read(Path(sys.argv[1]))
    if job.isolated:
        from frameworm.attach.isolation import isolate

        isolate([Path(job.folder)])
    else:
        _die_with_parent(job.reports[0])
    keep_compiled_in(Path(job.folder, "compiled"))  # later trials reuse what one compiles
    if job.spawned and job.source is not None:
        Path(job.script).write_text(job.source, encoding="utf-8")  # for spawned processes; visible in this trial only
    rank = None if job.spawned else _split(job) if job.ranks else 0
    link = Link(job.commands, job.reports, rank)
    trial = _Trial(job, link)
    trial.follow_children()
    ending = run_script(Path(job.script), job.arguments, job.module, job.source)
    trial.disarm()
    if isinstance(ending.code, str):
        print(ending.code, file=sys.stderr)  # as Python does at exit
    sys.stdout.flush()
    sys.stderr.flush()
    link.report_end(
        {
            "event": "end",
            "status": ending.status,
            "steps": trial.steps,
            "imported": trial.counter is not None,
            "started_processes": _has_started_processes(),
            "at": time.monotonic(),
        }
    )
    os.kill(os.getpid(), signal.SIGKILL)


def _has_started_processes() -> bool:
    """Whether the script has created multiprocessing processes, whose names are numbered."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and not module.BaseProcess(name=None).name.endswith("-1")


def _split(job: ScriptJob) -> int:
    """Start one process per rank and return in each of them; this process waits until the last has ended."""
    for rank, different in enumerate(job.ranks):
        if os.fork() == 0:
            _die_with_parent(job.reports[rank])
            become_rank(different, job.port)
            for number in (1, 2):
                os.dup2(job.logs[rank], number)
            _close(job, but=rank)
            return rank
    _close(job)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


def _die_with_parent(pipe: int) -> None:
    """End with the tuner, so that a killed tuner leaves no trials behind."""
    if sys.platform == "linux":
        from frameworm.attach.isolation import die_with_parent

        die_with_parent(pipe)


def _close(job: ScriptJob, but: int | None = None) -> None:
    """Close the files of other processes, by which the tuner sees who has ended."""
    for rank, numbers in enumerate(zip(job.commands, job.reports, job.logs)):
        if rank != but:
            for number in numbers:
                os.close(number)


class _Trial:
    """The trial in one of the script's processes, from the import of torch on."""

    def __init__(self, job: ScriptJob, link: Link) -> None:
        self._job, self._link = job, link
        self.counter: StepCounter | None = None
        self._finder = AfterImport("torch", self._attach)
        self._finder.arm()
        self._children: Children | None = None

    @property
    def steps(self) -> int:
        """Number of updates so far."""
        return 0 if self.counter is None else self.counter.updates

    def follow_children(self) -> None:
        """Continue in processes that the script starts, unless it trains in this one or a launcher has started them."""
        job = self._job
        if job.ranks and not job.spawned:
            return
        files = [*job.commands, *job.reports]
        self._children = Children(_MODULE, asdict(job), lambda: self.steps == 0, lambda: self.child_ends, files)
        self._children.arm()

    def child_ends(self, code: int) -> None:
        """Report that this child process is done; failures show in the script's own process."""
        if code == 0 and self.steps:
            self._link.report(
                {
                    "event": "end",
                    "status": "completed",
                    "steps": self.steps,
                    "imported": True,
                    "started_processes": False,
                }
            )

    def disarm(self) -> None:
        """Stop waiting for imports and children."""
        self._finder.disarm()
        if self._children is not None:
            self._children.disarm()

    def _attach(self) -> None:
        """Set the switches and count steps, once the script has imported torch."""
        from frameworm.attach.patches import Patches
        from frameworm.attach.trial.framework_options import FrameworkOptions
        from frameworm.attach.trial.interception import intercept
        from frameworm.attach.trial.lockstep import ComparedRun
        from frameworm.attach.trial.timing import TimedRun

        job, link = self._job, self._link
        models = intercept(Switches.from_dict(job.switches), Patches())
        options = FrameworkOptions(job.script, job.options)
        options.watch(Patches())
        run: TimedRun | ComparedRun
        if job.role == "time":
            run = TimedRun(models, link.report, link.receive, job.script, options)
        else:
            run = ComparedRun(models, job, lambda: job.folder_of(link.rank or 0), link.report)
        run.counter.install()
        self.counter = run.counter


def begin_child(settings: Mapping[str, Any], files: Sequence[int]) -> None:
    """Continue in this process, which the script has started with multiprocessing."""
    half = len(files) // 2
    job = replace(ScriptJob(**settings), commands=list(files[:half]), reports=list(files[half:]))
    trial = _Trial(job, Link(job.commands, job.reports, None if job.spawned else 0, is_child=True))
    around_bootstrap(lambda process: trial.child_ends)


if __name__ == "__main__":
    main()
