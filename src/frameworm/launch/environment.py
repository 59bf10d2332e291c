"""The variables around a process: who am I, and what do my children get to see.

The only place of this package, beside `config.load`, that reads environment variables. Everything else receives the
typed values made here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from frameworm.errors import EnvironmentSetupError
from frameworm.launch.slurm_environment import SlurmStep, slurm_step
from frameworm.launch.variables import check_below, integer, required

Launcher = Literal["torchrun", "srun", "explicit", "spawn", "none"]

# The run id is how a worker recognises that frameworm's own launcher, not a bare torchrun, reports its errors.
RUN_ID_PREFIX = "frameworm-"


@dataclass(frozen=True)
class ProcessInfo:
    """Who this process is among the others of its job."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_address: str | None = None
    master_port: int | None = None
    launcher: Launcher = "none"

    def device_index(self, device_count: int) -> int:
        """Index of this process's GPU among the visible ones; SLURM may show each task only its own."""
        return 0 if self.launcher == "srun" and device_count == 1 else self.local_rank


@dataclass(frozen=True)
class ExplicitRank:
    """RANK and WORLD_SIZE with no LOCAL_RANK beside them."""

    rank: int
    world_size: int
    local_world_size: int | None


@dataclass(frozen=True)
class Surroundings:
    """All that the variables say, checked for sense one by one."""

    worker: ProcessInfo | None  # started by torchrun or frameworm's own launcher
    step: SlurmStep | None
    explicit: ExplicitRank | None
    master_address: str | None
    master_port: int | None
    node_rank: int | None
    job_id: str | None


def detect(environ: Mapping[str, str] | None = None) -> ProcessInfo:
    """Find out who this process is: a worker of torchrun, a task of srun, told by hand, or alone.

    Args:
        environ: The variables; those of the process unless given.

    Returns:
        This process's place in its job.

    Raises:
        EnvironmentSetupError: Variables are missing, malformed or contradict each other.
    """
    around = read_surroundings(environ)
    if around.worker is not None:
        return around.worker
    if around.step is not None:
        return join_step(around.step, around.explicit)
    if around.explicit is not None:
        explicit = around.explicit
        address, port = require_master(around, explicit.world_size)
        return ProcessInfo(
            rank=explicit.rank,
            world_size=explicit.world_size,
            node_rank=explicit.rank,
            num_nodes=explicit.world_size,
            master_address=address,
            master_port=port,
            launcher="explicit",
        )
    return ProcessInfo()


def join_step(step: SlurmStep, explicit: ExplicitRank | None) -> ProcessInfo:
    """This task's place in an srun step; RANK and WORLD_SIZE may repeat it but not contradict it."""
    if explicit is not None and (explicit.rank, explicit.world_size) != (step.rank, step.world_size):
        raise EnvironmentSetupError(
            f"RANK={explicit.rank} WORLD_SIZE={explicit.world_size} contradict srun's SLURM_PROCID={step.rank} of "
            f"{step.world_size} tasks; unset RANK and WORLD_SIZE, srun's own numbers are used"
        )
    return ProcessInfo(**vars(step), launcher="srun")


def require_master(around: Surroundings, world_size: int) -> tuple[str | None, int | None]:
    """The address where the processes meet; only a world of one can do without."""
    if world_size > 1:
        for name, value in (("MASTER_ADDR", around.master_address), ("MASTER_PORT", around.master_port)):
            if value is None:
                raise EnvironmentSetupError(
                    f"{name} is not set, but WORLD_SIZE={world_size}: set MASTER_ADDR and MASTER_PORT to a host and a "
                    "free port that every process can reach"
                )
    return around.master_address, around.master_port


def read_surroundings(environ: Mapping[str, str] | None = None) -> Surroundings:
    """Read and check the variables of torchrun, SLURM and hand-written launch scripts."""
    variables = os.environ if environ is None else environ
    port = integer(variables, "MASTER_PORT", minimum=1)
    if port is not None and port > 65535:
        raise EnvironmentSetupError(f"MASTER_PORT={port} is not a port; choose one from 1024 to 65535")
    address = variables.get("MASTER_ADDR") or None
    in_worker = bool(variables.get("LOCAL_RANK"))
    return Surroundings(
        worker=_torchrun_worker(variables, address, port) if in_worker else None,
        step=None if in_worker else slurm_step(variables, address, port),
        explicit=None if in_worker else _explicit_rank(variables),
        master_address=address,
        master_port=port,
        node_rank=integer(variables, "NODE_RANK"),
        job_id=variables.get("SLURM_JOB_ID") or None,
    )


def collective_timeout_s(default: float, environ: Mapping[str, str] | None = None) -> float:
    """Longest a collective may take: NCCL_TIMEOUT in seconds if set, else the default."""
    text = (os.environ if environ is None else environ).get("NCCL_TIMEOUT")
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 10**9:
        raise EnvironmentSetupError(f"NCCL_TIMEOUT={text} is not a positive number of seconds")
    return seconds


