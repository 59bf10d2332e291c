"""The environment variables of a process: its place in the job, and the variables of its children.

Apart from `config.load`, this is the only module that reads environment variables. Everything else receives the typed
values made here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from frameworm.errors import EnvironmentSetupError
from frameworm.launch.slurm_environment import SlurmStep, slurm_step
from frameworm.launch.variables import check_below, integer, required

Launcher = Literal["torchrun", "srun", "explicit", "spawn", "other", "none"]

# By this prefix of the run id, a worker knows that frameworm's own launcher, not plain torchrun, reports its errors.
RUN_ID_PREFIX = "frameworm-"


@dataclass(frozen=True)
class ProcessInfo:
    """This process's place among the processes of its job."""

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
        """Index of this process's GPU among the visible ones; SLURM may show each task only its own GPU."""
        return 0 if self.launcher == "srun" and device_count == 1 else self.local_rank // ranks_per_gpu()


@dataclass(frozen=True)
class ExplicitRank:
    """RANK and WORLD_SIZE without LOCAL_RANK."""

    rank: int
    world_size: int
    local_world_size: int | None


@dataclass(frozen=True)
class Surroundings:
    """Everything the variables say; each value is checked on its own."""

    worker: ProcessInfo | None  # started by torchrun, frameworm's own launcher or a registered one
    step: SlurmStep | None
    explicit: ExplicitRank | None
    master_address: str | None
    master_port: int | None
    node_rank: int | None
    job_id: str | None


Reader = Callable[[Mapping[str, str]], ProcessInfo | None]

_readers: dict[str, Reader] = {}


def register_launcher(name: str, read: Reader) -> None:
    """Recognise the processes of one more launcher in this process; one of the same name is replaced.

    Its variables come after torchrun's and before SLURM's, which processes of other launchers often inherit.

    Args:
        name: The launcher's name.
        read: Given the variables, returns this process's place (`launcher="other"`), or None where the launcher has
            not started it.
    """
    _readers[name] = read


def detect(environ: Mapping[str, str] | None = None) -> ProcessInfo:
    """Determine this process's place: a torchrun worker, an srun task, set by hand, or alone.

    Args:
        environ: The variables; default: those of the process.

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
    """Return this task's place in an srun step; RANK and WORLD_SIZE may repeat it but not contradict it."""
    if explicit is not None and (explicit.rank, explicit.world_size) != (step.rank, step.world_size):
        raise EnvironmentSetupError(
            f"RANK={explicit.rank} WORLD_SIZE={explicit.world_size} contradict srun's SLURM_PROCID={step.rank} of "
            f"{step.world_size} tasks; unset RANK and WORLD_SIZE, srun's own numbers are used"
        )
    return ProcessInfo(**vars(step), launcher="srun")


def require_master(around: Surroundings, world_size: int) -> tuple[str | None, int | None]:
    """Return the rendezvous address; it may be missing only if the world size is 1."""
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
    if variables.get("LOCAL_RANK"):
        worker: ProcessInfo | None = _torchrun_worker(variables, address, port)
    else:
        worker = next(filter(None, (read(variables) for read in _readers.values())), None)
    in_worker = worker is not None
    return Surroundings(
        worker=worker,
        step=None if in_worker else slurm_step(variables, address, port),
        explicit=None if in_worker else _explicit_rank(variables),
        master_address=address,
        master_port=port,
        node_rank=integer(variables, "NODE_RANK"),
        job_id=variables.get("SLURM_JOB_ID") or None,
    )


def ranks_per_gpu(environ: Mapping[str, str] | None = None) -> int:
    """Number of processes per GPU: 1, or FRAMEWORM_RANKS_PER_GPU for tests with more ranks than GPUs."""
    return integer(os.environ if environ is None else environ, "FRAMEWORM_RANKS_PER_GPU", minimum=1) or 1


def seem_on_own_host(rank: int) -> None:
    """Make NCCL, which wants one GPU per rank of a host, believe that this rank is alone on its host."""
    os.environ.setdefault("NCCL_HOSTID", f"rank-{rank}")


