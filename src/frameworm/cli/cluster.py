"""What `slurm` and `kubernetes` share: files that start a training elsewhere, of a config that is checked here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from frameworm.errors import EnvironmentSetupError

if TYPE_CHECKING:
    from frameworm.config.schema import Config
    from frameworm.launch.slurm import WorkersOnNodes


def command_of(arguments: list[str]) -> tuple[str, ...]:
    """The command line to put into the file, without what does not change the file."""
    kept: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--out":
            next(remaining, None)
        elif argument not in ("--submit", "--json") and not argument.startswith("--out="):
            kept.append(argument)
    return ("frameworm", *kept)


def check_config(config: Config, label: str, job: WorkersOnNodes) -> None:
    """What would fail on the cluster after hours in the queue fails here."""
    from frameworm.config.resolve import resolve

    if job.gpus_per_node and config.gpu.device == "cpu":
        raise EnvironmentSetupError(
            f"{label} has gpu.device: cpu, so the {job.gpus_per_node} GPUs of each node would stand idle; give "
            "--gpus-per-node 0, or --set gpu.device=auto"
        )
    if not job.gpus_per_node:
        config.gpu.device = "cpu"
    resolve(config, world_size=job.world_size, device="cuda" if job.gpus_per_node else "cpu", bf16=True)


def in_words(job: WorkersOnNodes) -> str:
    """How many ranks there will be, and where."""
    ranks = f"{job.world_size} rank{'s' * (job.world_size > 1)} on {job.nodes} node{'s' * (job.nodes > 1)}"
    return f"{ranks}, {'a GPU each' if job.gpus_per_node else 'on the CPU'}"


def write(out: Path, text: str, mode: int = 0o644) -> None:
    """Write the file."""
    try:
        out.write_text(text, encoding="utf-8")
        out.chmod(mode)
    except OSError as error:
        raise EnvironmentSetupError(f"cannot write {out}: {error.strerror}; make its folder or change --out") from None
