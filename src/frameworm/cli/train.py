"""`train`, `evaluate`, `upload` and `runs`."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Optional

import typer

from frameworm.cli.output import log_to_screen, say, telling
from frameworm.errors import EnvironmentSetupError

if TYPE_CHECKING:
    from frameworm.config.schema import Config
    from frameworm.launch.plan import LaunchPlan
    from frameworm.records.schema import RunRecord

_TO_END_S = 5.0  # of --stop-grace: to write the summary and leave


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command("train")(train)
    app.command("evaluate")(evaluate)
    app.command("upload")(upload)
    app.command("runs")(runs)


def train(
    config: Path = typer.Option(..., "--config", "-c", help="Config file (YAML)."),
    distributed: bool = typer.Option(False, "--distributed", help="Train on several processes."),
    nproc_per_node: Optional[str] = typer.Option(  # noqa: UP045
        None, help="Processes on this machine: a number, or auto for one per GPU."
    ),
    nnodes: Optional[str] = typer.Option(None, help="Number of machines, or MIN:MAX."),  # noqa: UP045
    node_rank: Optional[int] = typer.Option(None, help="Number of this machine, from 0."),  # noqa: UP045
    master_addr: Optional[str] = typer.Option(None, help="Address of machine 0."),  # noqa: UP045
    master_port: Optional[int] = typer.Option(None, help="Port on machine 0."),  # noqa: UP045
    rdzv_endpoint: Optional[str] = typer.Option(  # noqa: UP045
        None, help="HOST:PORT of the rendezvous, where machines get their ranks."
    ),
    max_restarts: int = typer.Option(
        0, min=0, help="How often to restart all processes from the last checkpoint after one has failed."
    ),
    settings: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Change a setting: --set training.lr=1e-3"
    ),
    out: Optional[str] = typer.Option(  # noqa: UP045
        None,
        metavar="DIR|URL",
        help="Run folder; default: runs/<name>-<time>. For a URL (s3://bucket/runs/x): runs/<its last part>, "
        "uploaded beside training.",
    ),
    resume: Optional[str] = typer.Option(  # noqa: UP045
        None, metavar="DIR|URL|auto", help="Resume a run: its folder, its URL, or auto."
    ),
    log_dir: Optional[Path] = typer.Option(None, help="Folder for one log file per rank."),  # noqa: UP045
    stop_grace: float = typer.Option(30.0, min=1.0, help="Seconds workers get to save when they are stopped."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Train a config.

    Example: frameworm train --config configs/quickstart.yaml --set training.epochs=2

    Without a clone of the repository, `frameworm init quickstart` writes this config.

    On two processes: frameworm train --config configs/quickstart.yaml --distributed --nproc-per-node 2

    Restart up to three times after a failure: add --max-restarts 3

    Keep a copy in object storage, from which any machine can resume: add --out s3://bucket/runs/x --resume auto
    """
    from frameworm.config.load import load_runnable

    loaded = load_runnable(config, settings)
    from frameworm.launch.plan import plan_launch

    plan = plan_launch(
        distributed,
        number_or_auto(nproc_per_node),
        nnodes,
        node_rank,
        master_addr,
        master_port,
        rdzv_endpoint,
        device_count=_device_count(loaded) if distributed else 0,
    )
    if plan.action == "launch":
        raise typer.Exit(_launch(loaded, plan, stop_grace, max_restarts, resumes=resume is not None))
    if max_restarts and not distributed:
        raise EnvironmentSetupError("--max-restarts needs --distributed: a launcher that outlives the training")
    if log_dir is not None:
        from frameworm.launch.rank_logs import write_to_log_of

        write_to_log_of(plan.process.rank, plan.process.world_size, log_dir)
    if plan.action == "single":
        _check_alone()
    from frameworm.launch.environment import reported_by_launcher

    if reported_by_launcher():  # which ends its workers after that time
        loaded.storage.preempted_wait_s = min(loaded.storage.preempted_wait_s, max(0.0, stop_grace - _TO_END_S))
    raise typer.Exit(_train_here(loaded, plan, out, resume, as_json))


def number_or_auto(text: str | None) -> int | Literal["auto"] | None:
    """The value of --nproc-per-node."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise EnvironmentSetupError(f"--nproc-per-node takes a number or auto, not {text}")
    return int(text)


def _check_alone() -> None:
    """Refuse to wait for processes that nobody said are coming."""
    from frameworm.launch.environment import detect

    process = detect()
    if process.world_size > 1:
        numbers = "srun" if process.launcher == "srun" else "RANK and WORLD_SIZE"
        raise EnvironmentSetupError(
            f"{numbers} make this process rank {process.rank} of {process.world_size}: add --distributed to train "
            "together, or take those variables away to train alone"
        )


def _device_count(config: Config) -> int:
    from frameworm.hardware.resolve import resolve_machine

    return resolve_machine(config).device_count


def _launch(config: Config, plan: LaunchPlan, stop_grace_s: float, max_restarts: int, *, resumes: bool) -> int:
    """Start this node's workers; the config is checked for that many processes first."""
    from frameworm.hardware.host import usable_cpus
    from frameworm.hardware.resolve import resolve_here
    from frameworm.launch.environment import own_command
    from frameworm.launch.torchrun import launch_workers

    elastic = plan.min_nodes != plan.max_nodes
    resolve_here(config, plan.nproc_per_node * plan.max_nodes, resized=resumes or elastic)
    command = own_command(*sys.argv[1:])
    return launch_workers(
        plan, command, usable_cpus=usable_cpus(), stop_grace_s=stop_grace_s, max_restarts=max_restarts
    )