def collective_timeout_s(default: float, environ: Mapping[str, str] | None = None) -> float:
    """Longest time for a collective: NCCL_TIMEOUT in seconds if set, else the default."""
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
    """True if torch's agent already listens on MASTER_PORT, so that rank 0 must not."""
    return (os.environ if environ is None else environ).get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def ask_to_keep_freed_memory() -> None:
    """Ask torch's allocator on ARM (mimalloc), before torch is loaded, to keep freed memory for a while.

    Otherwise steps longer than a tenth of a second would get all their memory from the system again, page by page.
    """
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10000")


def ask_for_deterministic_cublas() -> None:
    """Give cuBLAS the fixed workspace that deterministic mode needs, unless the user has chosen one."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def all_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a copy of the variables, for checks."""
    return dict(os.environ if environ is None else environ)


def different_variables(
    variables: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> dict[str, str | None]:
    """Return the variables of another process of the job that differ from this one's; None for those it lacks."""
    own = os.environ if environ is None else environ
    names = sorted({*variables, *own})
    return {name: variables.get(name) for name in names if variables.get(name) != own.get(name)}


def become_rank(different: Mapping[str, str | None], port: int) -> None:
    """Make this process a rank of a job that meets at a port of this machine, without torch's agent."""
    for name, value in different.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")


def keep_compiled_in(folder: Path) -> None:
    """Let torch's compiler share compiled code with other processes through a folder."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def prepare_for_ray() -> None:
    """Disable Ray's usage statistics, and start workers in the given folder, unless the user has set otherwise."""
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_CHDIR_TO_TRIAL_DIR"):
        os.environ.setdefault(name, "0")


def restart_count(environ: Mapping[str, str] | None = None) -> int:
    """How often torch's agent has restarted the workers of this job."""
    return integer(os.environ if environ is None else environ, "TORCHELASTIC_RESTART_COUNT") or 0


def launch_id(environ: Mapping[str, str] | None = None) -> str | None:
    """Id shared by the workers of one launch, including restarted ones; None without frameworm's launcher."""
    variables = os.environ if environ is None else environ
    return variables.get("TORCHELASTIC_RUN_ID") if reported_by_launcher(variables) else None


def reported_by_launcher(environ: Mapping[str, str] | None = None) -> bool:
    """True if frameworm's own launcher waits for this worker and prints its errors."""
    variables = os.environ if environ is None else environ
    return bool(variables.get("LOCAL_RANK")) and variables.get("TORCHELASTIC_RUN_ID", "").startswith(RUN_ID_PREFIX)


def worker_environment(
    nproc_per_node: int, usable_cpus: int, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Variables for the workers, in addition to those that torch's agent sets for each rank."""
    variables = os.environ if environ is None else environ
    added = {
        # Restarted workers would otherwise find dead addresses of the previous round in the agent's store.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGUSR1,SIGHUP,SIGQUIT",
    }
    if not variables.get("OMP_NUM_THREADS"):
        added["OMP_NUM_THREADS"] = str(max(1, usable_cpus // nproc_per_node))
    return added


def own_command(*arguments: str) -> list[str]:
    """Command line of this program. As with its console script, the working directory is not on the import path."""
    return [sys.executable, str(Path(__file__).resolve().parents[1] / "__main__.py"), *arguments]


_INSIDE = "FRAMEWORM_INTERNAL_VERB"


def mark_inside(verb: str) -> dict[str, str]:
    """What the environment of processes that a verb starts has, so that they know of it."""
    return {_INSIDE: verb}


def inside_verb() -> str | None:
    """The verb of the Python API that this process was started for, if any."""
    return os.environ.get(_INSIDE)


def take_from_environment(name: str) -> str:
    """Remove and return a variable meant for this process only, so that its children do not see it."""
    return os.environ.pop(name, "")


@contextmanager
def added_to_environment(added: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for a while, because torch's agent passes its own on to the workers."""
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
    """Place of a worker of torch's agent, or of a script that imitates it."""
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
    """RANK and WORLD_SIZE set by hand; WORLD_SIZE=1 alone means nothing."""
    rank = integer(variables, "RANK")
    world_size = integer(variables, "WORLD_SIZE", minimum=1)
    if rank is None and world_size in (None, 1):
        return None
    rank = required(variables, "RANK", "WORLD_SIZE")
    world_size = required(variables, "WORLD_SIZE", "RANK", minimum=1)
    check_below("RANK", rank, "WORLD_SIZE", world_size)
    return ExplicitRank(rank, world_size, integer(variables, "LOCAL_WORLD_SIZE", minimum=1))
