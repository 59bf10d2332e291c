"""`verify-gpus`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Optional

import typer

from frameworm.cli.output import say, telling


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("verify-gpus")(verify_gpus)


def verify_gpus(
    gpus: Optional[int] = typer.Option(None, min=2, help="Number of GPUs to use; default: all of this machine."),  # noqa: UP045
    data: Optional[Path] = typer.Option(  # noqa: UP045
        None, help="Folder with ag_news and imdb; without it, texts are generated."
    ),
    budget: float = typer.Option(10.0, min=1.0, help="Minutes; checks that do not fit are skipped and listed."),
    out: Path = typer.Option(Path("verify-gpus"), help="New folder for the results."),
    on_cpu: bool = typer.Option(False, "--rehearse-on-cpu", help="Try the checks with two processes and no GPU."),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
) -> None:
    """Check on this machine that captured steps of several GPUs are correct, survive a dead rank, and meet predictions.

    Predictions are written before measuring on more than one GPU. Writes one page to share, verify.html.

    Exit code 0: all checks passed, 1: one failed.

    Example: frameworm verify-gpus --budget 10
    """
    from frameworm.records.atomic import write_atomic
    from frameworm.report.checks.gpus import render_verification, render_verification_page
    from frameworm.tune.verify.verify import verify_gpus as verify

    with telling("verifying") as tell:
        found = verify(out, gpus=gpus, data=data, budget_s=60 * budget, on_cpu=on_cpu, tell=tell)
    content = found.to_dict()
    write_atomic(out / "verify.html", render_verification_page(content))
    text = render_verification(content)
    write_atomic(out / "verify.txt", text)
    say(json.dumps(content, default=str) if as_json else f"{text}written to {out} (verify.html to share)")
    if not found.holds:
        raise typer.Exit(1)
