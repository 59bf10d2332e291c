"""`frameworm tune` as a function: a search with real trials, and the folder it leaves behind."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from frameworm.config.schema import Config
from frameworm.records.atomic import write_atomic
from frameworm.records.reading import read_json
from frameworm.report.tune.page import render_tune
from frameworm.tune.best_config import render_best
from frameworm.tune.facts import look_around
from frameworm.tune.knobs.base import Knob
from frameworm.tune.knobs.registry import all_knobs
from frameworm.tune.processes.forkserver import wait_until_warm
from frameworm.tune.search.journal import SUMMARY_NAME, Journal
from frameworm.tune.search.result import Tell, TuneResult
from frameworm.tune.search.search import Search, search_name
from frameworm.tune.trials.longer import Longer
from frameworm.tune.trials.outcomes import Budget
from frameworm.tune.trials.runner import TrialRunner
from frameworm.tune.trials.short_steps import ShortSteps
from frameworm.tune.trials.windows import Effort

BEST_NAME = "best.yaml"
REPORT_NAME = "report.html"


def tune(
    config: Config,
    out: str | Path,
    *,
    budget: Budget | None = None,
    world_size: int = 1,
    allow_approximate: bool = False,
    knobs: Sequence[Knob] | None = None,
    effort: Effort | None = None,
    longer: Longer | None = None,
    limit_bytes: int | None = None,
    original: str | None = None,
    tell: Tell | None = None,
) -> TuneResult:
    """Look for the fastest config that learns the same; a folder that holds a part of this search goes on from there.

    Args:
        config: Where to start from.
        out: Folder for the journal, what trials said, `best.yaml`, `tune.json` and `report.html`.
        budget: What it may take; ten minutes unless given.
        world_size: Processes of every trial, all on this machine.
        allow_approximate: What changes the mathematics by more than rounding needs no quality check.
        knobs: What may be changed; all that are known unless given.
        effort: How much is measured.
        longer: How quality checks are made.
        limit_bytes: Memory each process of a trial may take beside Python and torch.
        original: The config file as it was written, whose comments `best.yaml` keeps where it can.
        tell: Is told how it goes.

    Raises:
        RunFolderError: The folder holds another search.
    """
    folder = Path(out)
    context = look_around(config, world_size)
    wait_until_warm()
    journal = Journal(folder, search_name(context))
    short_steps = ShortSteps(folder, context.resolve, config)
    runner = TrialRunner(
        folder,
        world_size=world_size,
        effort=effort,
        limit_bytes=limit_bytes,
        short_steps=short_steps,
        device_bytes=context.machine.memory_bytes if context.on_gpu else None,
    )
    with contextlib.closing(runner):
        result = Search(
            all_knobs() if knobs is None else knobs,
            context,
            runner.run_trial,
            runner.prove,
            budget or Budget(time_s=600.0),
            journal,
            allow_approximate=allow_approximate,
            check_longer=runner.check_longer,
            longer=longer,
            tell=tell,
        ).run()
    write_atomic(folder / BEST_NAME, render_best(result, original))
    values = read_json(folder / SUMMARY_NAME)
    write_atomic(folder / REPORT_NAME, render_tune(values, str(folder / BEST_NAME)))
    return result
