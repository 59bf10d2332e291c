"""The process of a trial: `python -m frameworm.attach.trial.main JOB.json`."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from frameworm.attach.script import AfterImport, run_script
from frameworm.attach.trial.job import TrialJob
from frameworm.attach.trial.switches import Switches
from frameworm.launch.environment import become_rank, keep_compiled_in


class Link:
    """Lines of JSON to and from the tuner."""

    def __init__(self, commands: int, reports: int) -> None:
        self._commands = os.fdopen(commands, "r", encoding="utf-8")
        self._reports = os.fdopen(reports, "w", encoding="utf-8")
        self._process = os.getpid()

    def report(self, told: dict[str, Any]) -> None:
        """Tell the tuner something; without a tuner the trial ends."""
        if os.getpid() != self._process:
            return  # forked by the script: what it does is not this trial
        try:
            print(json.dumps(told), file=self._reports, flush=True)
        except (BrokenPipeError, OSError):
            os.kill(os.getpid(), signal.SIGKILL)

    def receive(self) -> dict[str, Any]:
        """What to do next."""
        line = self._commands.readline()
        if not line:
            os.kill(os.getpid(), signal.SIGKILL)  # an end by itself would run the script's own clean-up
        told: dict[str, Any] = json.loads(line)
        return told


def main() -> None:
    """Run the script as the job says."""
    job = TrialJob.read(Path(sys.argv[1]))
    if job.isolated:
        from frameworm.attach.isolation import isolate

        isolate([Path(job.folder)])
    else:
        _die_with_parent(job.reports[0])
    keep_compiled_in(Path(job.folder, "compiled"))  # what one trial compiles, the next ones find
    rank = _split(job) if job.ranks else 0
    link = Link(job.commands[rank], job.reports[rank])
    job = replace(job, folder=str(job.folder_of(rank)))
    counters: list[Any] = []
    finder = AfterImport("torch", lambda: counters.append(_attach(job, link)))
    finder.arm()
    ending = run_script(Path(job.script), job.arguments, job.module, job.source)
    finder.disarm()
    if isinstance(ending.code, str):
        print(ending.code, file=sys.stderr)  # as Python does at the end of a process
    sys.stdout.flush()
    sys.stderr.flush()
    steps = counters[0].updates if counters else 0
    link.report(
        {
            "event": "end",
            "status": ending.status,
            "steps": steps,
            "imported": bool(counters),
            "started_processes": _has_started_processes(),
        }
    )
    os.kill(os.getpid(), signal.SIGKILL)


def _has_started_processes() -> bool:
    """Whether the script has made processes of multiprocessing; their names count up."""
    module = sys.modules.get("multiprocessing.process")
    return module is not None and not module.BaseProcess(name=None).name.endswith("-1")


def _split(job: TrialJob) -> int:
    """Start one process for each rank; returns in each of them. This one waits until the last has ended."""
    for rank, different in enumerate(job.ranks):
        if os.fork() == 0:
            _die_with_parent(job.reports[rank])
            become_rank(different, job.port)
            _close(job, but=rank)
            return rank
    _close(job)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


def _die_with_parent(pipe: int) -> None:
    """A tuner that is killed leaves no trials behind."""
    if sys.platform == "linux":
        from frameworm.attach.isolation import die_with_parent

        die_with_parent(pipe)


def _close(job: TrialJob, but: int | None = None) -> None:
    """Close the files of other processes: the tuner sees by them who has ended."""
    for rank, numbers in enumerate(zip(job.commands, job.reports)):
        if rank != but:
            for number in numbers:
                os.close(number)


def _attach(job: TrialJob, link: Link) -> Any:
    """The script has imported torch: set the switches and count its steps."""
    from frameworm.attach.patches import Patches
    from frameworm.attach.trial.framework_options import FrameworkOptions
    from frameworm.attach.trial.interception import intercept
    from frameworm.attach.trial.lockstep import ComparedRun
    from frameworm.attach.trial.timing import TimedRun

    models = intercept(Switches.from_dict(job.switches), Patches())
    options = FrameworkOptions(job.script, job.options)
    options.watch(Patches())
    run: TimedRun | ComparedRun
    if job.role == "time":
        run = TimedRun(models, link.report, link.receive, job.script, options)
    else:
        run = ComparedRun(models, job, link.report)
    run.counter.install()
    return run.counter


if __name__ == "__main__":
    main()
