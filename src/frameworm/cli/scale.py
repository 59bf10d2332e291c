"""`network` and `memory`."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer

from frameworm.cli.output import say, telling
from frameworm.cli.train import number_or_auto
from frameworm.errors import ConfigError, EnvironmentSetupError

if TYPE_CHECKING:
    from frameworm.launch.plan import LaunchPlan
    from frameworm.scaling.memory import MemoryReport
    from frameworm.scaling.network import NetworkModel

BUDGET_S = 10.0
_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"([0-9.]+(?:E[0-9]+)?) *([KMGT]?I?B)?")


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command("network")(network)
    app.command("memory")(memory)


def network(
    nproc_per_node: Optional[str] = typer.Option(  # noqa: UP045
        None, help="Processes on this machine: a number, or auto for one per GPU."
    ),
    distributed: bool = typer.Option(
        False, "--distributed", help="Join torchrun, srun or RANK and WORLD_SIZE; implied, as one rank has no network."
    ),
    nnodes: Optional[str] = typer.Option(None, help="Number of machines."),  # noqa: UP045
    node_rank: Optional[int] = typer.Option(None, help="Number of this machine, from 0."),  # noqa: UP045
    master_addr: Optional[str] = typer.Option(None, help="Address of machine 0."),  # noqa: UP045
    master_port: Optional[int] = typer.Option(None, help="Port on machine 0."),  # noqa: UP045
    rdzv_endpoint: Optional[str] = typer.Option(  # noqa: UP045
        None, help="HOST:PORT of the rendezvous, where machines get their ranks."
    ),
    backend: str = typer.Option("auto", help="nccl, gloo, or auto: nccl where there are GPUs."),
    budget: float = typer.Option(BUDGET_S, min=0.1, help="Approximate seconds to measure."),
    out: Path = typer.Option(Path("network.json"), help="File to write."),
    as_json: bool = typer.Option(False, "--json", help="Print the file's content instead of a table."),
) -> None:
    """Measure the network between the ranks: time and bandwidth per collective and size.

    Example: frameworm network --nproc-per-node 2

    On two machines, with K = 0 and K = 1: frameworm network --nnodes 2 --node-rank K --master-addr HOST
    """
    if backend not in ("auto", "nccl", "gloo"):
        raise EnvironmentSetupError(f"--backend {backend} is not one of auto, nccl, gloo")
    from frameworm.launch.plan import plan_launch

    plan = plan_launch(
        True,  # alone there is nothing to measure
        number_or_auto(nproc_per_node),
        nnodes,
        node_rank,
        master_addr,
        master_port,
        rdzv_endpoint,
        device_count=0 if backend == "gloo" else _device_count(),
    )
    world_size = plan.nproc_per_node * plan.max_nodes if plan.action == "launch" else plan.process.world_size
    if world_size < 2:
        raise EnvironmentSetupError(
            "a network is between two ranks or more, and this would be one: give --nproc-per-node 2 or more, --nnodes, "
            "or start it with torchrun or srun"
        )
    if (plan.node_rank if plan.action == "launch" else plan.process.rank) == 0:
        _check_writable(out)
    if plan.action == "launch":
        from frameworm.hardware.host import usable_cpus
        from frameworm.launch.environment import own_command
        from frameworm.launch.torchrun import launch_workers

        command = own_command(*sys.argv[1:])
        raise typer.Exit(launch_workers(plan, command, usable_cpus=usable_cpus()))
    _probe_here(plan, backend, budget, out, as_json)


def _check_writable(out: Path) -> None:
    """Where the first rank will write, before anything is measured; other machines need no such folder."""
    if not out.parent.is_dir():
        raise EnvironmentSetupError(f"there is no folder {out.parent} to write {out.name} to; make it or change --out")
    if out.is_dir():
        raise EnvironmentSetupError(f"{out} is a folder; --out takes the file to write")


def _device_count() -> int:
    import torch

    return torch.cuda.device_count()


def _probe_here(plan: LaunchPlan, backend: str, budget_s: float, out: Path, as_json: bool) -> None:
    from frameworm.launch.environment import reported_by_launcher
    from frameworm.launch.stopping import end_at_once_on_interrupt

    if reported_by_launcher():
        end_at_once_on_interrupt()
    from frameworm.launch.failures import worker_errors
    from frameworm.launch.process_group import process_group
    from frameworm.parallel.network.probe import probe_network

    leads = plan.process.rank == 0
    with worker_errors(), process_group(plan.process, backend), _progress(leads) as tell:
        model = probe_network(budget_s=budget_s, tell=tell)
        if leads:
            model.save(out)
            _show(model, out, as_json)


@contextlib.contextmanager
def _progress(leads: bool) -> Iterator[Callable[[float], None] | None]:
    """A bar on the terminal of the first rank, nothing elsewhere."""
    if not (leads and sys.stderr.isatty()):
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring the network", total=1.0)
        yield lambda share: bar.update(task, completed=share)


def _show(model: NetworkModel, out: Path, as_json: bool) -> None:
    from frameworm.report.checks.network import render_network

    say(json.dumps(model.to_dict()) if as_json else f"{render_network(model)}written to {out}", flush=True)


def memory(
    params: Optional[str] = typer.Option(  # noqa: UP045
        None, help="Number of parameters, such as 175e9: the table of ZeRO's savings."
    ),
    config: Optional[Path] = typer.Option(None, help="Config file: plan its steps."),  # noqa: UP045
    gpus: int = typer.Option(1, min=1, help="Devices to train on."),
    memory: Optional[str] = typer.Option(  # noqa: UP045
        None, help="Memory of a device, such as 80GB or 80GiB; otherwise that of this machine's."
    ),
    settings: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="Change a setting: --set training.micro_batch=8"
    ),
    tokens_per_sample: Optional[float] = typer.Option(  # noqa: UP045
        None, min=1.0, help="Mean length of the samples, for packed batches."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
) -> None:
    """Plan the memory of a training step: what it takes, what fits, and what to change.

    Exit code 1: the setting does not fit.

    Example: frameworm memory --config configs/gpt2_124m.yaml --gpus 8 --memory 80GB

    Without a config: frameworm memory --params 175e9 --gpus 64
    """
    if (params is None) == (config is None):
        raise ConfigError("give either --params N (a number of parameters) or --config F (a config file)")
    memory_bytes = None if memory is None else parse_size(memory)
    if params is not None:
        _show_savings(params, gpus, memory_bytes, as_json)
        return
    assert config is not None
    from frameworm.config.load import load_runnable

    loaded = load_runnable(config, settings)
    from frameworm.engine.memory.planner import MemoryPlanner

    with telling("planning") as tell:
        report = MemoryPlanner(loaded, gpus, tokens_per_sample, tell).report(memory_bytes)
    _show_report(report, as_json)
    if report.fits is False:
        raise typer.Exit(1)


def parse_size(text: str) -> int:
    """Bytes from a size such as 80GB, 80 GiB or 8.6e10.

    Raises:
        ConfigError: It is no size.
    """
    match = _SIZE.fullmatch(text.strip().upper())
    try:
        size = float(match[1]) * _UNITS[match[2] or ""] if match else 0.0
    except (ValueError, KeyError):
        size = 0.0
    if not 1 <= size < 2**63:
        raise ConfigError(f"--memory {text} is not a size; give one such as 80GB, 80GiB or a number of bytes")
    return int(size)


def _show_savings(params: str, gpus: int, memory_bytes: int | None, as_json: bool) -> None:
    from frameworm.report.checks.memory import gigabytes, render_savings
    from frameworm.scaling.memory import calculate_zero_savings

    try:
        number = float(params.replace(",", "").replace("_", ""))
    except ValueError:
        raise ConfigError(f"--params {params} is not a number; give one such as 175e9") from None
    savings = calculate_zero_savings(number, gpus)
    if as_json:
        fits = {
            kind: {name: None if memory_bytes is None else size <= memory_bytes for name, size in stages.items()}
            for kind, stages in savings.items()
        }
        data = {"params": number, "gpus": gpus, "memory_bytes": memory_bytes, "bytes": savings, "fits": fits}
        say(json.dumps(data))
        return
    text = render_savings(number, gpus, savings)
    if memory_bytes is not None:
        for kind, stages in savings.items():
            fitting = [name for name, size in stages.items() if size <= memory_bytes]
            text += f"{kind}: {', '.join(fitting) or 'nothing'} fits in {gigabytes(memory_bytes)}, before activations\n"
    say(text, end="")


def _show_report(report: MemoryReport, as_json: bool) -> None:
    from frameworm.report.checks.memory import render_memory

    say(json.dumps(report.to_dict()) if as_json else render_memory(report), end="\n" if as_json else "")
