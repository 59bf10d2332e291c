"""The hosts of a SLURM allocation, and how to start processes on them from its batch script or shell."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from frameworm.errors import EnvironmentSetupError
from frameworm.launch.environment import all_variables, read_surroundings
from frameworm.launch.hostlist import expand_hostlist

_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Allocation:
    """The resources that SLURM gave to this job."""

    job_id: str
    hosts: tuple[str, ...]
    cpus_per_host: int | None = None  # of the smallest host

    def place(self, world_size: int, per_host: int) -> tuple[int, int]:
        """Return the number of hosts and of processes on each.

        Args:
            world_size: Number of processes in total.
            per_host: Most processes per host.

        Raises:
            EnvironmentSetupError: The processes do not fit, or do not fill the hosts evenly.
        """
        if world_size <= per_host:
            return 1, world_size
        if world_size % per_host:
            raise EnvironmentSetupError(
                f"world size {world_size} does not fill hosts of {per_host} processes each; choose a multiple of "
                f"{per_host}, or change --nproc-per-node"
            )
        if world_size // per_host > len(self.hosts):
            raise EnvironmentSetupError(
                f"world size {world_size} needs {world_size // per_host} hosts of {per_host} processes, and job "
                f"{self.job_id} has {len(self.hosts)}; ask SLURM for more, or leave that size out"
            )
        return world_size // per_host, per_host

    def command(self, hosts: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` once on each of that many hosts."""
        start = ["srun", f"--nodes={hosts}", f"--ntasks={hosts}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
        if self.cpus_per_host is not None:
            start.append(f"--cpus-per-task={self.cpus_per_host}")
        return [*start, *command]


def find_allocation(environ: Mapping[str, str] | None = None) -> Allocation | None:
    """Return the allocation around this process; None outside SLURM and inside an srun step.

    Args:
        environ: The variables; default: those of the process.

    Raises:
        EnvironmentSetupError: This process is one of several workers, so that each would start all runs.
    """
    around = read_surroundings(environ)
    if around.worker is not None or (around.step is not None and around.step.world_size > 1):
        raise EnvironmentSetupError(
            "this command starts the processes of each run itself: run it once, in the batch script or a shell, "
            "without torchrun or srun"
        )
    variables = all_variables(environ)
    nodes = variables.get("SLURM_JOB_NODELIST")
    if around.job_id is None or not nodes or around.step is not None:
        return None
    return Allocation(around.job_id, tuple(expand_hostlist(nodes)), _smallest(variables.get("SLURM_JOB_CPUS_PER_NODE")))


def _smallest(text: str | None) -> int | None:
    """The smallest number in a list such as SLURM's `8(x2),4`."""
    found = [_REPEATED.fullmatch(part) for part in (text or "").split(",")]
    numbers = [int(match[1]) for match in found if match is not None]
    return min(numbers, default=None)
