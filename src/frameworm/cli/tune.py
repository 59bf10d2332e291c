"""`batch-size`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Optional

import typer

from frameworm.cli.scale import parse_size
from frameworm.cli.train import number_or_auto
from frameworm.config.load import load_config
from frameworm.errors import EnvironmentSetupError

INCONCLUSIVE = 3


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command("batch-size")(batch_size)


def batch_size(
    config: Path = typer.Option(..., "--config", "-c", help="Config file (YAML)."),
    distributed: bool = typer.Option(False, "--distributed", help="Trials with several processes on this machine."),
    nproc_per_node: Optional[str] = typer.Option(  # noqa: UP045
        None, help="Processes on this machine: a number, or auto for one per GPU."
    ),
    settings: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Change a setting: --set memory.activation_checkpointing=full"
    ),
    most: Optional[int] = typer.Option(  # noqa: UP045
        None, "--max", min=1, help="No larger micro-batch; 512 where nothing limits the memory."
    ),
    free_global_batch: bool = typer.Option(
        False, "--free-global-batch", help="Let the global batch grow; otherwise accumulation keeps it as it is."
    ),
    deadline: float = typer.Option(120.0, min=1.0, help="Seconds for one trial; what takes longer counts as hung."),
    budget: float = typer.Option(600.0, min=1.0, help="Seconds for all trials; then it ends with what it knows."),
    limit_memory: Optional[str] = typer.Option(  # noqa: UP045
        None, help="Memory each process may take beside Python and torch, such as 2GiB (address space; for the CPU)."
    ),
    speed: bool = typer.Option(True, help="Measure smaller micro-batches too, to name the fastest."),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
) -> None:
    """Find the largest micro-batch that fits and the fastest, by trials of the real training step.

    Each trial runs in processes of its own: one that runs out of memory, dies or hangs costs that trial. The largest is
    verified with more steps, the longest samples and a validation. Exit code 1: nothing fits; 3: time was up before the
    largest was verified.

    Example: frameworm batch-size --config configs/quickstart.yaml

    Two ranks, global batch free: frameworm batch-size --config F --distributed --nproc-per-node 2 --free-global-batch
    """
    from frameworm.tune.zygote import warm_up

    warm_up(["frameworm.cli.main"])  # imports torch while this process does
    loaded = load_config(config, settings)
    from frameworm.engine.run import look_at_machine
    from frameworm.launch.plan import plan_launch

    devices = look_at_machine(loaded).device_count if distributed else 0
    plan = plan_launch(distributed, number_or_auto(nproc_per_node), device_count=devices)
    if plan.action == "join" or plan.max_nodes > 1:
        raise EnvironmentSetupError(
            "batch-size starts the ranks of its trials itself, on one machine: run it once, without torchrun or srun, "
            "with --distributed --nproc-per-node N"
        )
    from frameworm.report.batch_size_table import render_batch_size
    from frameworm.tune.batch_size import BatchSizeFinder

    with _telling() as tell:
        report = BatchSizeFinder(
            loaded,
            world_size=plan.nproc_per_node,
            most=most,
            free_global_batch=free_global_batch,
            deadline_s=deadline,
            budget_s=budget,
            limit_bytes=None if limit_memory is None else parse_size(limit_memory),
            speed=speed,
            tell=tell,
        ).run()
    print(json.dumps(report.to_dict()) if as_json else render_batch_size(report), end="\n" if as_json else "")
    if not report.verified:
        smallest_failed = any(trial.micro_batch == 1 and not trial.fits for trial in report.trials)
        raise typer.Exit(1 if smallest_failed else INCONCLUSIVE)


@contextlib.contextmanager
def _telling() -> Iterator[Callable[[str], None] | None]:
    """What goes on, on a terminal only."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("batch size") as status:
        yield status.update
