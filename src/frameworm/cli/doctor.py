"""`doctor`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import typer

from frameworm.cli.output import say, telling
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
        None, min=1, help="Processes that will run on this machine; otherwise as the variables say, or one."
    ),
    nnodes: Optional[int] = typer.Option(None, min=1, help="Machines that will take part."),  # noqa: UP045
    root: Path = typer.Option(Path("runs"), help="Folder that runs are written to: its speed is measured."),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
) -> None:
    """Say what this machine has, what is wrong with it, and what to set.

    With a config its optimisation checklist is checked item by item.

    A file of up to 128 MiB is written to the run folder and removed.

    Exit code 0: no problem, 1: a problem was found, 2: usage.

    Example: frameworm doctor --config configs/quickstart.yaml

    For four processes: frameworm doctor --config configs/ag_news_ddp_4gpu_20ep.yaml --nproc-per-node 4
    """
    if settings and config is None:
        raise ConfigError("--set changes settings of a config; give --config F with it")
    loaded = None
    if config is not None:
        from frameworm.config.load import load_config

        loaded = load_config(config, settings)
    from frameworm.diagnose.checklist.checklist import Subject, check_config
    from frameworm.diagnose.machine.judge import judge_machine
    from frameworm.hardware.inspect import inspect_machine
    from frameworm.launch.around import look_around
    from frameworm.records.machine import Intent

    around = look_around()
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
    _show(facts, checks, items, fitness, intent, config, as_json)
    if any(check.verdict == "problem" for check in checks):
        raise typer.Exit(1)


def _show(
    facts: MachineFacts,
    checks: list[Check],
    items: list[ChecklistItem] | None,
    fitness: Fitness | None,
    intent: Intent,
    config: Path | None,
    as_json: bool,
) -> None:
    if as_json:
        verdicts = {check.verdict for check in checks}
        data: dict[str, Any] = {
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
        say(json.dumps(data))
        return
    from frameworm.report.checks.doctor import render_doctor

    ranks = "1 process" if intent.world_size == 1 else f"{intent.world_size} processes"
    device = "" if fitness is None else f" · {fitness.resolved.gpu.device}"
    notes = () if fitness is None else fitness.notes
    width = shutil.get_terminal_size((80, 24)).columns
    say(render_doctor(facts, checks, items, f"{config} · {ranks}{device}", notes, width), end="")
