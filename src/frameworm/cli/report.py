"""`report`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import typer

from frameworm.cli.output import runs_folder, say
from frameworm.errors import ConfigError

if TYPE_CHECKING:
    from frameworm.report.scaling.report import WrittenReport
    from frameworm.report.scaling.table import ScalingReport


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("report", context_settings={"allow_extra_args": True})(report)


def report(
    context: typer.Context,
    root: Path = typer.Option(
        "experiments",
        parser=runs_folder,
        metavar="DIR|URL",
        help="Folder with runs at any depth, or a URL with runs directly below it.",
    ),
    out: Path = typer.Option(Path("plots"), help="Folder for the report."),
    warmup: int = typer.Option(1, min=0, help="Epochs at the start of each run to ignore."),
    datasets: Optional[list[str]] = typer.Option(  # noqa: UP045
        None, metavar="NAME...", help="Data sets to include; default: all."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the table as JSON."),
) -> None:
    """Write tables, figures and a page that show how the runs in a folder scale.

    Exit code 3: no two runs can be compared; the report says why.

    Example: frameworm report --root experiments --out plots --warmup 1 --datasets IMDB AGNews
    """
    from frameworm.report.scaling.report import write_report
    from frameworm.report.scaling.text import render_scaling

    def tell(found: ScalingReport) -> None:
        if not as_json:
            say(render_scaling(found), flush=True)  # figures take longer to draw

    written = write_report(root, out, warmup, _names(datasets, context.args), tell=tell)
    listed = " ".join(path.name for path in written.files)
    say(_json(written) if as_json else f"written to {out}: {listed}\n", end="")
    if not any(len(item.rows) > 1 for table in written.report.datasets for item in table.configurations):
        say("frameworm: no two world sizes can be compared; the report says why", file=sys.stderr)
        raise typer.Exit(3)


def _names(datasets: list[str] | None, more: Sequence[str]) -> list[str] | None:
    """Names after --datasets, which may be several after one another or with commas between them."""
    if more and not datasets:
        raise ConfigError(f"unexpected argument {more[0]}; the folder with the runs is given with --root")
    words = [word.strip() for item in (*(datasets or ()), *more) for word in item.split(",")]
    return [word for word in words if word] or None


def _json(written: WrittenReport) -> str:
    import dataclasses

    from frameworm.records.schema import json_ready

    data = _with_means({**dataclasses.asdict(written.report), "files": [str(path) for path in written.files]})
    return json.dumps(json_ready(data)) + "\n"


def _with_means(data: Any) -> Any:
    """Call the value of an interval `mean`, as readers of this JSON know it."""
    if isinstance(data, dict):
        renamed = {"value": "mean"} if data.keys() == {"value", "low", "high"} else {}
        return {renamed.get(name, name): _with_means(item) for name, item in data.items()}
    return [_with_means(item) for item in data] if isinstance(data, (list, tuple)) else data
