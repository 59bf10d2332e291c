"""`guard` and `compare`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Optional

import typer

from frameworm.cli.output import run_folder, runs_folder, say
from frameworm.errors import BaselineError

if TYPE_CHECKING:
    from frameworm.guard.baseline import Baseline
    from frameworm.guard.regression import GuardVerdict
    from frameworm.guard.run_metrics import RunMetrics
    from frameworm.records.observations import Target


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command("compare")(compare)
    app.command("guard")(guard)


def compare(
    before: Path = typer.Argument(
        ..., metavar="RUN_A", parser=runs_folder, help="Folder or URL of the first run or sweep."
    ),
    after: Path = typer.Argument(
        ..., metavar="RUN_B", parser=runs_folder, help="Folder or URL of the second run or sweep."
    ),
    exact: bool = typer.Option(False, "--exact", help="Read every step of long runs instead of a sample."),
    as_json: bool = typer.Option(False, "--json", help="Print the comparison as JSON."),
) -> None:
    """Show what changed between two runs: settings, environment, phases, speed, memory, quality, first divergence.

    For two sweeps of `frameworm scale`, or other folders of runs on several world sizes: epoch time, throughput,
    speedup and efficiency before and after.

    Example: frameworm compare runs/quickstart-20260101-120000 runs/quickstart-20260101-130000

    Two sweeps: frameworm compare scaling/ag_news scaling/ag_news_optimized
    """
    sweeps = [path for path in (before, after) if _holds_runs(path)]
    if len(sweeps) == 2:
        _compare_sweeps(before, after, as_json)
        return
    if sweeps:
        raise BaselineError(f"{sweeps[0]} is a folder of runs, and the other is not; give two runs or two such folders")
    from frameworm.guard.comparison import compare_folders
    from frameworm.report.checks.guard import comparison_sentences, render_comparison

    comparison = compare_folders(before, after, exact=exact)
    comparison.sentences = comparison_sentences(comparison)
    if as_json:
        say(json.dumps(comparison.to_dict()))
    else:
        say(render_comparison(comparison), end="")


def _holds_runs(path: Path) -> bool:
    """True for a folder of runs, such as a sweep's, that is no run itself."""
    from frameworm.scaling.run_points import find_all_runs

    return path.is_dir() and any(folder.path != path for folder in find_all_runs(path))


def _compare_sweeps(before: Path, after: Path, as_json: bool) -> None:
    from frameworm.guard.comparison import differences
    from frameworm.guard.run_metrics import read_settings
    from frameworm.records.schema import json_ready
    from frameworm.records.store import RunFolder
    from frameworm.report.scaling.before_after import render_sweeps
    from frameworm.scaling.analysis import analyse
    from frameworm.scaling.before_after import compare_sweeps
    from frameworm.scaling.run_points import collect

    collections = [collect(path) for path in (before, after)]
    changes, notes = compare_sweeps(*(analyse(found.points) for found in collections))
    settings = [
        differences(*(read_settings(RunFolder(run)) for run in (change.base_before, change.base_after)))
        for change in changes
    ]
    for label, found in zip("AB", collections):
        notes += [f"{label}: {item.run} is left out ({item.kind}): {item.reason}" for item in found.excluded]
        notes += [f"{label}: {note}" for note in found.notes]
    if not changes:
        raise BaselineError(f"{before} and {after} share no data set whose runs can be compared: " + "; ".join(notes))
    if as_json:
        data = [
            {**change.to_dict(), "settings": [dataclasses.asdict(item) for item in items]}
            for change, items in zip(changes, settings)
        ]
        print(json.dumps(json_ready({"before": str(before), "after": str(after), "changes": data, "notes": notes})))
        return
    print(render_sweeps(str(before), str(after), changes, settings, notes), end="")


