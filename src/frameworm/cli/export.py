"""`export`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Optional

import typer

from frameworm.cli.output import say
from frameworm.errors import EnvironmentSetupError


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("export")(export)


def export(
    run: str = typer.Argument(..., metavar="RUN", help="Run folder or URL."),
    out: Path = typer.Option(
        ..., "--out", help="What to write: a .safetensors file, a folder, or a .pt2 file with --compiled."
    ),
    form: str = typer.Option(
        "auto",
        "--format",
        help="safetensors; pretrained: a folder with config and tokenizer, which the model's own save_pretrained "
        "writes; dcp: a folder of torch.distributed.checkpoint. auto: pretrained for a folder and such a model, else "
        "safetensors.",
    ),
    max_shard_size: str = typer.Option(
        "5GB", help="Maximum size of one safetensors file; larger models become several files and an index."
    ),
    checkpoint: str = typer.Option("latest", help="Which checkpoint: latest, best, or a step number."),
    metric: str = typer.Option(
        "val_loss", help="Metric of the best checkpoint: val_loss, val_accuracy, train_loss, or one of the run's own."
    ),
    dtype: Optional[str] = typer.Option(  # noqa: UP045
        None, help="Store floating-point weights as fp32, bf16 or fp16; default: as trained."
    ),
    weights: str = typer.Option(
        "auto", help="trained, ema (the averages of training.ema), or auto: ema if the run has averages."
    ),
    compiled: bool = typer.Option(False, "--compiled", help="Compile the model ahead of time for this device."),
    settings: list[str] = typer.Option(
        [],
        "--set",
        metavar="KEY=VALUE",
        help="With --compiled: change a setting of the run's config. workload=MODULE:FUNCTION lets your code build the "
        "model, with pretrained too.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print what was written as JSON."),
) -> None:
    """Write the weights of a run for inference.

    Example: frameworm export runs/quickstart-20260101-120000 --out model.safetensors

    For others to load: frameworm export runs/mine --out folder --dtype bf16

    Compiled: frameworm export runs/quickstart-20260101-120000 --compiled --out model.pt2
    """
    from frameworm.cli.output import log_to_screen
    from frameworm.engine.export import TYPES
    from frameworm.engine.weight_formats import FORMATS

    log_to_screen(True)
    if dtype is not None and dtype not in TYPES:
        raise EnvironmentSetupError(f"--dtype takes {', '.join(TYPES)}, not {dtype}")
    if form not in FORMATS:
        raise EnvironmentSetupError(f"--format takes {', '.join(FORMATS)}, not {form}")
    if metric != "train_loss" and not metric.startswith("val_"):
        raise EnvironmentSetupError(f"--metric takes val_loss, val_accuracy, train_loss or val_NAME, not {metric}")
    if compiled:
        if dtype is not None:
            raise EnvironmentSetupError("--dtype is for weights; a compiled model computes as it was trained")
        from frameworm.engine.run import export_run_compiled

        done = export_run_compiled(run, out, settings, which=checkpoint, metric=metric, weights=weights)
    else:
        from frameworm.engine.run import export_run

        chosen = {"which": checkpoint, "metric": metric, "dtype": dtype, "weights": weights}
        done = export_run(run, out, settings, form=form, max_shard_size=max_shard_size, **chosen)
    if as_json:
        say(json.dumps(dataclasses.asdict(done)))
        return
    what = "compiled model" if done.compiled else f"{done.tensors} tensors"
    what += " (averaged weights)" if done.averaged else ""
    say(f"{done.path}: {what} of step {done.step}, {done.parameters:,} numbers, {done.size_bytes / 2**20:.1f} MiB")
