"""`scale`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer

from frameworm.cli.output import say, telling

if TYPE_CHECKING:
    from frameworm.tune.sweep.run import SweepResult


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("scale")(scale)


def scale(
    config: Path = typer.Option(..., "--config", "-c", help="Config file (YAML)."),
    world_sizes: str = typer.Option(..., "--world-sizes", help="Numbers of processes, such as 1,2,4."),
    weak: bool = typer.Option(
        False,
        "--weak/--strong",
        help="Strong: the processes divide one global batch. Weak: each process keeps its batch.",
    ),
    repeats: int = typer.Option(3, min=1, help="Runs per world size, in turns; two or more give intervals."),
    settings: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Change a setting of every run: --set training.epochs=3"
    ),
    out: Optional[Path] = typer.Option(None, help="Folder of the sweep; default: scaling/<name>."),  # noqa: UP045
    resume: bool = typer.Option(False, "--resume", help="Continue the sweep in --out, keeping completed runs."),
    warmup: int = typer.Option(1, min=0, help="Epochs at the start of each run to ignore."),
    nproc_per_node: Optional[int] = typer.Option(  # noqa: UP045
        None, min=1, help="In a SLURM allocation: maximum processes per host; default: its GPUs, or one."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print scaling.json instead of tables."),
) -> None:
    """Train with several numbers of processes to show how far training scales, and what limits it.

    World sizes take turns, so that a busy machine disturbs all of them alike. In a SLURM allocation of several
    hosts they are started with srun on its hosts. Writes scaling.json, tables and figures. Exit code 1: a run failed.

    Example: frameworm scale --config configs/quickstart.yaml --world-sizes 1,2

    Weak scaling, two runs each: frameworm scale --config F --world-sizes 1,2,4 --weak --repeats 2 --out sweep
    """
    from frameworm.config.load import load_runnable
    from frameworm.tune.sweep.plan import SweepPlan, parse_world_sizes

    sizes = parse_world_sizes(world_sizes)
    loaded = load_runnable(config, settings)
    from frameworm.launch.allocation import find_allocation
    from frameworm.tune.sweep.run import run_sweep

    allocation = find_allocation()
    if allocation is not None and len(allocation.hosts) == 1:
        allocation = None  # this machine is the host
    plan = SweepPlan(loaded, sizes, "weak" if weak else "strong", repeats, tuple(settings))
    with telling("scale") as tell:
        result = run_sweep(
            plan,
            out or Path("scaling") / loaded.name,
            resume=resume,
            warmup=warmup,
            allocation=allocation,
            per_host=nproc_per_node,
            tell=tell or (lambda text: say(text, file=sys.stderr, flush=True)),
        )
    _show(result, as_json)
    if result.failed:
        raise typer.Exit(1)


def _show(result: SweepResult, as_json: bool) -> None:
    from frameworm.report.scaling.sweep import render_analysis
    from frameworm.tune.sweep.run import RESULT_NAME

    if as_json:
        say((result.out / RESULT_NAME).read_text(encoding="utf-8"), end="")
    else:
        say(render_analysis(result.analysis), end="")
        for note in result.notes:
            say(f"note        {note}")
        for item in result.collection.excluded:
            say(f"{item.kind}: {item.run}: {item.reason}")
        say(f"\n{len(result.files) + 1} files in {result.out}: {RESULT_NAME}, report.html, ...")
    for run in result.failed:
        say(f"frameworm: {run.folder} failed: {run.reason} (see {result.out / run.folder}.log)", file=sys.stderr)
