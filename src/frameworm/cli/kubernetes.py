"""`kubernetes`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Optional

import typer

from frameworm.cli.cluster import check_config, command_of, in_words, write
from frameworm.cli.output import say
from frameworm.errors import EnvironmentSetupError


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("kubernetes")(kubernetes)


def kubernetes(
    config: Path = typer.Option(..., "--config", "-c", help="Config file (YAML)."),
    nodes: int = typer.Option(1, min=1, help="Number of pods."),
    gpus_per_node: int = typer.Option(..., min=0, help="GPUs, and workers, per pod; 0: one worker on the CPU."),
    image: str = typer.Option(..., help="Container image that has frameworm."),
    kind: str = typer.Option("trainjob", help="trainjob: for Kubeflow Trainer v2; jobset: for JobSet alone."),
    name: Optional[str] = typer.Option(  # noqa: UP045
        None, help="Name of the job and its run folder; default: the config's name."
    ),
    namespace: Optional[str] = typer.Option(None, help="Namespace."),  # noqa: UP045
    pvc: str = typer.Option("runs", help="PersistentVolumeClaim for the run folder, shared by all pods."),
    cpus: Optional[int] = typer.Option(  # noqa: UP045
        None, min=1, help="CPUs per pod; default: 8 per worker."
    ),
    memory: Optional[str] = typer.Option(None, help="Memory per pod, such as 64Gi."),  # noqa: UP045
    max_restarts: int = typer.Option(
        10, min=0, help="jobset: how often all pods restart after a failure; preemptions do not count."
    ),
    runtime: str = typer.Option("torch-distributed", help="trainjob: the training runtime."),
    grace: int = typer.Option(120, min=60, help="Seconds a pod gets to save when it is evicted."),
    out: Optional[Path] = typer.Option(None, help="File to write; default: standard output."),  # noqa: UP045
    settings: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Change a setting of the training."),
    as_json: bool = typer.Option(False, "--json", help="Print the objects as JSON."),
) -> None:
    """Write Kubernetes manifests that train a config; restarted pods resume the run.

    Example: frameworm kubernetes --config configs/imdb_ddp_4gpu.yaml --nodes 1 --gpus-per-node 4 \\
    --image registry.example/frameworm:1 --out job.yaml
    """
    if kind not in ("trainjob", "jobset"):
        raise EnvironmentSetupError(f"--kind {kind} is not one of trainjob, jobset")
    from frameworm.config.load import load_runnable
    from frameworm.launch.kubernetes import KubernetesJob, as_yaml, manifests

    loaded = load_runnable(config, settings)
    job = KubernetesJob(
        config_text=config.read_text(encoding="utf-8"),
        name=name or loaded.name,
        image=image,
        kind="jobset" if kind == "jobset" else "trainjob",
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        namespace=namespace,
        pvc=pvc,
        cpus=cpus,
        memory=memory,
        max_restarts=max_restarts,
        runtime=runtime,
        grace_s=grace,
        settings=tuple(settings),
        command=command_of(sys.argv[1:]),
    )
    objects = manifests(job)
    check_config(loaded, str(config), job)
    text = as_yaml(job, objects)
    if out is not None:
        write(out, text)
    if as_json:
        file = None if out is None else str(out)
        shape = {"name": job.safe_name, "nodes": nodes, "world_size": job.world_size}
        say(json.dumps({"manifests": objects, "file": file, **shape}))
    elif out is None:
        say(text, end="")
    else:
        say(f"wrote {out}: {job.kind} {job.safe_name}, {in_words(job)}\napply it with: kubectl apply -f {out}")
