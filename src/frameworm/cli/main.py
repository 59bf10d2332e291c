"""The command line: verbs are declared in the files beside this one; errors and exit codes are handled here."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from frameworm import __version__
from frameworm.cli import (
    doctor,
    export,
    guard,
    init,
    kubernetes,
    observe,
    predict,
    ray,
    report,
    scale,
    slurm,
    sweep,
    train,
    tune,
    verify,
    watch,
)
from frameworm.cli.output import say
from frameworm.errors import FramewormError
from frameworm.launch.environment import ask_to_keep_freed_memory
from frameworm.records.atomic import forbid_world_writable

app = typer.Typer(
    name="frameworm",
    help="Train PyTorch models as fast as the hardware allows, and see where every millisecond goes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
init.register(app)
train.register(app)
observe.register(app)
watch.register(app)
scale.register(app)
sweep.register(app)
predict.register(app)
tune.register(app)
guard.register(app)
report.register(app)
doctor.register(app)
verify.register(app)
slurm.register(app)
kubernetes.register(app)
ray.register(app)
export.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"frameworm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Options before the verb."""


def main() -> NoReturn:
    """Entry point: errors of ours end with one message and their exit code, faults with a traceback."""
    forbid_world_writable()
    ask_to_keep_freed_memory()
    try:
        app()
    except FramewormError as error:
        say(f"frameworm: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(0)
    sys.exit(0)