def agent_hosts_store(environ: Mapping[str, str] | None = None) -> bool:
    """Whether torch's agent already listens on MASTER_PORT, so that rank 0 must not."""
    return (os.environ if environ is None else environ).get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def ask_to_keep_freed_memory() -> None:
    """Ask torch for ARM, before it is loaded, not to give freed memory back to the system at once (mimalloc).

    Steps longer than a tenth of a second would get theirs anew each time, page by page.
    """
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10000")


def ask_for_deterministic_cublas() -> None:
    """Give cuBLAS the fixed workspace that deterministic mode needs, unless the user has chosen one."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def all_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of the variables, for those who judge them."""
    return dict(os.environ if environ is None else environ)


def different_variables(
    variables: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> dict[str, str | None]:
    """What another process of the job has other than this one; None: what it does not have."""
    own = os.environ if environ is None else environ
    names = sorted({*variables, *own})
    return {name: variables.get(name) for name in names if variables.get(name) != own.get(name)}


def become_rank(different: Mapping[str, str | None], port: int) -> None:
    """Turn this process into one of several that meet on this machine at a port, with no agent of torch around."""
    for name, value in different.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")


def keep_compiled_in(folder: Path) -> None:
    """Let torch's compiler find in a folder what other processes compiled, and leave there what it compiles."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def prepare_for_ray() -> None:
    """Have Ray report nothing about its use, and start workers in the folder that they are given, unless told to."""
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_CHDIR_TO_TRIAL_DIR"):
        os.environ.setdefault(name, "0")


def restart_count(environ: Mapping[str, str] | None = None) -> int:
    """How often torch's agent has restarted the workers of this job."""
    return integer(os.environ if environ is None else environ, "TORCHELASTIC_RESTART_COUNT") or 0


def launch_id(environ: Mapping[str, str] | None = None) -> str | None:
    """What the workers of one launch, restarted ones included, have in common; None without frameworm's launcher."""
    variables = os.environ if environ is None else environ
    return variables.get("TORCHELASTIC_RUN_ID") if reported_by_launcher(variables) else None


def reported_by_launcher(environ: Mapping[str, str] | None = None) -> bool:
    """Whether frameworm's own launcher waits for this worker and prints what went wrong in it."""
    variables = os.environ if environ is None else environ
    return bool(variables.get("LOCAL_RANK")) and variables.get("TORCHELASTIC_RUN_ID", "").startswith(RUN_ID_PREFIX)


def worker_environment(
    nproc_per_node: int, usable_cpus: int, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Variables the workers get beside the ones torch's agent sets for each rank."""
    variables = os.environ if environ is None else environ
    added = {
        # Restarted workers would otherwise find the dead addresses of the round before in the agent's store.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1,SIGHUP,SIGQUIT",
    }
    if not variables.get("OMP_NUM_THREADS"):
        added["OMP_NUM_THREADS"] = str(max(1, usable_cpus // nproc_per_node))
    return added


def own_command(*arguments: str) -> list[str]:
    """The command line of this program. As for its console script, the working folder is not on the import path."""
    return [sys.executable, str(Path(__file__).resolve().parents[1] / "__main__.py"), *arguments]


def take_from_environment(name: str) -> str:
    """A variable that was meant for this process alone; processes it starts do not see it."""
    return os.environ.pop(name, "")


@contextmanager
def added_to_environment(added: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for a while: torch's agent hands its own on to the workers."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _torchrun_worker(variables: Mapping[str, str], address: str | None, port: int | None) -> ProcessInfo:
    """The place torch's agent (or a script that imitates it) gives to a worker."""
    local_rank = required(variables, "LOCAL_RANK", "")
    rank = required(variables, "RANK", "LOCAL_RANK")
    world_size = required(variables, "WORLD_SIZE", "LOCAL_RANK", minimum=1)
    check_below("RANK", rank, "WORLD_SIZE", world_size)
    local_world_size = integer(variables, "LOCAL_WORLD_SIZE", minimum=1) or world_size
    check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
    for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)):
        if value is None and world_size > 1:
            raise EnvironmentSetupError(f"{name} is not set, but LOCAL_RANK is and WORLD_SIZE={world_size}")
    node_rank = integer(variables, "GROUP_RANK")
    return ProcessInfo(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size if node_rank is None else node_rank,
        num_nodes=integer(variables, "GROUP_WORLD_SIZE", minimum=1) or -(-world_size // local_world_size),
        master_address=address,
        master_port=port,
        launcher="torchrun",
    )


def _explicit_rank(variables: Mapping[str, str]) -> ExplicitRank | None:
    """RANK and WORLD_SIZE set by hand; WORLD_SIZE=1 alone says nothing."""
    rank = integer(variables, "RANK")
    world_size = integer(variables, "WORLD_SIZE", minimum=1)
    if rank is None and world_size in (None, 1):
        return None
    rank = required(variables, "RANK", "WORLD_SIZE")
    world_size = required(variables, "WORLD_SIZE", "RANK", minimum=1)
    check_below("RANK", rank, "WORLD_SIZE", world_size)
    return ExplicitRank(rank, world_size, integer(variables, "LOCAL_WORLD_SIZE", minimum=1))
