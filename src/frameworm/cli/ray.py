"""`ray`."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Optional

import typer

from frameworm.cli.output import log_to_screen, say
from frameworm.cli.train import resume_command, show_record
from frameworm.errors import EnvironmentSetupError, TrainingInterruptedError

USE_GPU = {"auto": None, "yes": True, "no": False}


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("ray")(ray)


def ray(
    config: Path = typer.Option(..., "--config", "-c", help="Config file (YAML)."),
    num_workers: str = typer.Option(..., metavar="N|MIN:MAX", help="Workers; a range for an elastic group."),
    address: Optional[str] = typer.Option(  # noqa: UP045
        None,
        metavar="HOST:PORT|local",
        help="The cluster; default: the one this machine belongs to. local: start one here for this job.",
    ),
    use_gpu: str = typer.Option("auto", help="One GPU per worker: yes, no, or auto (if the cluster has GPUs)."),
    resources_per_worker: Optional[str] = typer.Option(  # noqa: UP045
        None, metavar="NAME=AMOUNT,...", help="What a worker needs, such as CPU=4,GPU=1,memory=8e9; default: one CPU."
    ),
    max_failures: int = typer.Option(
        3, min=-1, help="How often Ray restarts the workers after one has failed; -1: always."
    ),
    wait: float = typer.Option(30.0, min=0, help="Seconds to wait for resources that are missing or not free."),
    settings: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Change a setting: --set training.lr=1e-3"
    ),
    out: Optional[str] = typer.Option(  # noqa: UP045
        None, metavar="DIR", help="Run folder, on storage that all nodes share; default: runs/<name>-<time>."
    ),
    resume: Optional[str] = typer.Option(None, help="Resume a run: its folder, or auto."),  # noqa: UP045
    working_dir: Optional[Path] = typer.Option(  # noqa: UP045
        None, help="Folder to copy to all workers, for your own modules if nodes do not share this folder."
    ),
    storage: Optional[str] = typer.Option(  # noqa: UP045
        None,
        help="Where Ray keeps checkpoints reported to it, such as s3://bucket/runs; default: the run folder.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON."),
) -> None:
    """Train a config as a Ray Train job; Ray restarts the workers after a failure.

    Example: frameworm ray --config configs/quickstart.yaml --num-workers 2 --address local
    """
    if use_gpu not in USE_GPU:
        raise EnvironmentSetupError(f"--use-gpu takes {', '.join(USE_GPU)}, not {use_gpu}")
    workers = _workers(num_workers)
    resources = _resources(resources_per_worker)
    gpus = resources.get("GPU")
    if gpus is not None and USE_GPU[use_gpu] not in (None, gpus > 0):
        raise EnvironmentSetupError(
            f"--use-gpu {use_gpu} and --resources-per-worker GPU={gpus:g} contradict each other; leave one out"
        )
    if working_dir is not None and not working_dir.is_dir():
        raise EnvironmentSetupError(f"--working-dir {working_dir} is not a folder")
    from frameworm.config.load import load_runnable

    loaded = load_runnable(config, settings)
    log_to_screen(True)
    from frameworm.engine.ray_job import RayJob, train_on_ray

    job = RayJob(
        workers,
        use_gpu=USE_GPU[use_gpu],
        resources=resources,
        max_failures=max_failures,
        wait_s=wait,
        address=address,
        working_dir=None if working_dir is None else str(working_dir.resolve()),
        storage=storage if storage is None or "://" in storage else str(Path(storage).resolve()),
    )
    try:
        # Ray shows what the workers print, and adds lines of its own.
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            done = train_on_ray(loaded, job, out=out or "auto", resume=resume, on_worker=log_to_screen)
    except TrainingInterruptedError as stop:
        say(stop, file=sys.stderr)
        if Path(str(stop.record)).exists():
            say(f"resume with: {resume_command(sys.argv[1:], str(stop.record))}", file=sys.stderr)
        raise typer.Exit(stop.exit_code) from None
    record = done.folder.read_summary()
    if as_json:
        checkpoint = None if done.result.checkpoint is None else done.result.checkpoint.path
        say(json.dumps({**record.to_dict(), "ray": {"path": done.result.path, "checkpoint": checkpoint}}))
    else:
        show_record(record, as_json=False)


def _workers(text: str) -> tuple[int, int]:
    """`N` or `MIN:MAX`."""
    low, colon, high = text.partition(":")
    numbers = (low, high if colon else low)
    if not all(item.isdecimal() for item in numbers) or not 1 <= int(numbers[0]) <= int(numbers[1]):
        raise EnvironmentSetupError(f"--num-workers takes a number of 1 and more, or MIN:MAX, not {text}")
    return int(numbers[0]), int(numbers[1])


def _resources(text: str | None) -> dict[str, float]:
    """`CPU=4,GPU=1` by name; Ray tells CPU from cpu."""
    found: dict[str, float] = {}
    for item in (text or "").split(",") if text else ():
        name, equals, amount = (part.strip() for part in item.partition("="))
        try:
            value = float(amount)
        except ValueError:
            value = math.nan
        if not name or not equals or not 0 <= value < math.inf:
            raise EnvironmentSetupError(
                f"--resources-per-worker takes NAME=AMOUNT,..., such as CPU=4,GPU=1; not {text}"
            )
        if name.upper() in ("CPU", "GPU") and name != name.upper():
            raise EnvironmentSetupError(f"--resources-per-worker {item.strip()}: Ray knows it as {name.upper()}")
        found[name] = value
    if found.get("GPU", 1.0) not in (0.0, 1.0):
        raise EnvironmentSetupError(f"--resources-per-worker GPU={found['GPU']:g}: a worker trains on one GPU")
    return found