def guard(
    runs: list[Path] = typer.Argument(
        ..., metavar="RUN...", parser=run_folder, help="Folders or URLs of the runs to judge."
    ),
    baseline: Optional[Path] = typer.Option(  # noqa: UP045
        None,
        "--baseline",
        parser=run_folder,
        metavar="RUN|FILE",
        help="Baseline file, or the folder or URL of a run; not needed with --targets.",
    ),
    max_regression: str = typer.Option("5%", help="How much longer a step may take; off: not checked."),
    max_memory: str = typer.Option("10%", help="How much peak memory may grow."),
    max_accuracy_drop: str = typer.Option("1%", help="How many points validation accuracy may drop."),
    max_loss_increase: str = typer.Option("10%", help="How much the losses may grow."),
    max_mfu_drop: str = typer.Option("off", help="How much MFU may drop, relative to the baseline."),
    targets: bool = typer.Option(False, "--targets", help="Fail if the runs missed their targets (observe.targets)."),
    limits_of_targets: list[str] = typer.Option(
        [], "--target", metavar="NAME=LIMIT", help="Add a target or change its limit: samples_per_s=2000."
    ),
    update_baseline: bool = typer.Option(
        False, "--update-baseline", help="Create the baseline file, or add the runs to it if they pass."
    ),
    accept: bool = typer.Option(False, "--accept", help="With --update-baseline: replace the baseline by these runs."),
    allow_different_hardware: bool = typer.Option(
        False, "--allow-different-hardware", help="Compare with a baseline from another machine."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the judgement as JSON."),
) -> None:
    """Check runs against a baseline, targets, or both.

    Exit code 0: ok, 1: regression or a missed target, 2: usage, 3: inconclusive.

    Example: frameworm guard runs/new --baseline tests/perf/quickstart.json --max-regression 5%

    By targets: frameworm guard runs/new --targets --target samples_per_s=2000
    """
    from frameworm.guard.baseline import read_baseline
    from frameworm.guard.limits import Limits, parse_limit
    from frameworm.guard.regression import GuardVerdict, judge, judge_targets
    from frameworm.guard.run_metrics import read_runs

    limits = Limits(
        parse_limit(max_regression, "--max-regression"),
        parse_limit(max_memory, "--max-memory"),
        parse_limit(max_accuracy_drop, "--max-accuracy-drop"),
        parse_limit(max_loss_increase, "--max-loss-increase"),
        parse_limit(max_mfu_drop, "--max-mfu-drop"),
    )
    if accept and not update_baseline:
        raise BaselineError("--accept says what to write into the baseline; give --update-baseline with it")
    graded = _graded(runs, limits_of_targets, targets) if targets or limits_of_targets else None
    if baseline is None:
        if update_baseline or graded is None:
            raise BaselineError("give --baseline FILE to compare with, or --targets to judge a run by its targets")
        judgement = GuardVerdict(reasons=graded.reasons)
        judge_targets(judgement, graded.targets, sorted(graded.required))
        _show(judgement, None, ", ".join(graded.targets), as_json)
    if update_baseline and baseline.is_dir():
        raise BaselineError(f"{baseline} is the folder of a run; --update-baseline needs a file to write to")
    judged = read_runs(str(run) for run in runs)
    if update_baseline and (accept or not baseline.exists()):
        _write_anew(baseline, judged)
        return
    stored = read_baseline(baseline)
    _refuse_itself(stored, runs)
    judgement = judge(stored.runs, judged, limits, allow_different_hardware=allow_different_hardware)
    if graded is not None:
        judge_targets(judgement, graded.targets, sorted(graded.required))
    if update_baseline:
        _add_if_ok(stored, judged, judgement)
    _show(judgement, f"{stored.path} ({_count(stored.runs)})", ", ".join(run.name for run in judged), as_json)


def _add_if_ok(stored: Baseline, judged: list[RunMetrics], judgement: GuardVerdict) -> None:
    from frameworm.guard.baseline import with_runs, write_baseline

    if judgement.verdict == "ok":
        renewed = with_runs(stored, judged)
        write_baseline(renewed)
        judgement.notes.append(f"the baseline now holds {_count(renewed.runs)}")
    else:
        judgement.notes.append("the baseline is as before; --update-baseline --accept makes this the new normal")


def _show(judgement: GuardVerdict, before: str | None, after: str, as_json: bool) -> NoReturn:
    from frameworm.guard.comparison import comparison_dict
    from frameworm.report.checks.guard import judgement_sentences, render_judgement

    if as_json:
        told = {"exit_code": judgement.exit_code, "sentences": judgement_sentences(judgement)}
        say(json.dumps(comparison_dict(judgement, **told)))
    else:
        say(render_judgement(judgement, before, after), end="")
    raise typer.Exit(judgement.exit_code)


def _graded(runs: list[Path], limits: list[str], every: bool) -> _Graded:
    """The targets of each run: all that its config sets, or only those that are given, by the limits given."""
    from frameworm.config.load import load_config, load_config_from_mapping
    from frameworm.diagnose.targets import grade_targets
    from frameworm.records.store import RunFolder

    given = [f"observe.targets.{item}" for item in limits]
    names = {item.partition("=")[0].strip() for item in limits}
    found = _Graded()
    for path in runs:
        folder = RunFolder.open(path)
        if folder.config.exists():
            config = load_config(folder.config, given, environ={})
        else:  # of a script: the usual targets
            config = load_config_from_mapping({}, given, environ={})
        record, targets = folder.read_summary(), config.observe.targets
        wanted = {"time_to_quality_s" if "quality" in name else name for name in names if getattr(targets, name)}
        graded = grade_targets(record, targets)
        found.targets[str(path)] = [item for item in graded if every or item.name in wanted]
        found.required |= wanted
        if record.status != "completed":
            found.reasons.append(f"{path} is {record.status}; only completed runs are judged")
    return found


@dataclasses.dataclass
class _Graded:
    """The targets of each run, those that must be known for an ok, and why a run cannot be judged."""

    targets: dict[str, list[Target]] = dataclasses.field(default_factory=dict)
    required: set[str] = dataclasses.field(default_factory=set)
    reasons: list[str] = dataclasses.field(default_factory=list)


def _write_anew(path: Path, runs: list[RunMetrics]) -> None:
    """Make these runs the baseline, whatever was there; they must fit each other."""
    from frameworm.guard.baseline import Baseline, write_baseline
    from frameworm.guard.regression import check_fit

    check_fit(runs)
    write_baseline(Baseline(path, runs))
    say(f"{path} now holds {_count(runs)}: {', '.join(run.name for run in runs)}")


def _refuse_itself(stored: Baseline, runs: list[Path]) -> None:
    for run in runs:
        if run.resolve() == stored.path.resolve():
            raise BaselineError(f"{run} is compared with itself; give another run as --baseline")


def _count(runs: list[RunMetrics]) -> str:
    return f"{len(runs)} run" + ("" if len(runs) == 1 else "s")
