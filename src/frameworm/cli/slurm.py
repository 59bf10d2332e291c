"""`slurm`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer

from frameworm.cli.cluster import check_config, command_of, in_words, write
from frameworm.cli.output import say
from frameworm.errors import EnvironmentSetupError

if TYPE_CHECKING:
    from frameworm.launch.slurm import SlurmJob
    from frameworm.launch.slurm_queue import JobState


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("slurm")(slurm)


def slurm(
    config: Path = typer.Option(..., "--config", "-c", help="Config file (YAML)."),
    nodes: int = typer.Option(1, min=1, help="Number of nodes."),
    gpus_per_node: int = typer.Option(
        ..., min=0, help="GPUs, and workers, per node; 0: one worker per node on the CPU."
    ),
    out: Optional[Path] = typer.Option(None, help="File to write; default: standard output."),  # noqa: UP045
    submit: bool = typer.Option(False, "--submit", help="Submit the job and follow it to its end."),
    time: Optional[str] = typer.Option(None, help="Time limit, such as 12:00:00 or 2-00."),  # noqa: UP045
    partition: Optional[str] = typer.Option(None, help="Partition."),  # noqa: UP045
    account: Optional[str] = typer.Option(None, help="Account to charge."),  # noqa: UP045
    cpus_per_task: Optional[int] = typer.Option(  # noqa: UP045
        None, min=1, help="CPUs per task; default: 8 per worker."
    ),
    modules: list[str] = typer.Option([], "--module", metavar="NAME", help="Environment module to load."),
    venv: Optional[Path] = typer.Option(  # noqa: UP045
        None, help="Virtual environment to activate; default: the frameworm on the PATH of the submitting shell."
    ),
    launcher: str = typer.Option(
        "torchrun", help="torchrun: one task per node starts its workers; srun: each task is a worker."
    ),
    signal_before: int = typer.Option(
        120, min=30, help="Seconds before the time limit at which training saves and is requeued."
    ),
    settings: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Change a setting of the training."),
    as_json: bool = typer.Option(False, "--json", help="Print the script, or the outcome of the job, as JSON."),
) -> None:
    """Write a SLURM batch script that trains a config, saves before its time limit and resumes after a requeue.

    Example: frameworm slurm --config configs/imdb_ddp_4gpu.yaml --nodes 1 --gpus-per-node 4 --time 4:00:00 --out job.sh

    Written, submitted and followed in one go: add --submit; Ctrl-C leaves the job running.
    """
    if launcher not in ("torchrun", "srun"):
        raise EnvironmentSetupError(f"--launcher {launcher} is not one of torchrun, srun")
    from frameworm.config.load import load_runnable
    from frameworm.launch.slurm import SlurmJob, batch_script

    loaded = load_runnable(config, settings)
    job = SlurmJob(
        config=str(config),
        name=loaded.name,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        launcher="srun" if launcher == "srun" else "torchrun",
        cpus_per_task=cpus_per_task,
        time=time,
        partition=partition,
        account=account,
        modules=tuple(modules),
        venv=None if venv is None else str(venv.expanduser()),
        signal_before_s=signal_before,
        settings=tuple(settings),
        command=command_of(sys.argv[1:]),
    )
    check_config(loaded, job.config, job)
    script = batch_script(job)
    if out is not None:
        write(out, script, mode=0o755)
    if submit:
        raise typer.Exit(_submit(job, script, out, as_json))
    if as_json:
        say(json.dumps({"script": script, "file": None if out is None else str(out), **_shape(job)}))
    elif out is None:
        say(script, end="")
    else:
        say(f"wrote {out}: {in_words(job)}\nsubmit it with: sbatch {out}")


def _shape(job: SlurmJob) -> dict[str, object]:
    return {"nodes": job.nodes, "tasks_per_node": job.tasks_per_node, "world_size": job.world_size}


def _submit(job: SlurmJob, script: str, out: Path | None, as_json: bool) -> int:
    from frameworm.launch.slurm_queue import follow, submit

    job_id = submit(script)
    _say(f"job {job_id}: submitted, {in_words(job)}")

    def on_state(state: JobState) -> None:
        _say(f"job {job_id}: {state}")

    def on_text(text: str) -> None:
        if not as_json:
            print(text, end="", flush=True)  # as the job writes it

    try:
        end = follow(job_id, on_state, on_text)
    except KeyboardInterrupt:
        _say(f"\njob {job_id} keeps running. Check it: squeue -j {job_id}    Cancel it: scancel {job_id}")
        return 130
    if end.exit_code:
        _say(f"job {job_id} ended with exit code {end.exit_code}; log: {end.log}")
    if as_json:
        result = {"job_id": job_id, "state": end.state, "exit_code": end.exit_code, "restarts": end.restarts}
        log = None if end.log is None else str(end.log)
        say(json.dumps({**result, "log": log, "file": None if out is None else str(out), **_shape(job)}))
    return end.exit_code


def _say(text: str) -> None:
    say(text, file=sys.stderr, flush=True)