def _train_here(config: Config, plan: LaunchPlan, out: str | None, resume: str | None, as_json: bool) -> int:
    from frameworm.launch.environment import reported_by_launcher
    from frameworm.launch.stopping import end_at_once_on_interrupt

    if reported_by_launcher():
        end_at_once_on_interrupt()
    from frameworm.engine.run import run
    from frameworm.engine.summary import why_failed
    from frameworm.errors import TrainingFailedError, TrainingInterruptedError, TrainingPreemptedError
    from frameworm.launch.failures import worker_errors
    from frameworm.launch.process_group import cleanup

    leads = plan.process.rank == 0
    log_to_screen(leads)
    if config.observe.progress == "auto":
        config.observe.progress = True
    with worker_errors():
        try:
            record = run(config, out=out or "auto", resume=resume)
        except (TrainingInterruptedError, TrainingPreemptedError) as stop:
            if leads:
                show_record(stop.record, as_json)
                folder, copy = getattr(stop.record, "run_dir", None), getattr(stop.record, "storage", None)
                place = str(folder) if copy is None else copy.url
                say(f"{stop}\nresume with: {resume_command(sys.argv[1:], place)}", file=sys.stderr)
            cleanup()
            return stop.exit_code
        if leads:
            show_record(record, as_json)
        cleanup()
        if record.status != "completed":
            raise TrainingFailedError(why_failed(record))
    return 0


def resume_command(arguments: list[str], folder: str) -> str:
    """The command as it was given, all its settings included, to go on in the run's folder."""
    kept: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument in ("--out", "--resume"):
            next(remaining, None)
        elif not argument.startswith(("--out=", "--resume=")):
            kept.append(argument)
    return shlex.join(["frameworm", *kept, "--resume", folder])


def show_record(record: object, as_json: bool) -> None:
    from frameworm.records.schema import RunRecord
    from frameworm.report.run.text import render_text

    assert isinstance(record, RunRecord)
    say(json.dumps(record.to_dict()) if as_json else render_text(record), flush=True)


def evaluate(
    run: str = typer.Argument(..., metavar="RUN", help="Run folder or URL."),
    settings: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Change a setting of the run's config."),
    weights: str = typer.Option(
        "auto", help="trained, ema (the averages of training.ema), or auto: ema if the run has averages."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Score the newest checkpoint of a run on its validation data.

    Example: frameworm evaluate runs/quickstart-20260101-120000
    """
    from frameworm.engine.run import evaluate_run
    from frameworm.records.schema import json_ready
    from frameworm.report.kit.tables import number, plain

    log_to_screen(True)
    step, result, averaged = evaluate_run(run, settings, weights=weights)
    if as_json:
        say(json.dumps(json_ready({"run": str(run), "step": step, "averaged": averaged, **result._asdict()})))
        return
    of = " (averaged weights)" if averaged else ""
    accuracy = "" if result.accuracy is None else f"  accuracy {result.accuracy:.2%}"
    metrics = "".join(f"  {plain(name)} {number(value)}" for name, value in result.metrics.items())
    say(f"{run}, step {step}{of}: loss {result.loss:.4f}{accuracy}{metrics}  ({result.samples:,} samples)")


def upload(
    run: Path = typer.Argument(..., help="Run folder."),
    url: str = typer.Argument(..., help="Target, such as s3://bucket/runs/x; any URL that fsspec knows."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Upload a run to object storage, or the rest of one whose upload did not finish.

    Example: frameworm upload runs/quickstart-20260101-120000 s3://bucket/runs/quickstart
    """
    from frameworm.engine.upload.once import upload_run

    log_to_screen(True)
    with telling(f"uploading {run}") as tell:
        done = upload_run(run, url, tell)
    if as_json:
        say(json.dumps(done))
        return
    say(f"{run} is at {done['url']}: {', '.join(done['checkpoints']) or 'no checkpoint'}")


def runs(
    root: str = typer.Argument("runs", metavar="[ROOT]", help="Folder or URL with runs."),
    as_json: bool = typer.Option(False, "--json", help="Print the list as JSON."),
) -> None:
    """List the runs in a folder, newest first.

    Example: frameworm runs
    """
    from frameworm.errors import RunFolderError
    from frameworm.records.objects.runs import local_root, shown
    from frameworm.records.store import find_runs

    rows: list[dict[str, object]] = []
    for folder in find_runs(local_root(root, few=True)):
        record: RunRecord | None = None
        with contextlib.suppress(RunFolderError):
            record = folder.read_summary()
        rows.append(
            {
                "run": shown(folder),
                "status": "unfinished" if record is None else record.status,
                "workload": None if record is None else record.workload,
                "steps": None if record is None else record.steps,
                "train_loss": None if record is None else record.quality.train_loss,
                "val_accuracy": None if record is None else record.quality.val_accuracy,
                "samples_per_s": None if record is None else record.throughput.samples_per_s,
            }
        )
    if as_json:
        say(json.dumps(rows))
        return
    if not rows:
        say(f"no runs in {root}")
        return
    table = [("run", "status", "workload", "steps", "train loss", "accuracy", "samples/s")]
    for row in rows:
        table.append(
            (
                str(row["run"]),
                str(row["status"]),
                str(row["workload"] or ""),
                _cell(row["steps"], ",d"),
                _cell(row["train_loss"], ".4f"),
                _cell(row["val_accuracy"], ".2%"),
                _cell(row["samples_per_s"], ",.0f"),
            )
        )
    # Never cut to the terminal's width: half a path cannot be copied.
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def _cell(value: object, form: str) -> str:
    return "" if value is None else format(value, form)
