"""`frameworm tune` as a function: a search with real trials, and the folder it writes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from frameworm.config.schema import Config
from frameworm.records.atomic import write_atomic
from frameworm.records.reading import read_json
from frameworm.report.tune.page import render_tune
from frameworm.tune.best_config import render_best
from frameworm.tune.facts import tuning_context
from frameworm.tune.knobs.base import Knob
from frameworm.tune.knobs.registry import all_knobs
from frameworm.tune.processes.forkserver import wait_until_warm
from frameworm.tune.search.found import REPORT_NAME
from frameworm.tune.search.journal import SUMMARY_NAME, Journal
from frameworm.tune.search.result import Tell, TuneResult
from frameworm.tune.search.search import Search, search_name
from frameworm.tune.trials.outcomes import Budget
from frameworm.tune.trials.quality_check import QualityChecker
from frameworm.tune.trials.runner import TrialRunner
from frameworm.tune.trials.short_steps import ShortSteps
from frameworm.tune.trials.windows import Effort

BEST_NAME = "best.yaml"


def tune(
    config: Config,
    out: str | Path,
    *,
    budget: Budget | None = None,
    world_size: int = 1,
    allow_approximate: bool = False,
    knobs: Sequence[Knob] | None = None,
    effort: Effort | None = None,
    longer: QualityChecker | None = None,
    limit_bytes: int | None = None,
    original: str | None = None,
    tell: Tell | None = None,
) -> TuneResult:
    """Search for the fastest config that learns the same; if the folder holds part of this search, continue it.

    Args:
        config: The initial config.
        out: Folder for the journal, the trials' output, `best.yaml`, `tune.json` and `report.html`.
        budget: The budget; None: ten minutes.
        world_size: Processes of every trial, all on this machine.
        allow_approximate: Changes of numerics beyond rounding need no quality check.
        knobs: What may be changed; None: all known knobs.
        effort: How much to measure.
        longer: How quality checks are run.
        limit_bytes: Memory each process of a trial may use in addition to Python and torch.
        original: The text of the config file, whose comments `best.yaml` keeps if possible.
        tell: Called with progress.

    Returns:
        The result of the search.

    Raises:
        RunFolderError: The folder holds another search.
    """
    folder = Path(out)
    context = tuning_context(config, world_size)
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
            check_quality=runner.check_quality,
            longer=longer,
            tell=tell,
        ).run()
    write_atomic(folder / BEST_NAME, render_best(result, original))
    values = read_json(folder / SUMMARY_NAME)
    write_atomic(folder / REPORT_NAME, render_tune(values, str(folder / BEST_NAME)))
    result.folder = folder
    return result
