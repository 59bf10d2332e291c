"""`doctor`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import typer

from frameworm.cli.output import run_folder, say, telling
from frameworm.errors import ConfigError

if TYPE_CHECKING:
    from frameworm.engine.memory.fitness import Fitness
    from frameworm.records.machine import Check, ChecklistItem, Intent, MachineFacts

SCHEMA_VERSION = 1


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("doctor")(doctor)


def doctor(
    config: Optional[Path] = typer.Option(  # noqa: UP045
        None, "--config", "-c", help="Config file (YAML): check its optimisations too."
    ),
    settings: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Change a setting: --set gpu.device=cuda"
    ),
    nproc_per_node: Optional[int] = typer.Option(  # noqa: UP045
        None, min=1, help="Processes that will run on this machine; default: from the launcher's variables, or one."
    ),
    nnodes: Optional[int] = typer.Option(None, min=1, help="Machines that will take part."),  # noqa: UP045
    root: Path = typer.Option(Path("runs"), help="Folder for runs; its speed is measured."),
    bundle: Optional[Path] = typer.Option(  # noqa: UP045
        None, metavar="FILE.zip", help="Also write all of it, secrets masked, to a file for a bug report."
    ),
    run: Optional[str] = typer.Option(  # noqa: UP045
        None, metavar="RUN", help="With --bundle: add config, summary and last log lines of this run."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
) -> None:
    """Show what this machine has, what is wrong with it, and what to set.

    With a config, also check its optimisations item by item.

    Writes a file of up to 128 MiB to the run folder and removes it.

    Exit code 0: no problem, 1: a problem was found, 2: usage.

    Example: frameworm doctor --config configs/quickstart.yaml

    For four processes: frameworm doctor --config configs/ag_news_ddp_4gpu_20ep.yaml --nproc-per-node 4

    For a bug report: frameworm doctor --bundle bundle.zip --run runs/quickstart-20260101-120000
    """
    if settings and config is None:
        raise ConfigError("--set changes settings of a config; give --config F with it")
    if run is not None and bundle is None:
        raise ConfigError("--run adds a run to a bundle; give --bundle FILE.zip with it")
    if bundle is not None:
        from frameworm.report.checks.bundle import refuse_existing

        refuse_existing(bundle)
    loaded, trouble = None, None
    if config is not None:
        from frameworm.config.load import load_config

        try:
            loaded = load_config(config, settings)
        except ConfigError as error:
            if bundle is None or not config.is_file():
                raise
            trouble = str(error)  # this may be what the report is about
            say(f"frameworm: {error}", file=sys.stderr)
    from frameworm.diagnose.checklist.checklist import Subject, check_config
    from frameworm.diagnose.machine.judge import judge_machine
    from frameworm.hardware.inspect import inspect_machine
    from frameworm.launch.around import find_launcher
    from frameworm.records.machine import Intent

    around = find_launcher()
    with telling("looking at the machine"):
        facts = inspect_machine(
            root,
            around.port,
            master_address=around.master_address,
            port_asked=around.port_asked,
        )
        intent = Intent(nproc_per_node or around.processes, nnodes or around.nodes)
        fitness, items = None, None
        if loaded is not None:
            from frameworm.engine.memory.fitness import judge_fit

            fitness = judge_fit(loaded, facts, intent)
            intent = fitness.intent
            subject = Subject(loaded, fitness.resolved, facts, intent, fitness.plan)
            items = check_config(subject)
    checks = judge_machine(facts, around.variables, intent, around.contradictions)
    if fitness is not None:
        checks = [*fitness.checks, *checks]
    data = _as_data(facts, checks, items, fitness, intent, config)
    if bundle is not None:
        data["bundle"] = str(bundle)
        _bundle(bundle, data, around.variables, config, run, trouble)
    if as_json:
        say(json.dumps(data))
    else:
        _show(facts, checks, items, fitness, intent, config)
    if trouble is not None:
        raise typer.Exit(ConfigError.exit_code)
    if any(check.verdict == "problem" for check in checks):
        raise typer.Exit(1)


def _as_data(
    facts: MachineFacts,
    checks: list[Check],
    items: list[ChecklistItem] | None,
    fitness: Fitness | None,
    intent: Intent,
    config: Path | None,
) -> dict[str, Any]:
    verdicts = {check.verdict for check in checks}
    return {
        "schema_version": SCHEMA_VERSION,
        "verdict": next(word for word in ("problem", "advice", "unknown", "ok") if word in verdicts),
        "processes": intent.processes,
        "nodes": intent.nodes,
        "machine": facts.to_dict(),
        "checks": [check.to_dict() for check in checks],
        "config": None if config is None else str(config),
        "checklist": None if items is None else [item.to_dict() for item in items],
        "notes": [] if fitness is None else list(fitness.notes),
    }


def _bundle(
    path: Path,
    data: dict[str, Any],
    variables: Mapping[str, str],
    config: Path | None,
    run: str | None,
    trouble: str | None,
) -> None:
    from frameworm.report.checks.bundle import collect_bundle, list_bundle, write_bundle

    files = collect_bundle(data, variables, config, None if run is None else run_folder(run), trouble)
    # Not on stdout, which may be read by a program.
    say(list_bundle(path, files), file=sys.stderr, flush=True)
    write_bundle(path, files)
    say(f"written: {path}", file=sys.stderr)


def _show(
    facts: MachineFacts,
    checks: list[Check],
    items: list[ChecklistItem] | None,
    fitness: Fitness | None,
    intent: Intent,
    config: Path | None,
) -> None:
    from frameworm.report.checks.doctor import render_doctor

    ranks = "1 process" if intent.world_size == 1 else f"{intent.world_size} processes"
    device = "" if fitness is None else f" · {fitness.resolved.gpu.device}"
    notes = () if fitness is None else fitness.notes
    width = shutil.get_terminal_size((80, 24)).columns
    say(render_doctor(facts, checks, items, f"{config} · {ranks}{device}", notes, width), end="")
