"""What SLURM tells a process: its place in a step, and contradictions between the variables.

SLURM's variables are inherited by a shell inside an allocation, by a script started from one, and by ssh. A task that
believes a stale one waits for ranks that never come, so contradictions are refused beforehand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from frameworm.errors import EnvironmentSetupError
from frameworm.launch.hostlist import expand_hostlist
from frameworm.launch.variables import check_below, integer, required

# From this number on, SLURM's steps are its batch script, interactive shell and the like, not srun's.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

# Below Linux's range of ports for outgoing connections, so that none of those can be in the way.
FIRST_DERIVED_PORT, DERIVED_PORTS, PORTS_PER_JOB = 20000, 12768, 31

_MEMORY = ("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE")


@dataclass(frozen=True)
class SlurmStep:
    """What srun tells a task about its step."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_address: str
    master_port: int


class Contradiction(NamedTuple):
    """Variables that cannot all be true."""

    variables: tuple[str, ...]
    text: str  # names them with their values and says what to do


def contradictions(environment: Mapping[str, str]) -> list[Contradiction]:
    """Find contradictions among SLURM's variables, or between them and a launcher's.

    Args:
        environment: All variables of the process.

    Returns:
        One entry per contradiction, the most informative first; empty outside SLURM.
    """
    if not any(name.startswith("SLURM_") for name in environment):
        return []
    found: list[Contradiction] = []
    for check in _CHECKS:
        try:
            found += check(environment)
        except EnvironmentSetupError as error:  # an unreadable number or list, reported once
            names = tuple(dict.fromkeys(re.findall(r"\bSLURM_\w+|\bRANK\b|\bWORLD_SIZE\b", str(error))))
            found.append(Contradiction(names, str(error)))
    return list({item.text: item for item in found}.values())


def refuse_contradictions(environment: Mapping[str, str]) -> None:
    """Raise an error if the variables contradict each other.

    Raises:
        EnvironmentSetupError: All contradictions, one per line.
    """
    found = contradictions(environment)
    if found:
        raise EnvironmentSetupError("\n".join(item.text for item in found))


def is_step(environment: Mapping[str, str]) -> bool:
    """True if this is a task of srun; a batch script or an allocation's shell is not."""
    step_id = integer(environment, "SLURM_STEP_ID")
    return step_id is not None and step_id < _FIRST_SPECIAL_STEP and bool(environment.get("SLURM_PROCID"))


def slurm_step(variables: Mapping[str, str], address: str | None, port: int | None) -> SlurmStep | None:
    """Return the srun task that this process is, if any; MASTER_ADDR and MASTER_PORT override derived values."""
    if not is_step(variables):
        return None
    refuse_contradictions(variables)
    rank = required(variables, "SLURM_PROCID", "SLURM_STEP_ID")
    tasks_name = _tasks_name(variables)
    world_size = required(variables, tasks_name, "SLURM_PROCID", minimum=1)
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    if address is None and not nodes:
        if world_size > 1:
            raise EnvironmentSetupError(
                "neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is set: set MASTER_ADDR to the first node's name"
            )
        nodes = "localhost"
    hosts = _hosts(nodes, "SLURM_STEP_NODELIST") if nodes else None
    node_rank = integer(variables, "SLURM_NODEID") or 0
    num_nodes = (
        integer(variables, "SLURM_STEP_NUM_NODES", minimum=1)
        or (len(hosts) if hosts else None)
        or integer(variables, "SLURM_NNODES", minimum=1)
        or 1
    )
    check_below("SLURM_NODEID", node_rank, "SLURM_STEP_NUM_NODES", num_nodes)
    local_rank = integer(variables, "SLURM_LOCALID")
    if local_rank is None:
        raise EnvironmentSetupError("SLURM_LOCALID is not set, but SLURM_PROCID is: start the task with srun")
    counts = _tasks_per_node(variables)
    local_world_size = counts[node_rank] if node_rank < len(counts) else -(-world_size // num_nodes)
    check_below("SLURM_LOCALID", local_rank, "the node's number of tasks", local_world_size)
    job_id = integer(variables, "SLURM_JOB_ID") or 0
    return SlurmStep(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_address=address or (hosts or ["localhost"])[0],
        master_port=port or derived_port(job_id, integer(variables, "SLURM_STEP_ID") or 0),
    )


def derived_port(job_id: int, step_id: int) -> int:
    """Return a port that every task of a step derives alike, and that neighbouring jobs and steps do not share."""
    return FIRST_DERIVED_PORT + (job_id * PORTS_PER_JOB + step_id) % DERIVED_PORTS


def _hosts(text: str, name: str) -> list[str]:
    """Expand the host list of a variable; errors name the variable."""
    try:
        return expand_hostlist(text)
    except EnvironmentSetupError as error:
        raise EnvironmentSetupError(f"{name}: {error}") from None


def _tasks_name(variables: Mapping[str, str]) -> str:
    return "SLURM_STEP_NUM_TASKS" if variables.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"


def _tasks_per_node(variables: Mapping[str, str]) -> list[int]:
    """Expand SLURM's `2(x3),1`; empty if it is unset or in another format."""
    counts: list[int] = []
    for part in (variables.get("SLURM_STEP_TASKS_PER_NODE") or "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return []
        counts.extend([int(match.group(1))] * int(match.group(2) or 1))
    return counts


def _place_in_step(variables: Mapping[str, str]) -> Iterator[Contradiction]:
    """Check this task's numbers against the step's."""
    if not is_step(variables):
        return
    tasks_name = _tasks_name(variables)
    for low, high in (("SLURM_PROCID", tasks_name), ("SLURM_NODEID", "SLURM_STEP_NUM_NODES")):
        number, count = integer(variables, low), integer(variables, high, minimum=1)
        if number is not None and count is not None and number >= count:
            yield Contradiction(
                (low, high),
                f"{low}={number} must be below {high}={count}: they are of different steps; start the task with srun, "
                "or unset the SLURM variables that a shell has kept",
            )


def _tasks_and_nodes(variables: Mapping[str, str]) -> Iterator[Contradiction]:
    """Check the tasks per node against the numbers of tasks and nodes."""
    counts = _tasks_per_node(variables)
    if not counts or not is_step(variables):
        return
    text = f"SLURM_STEP_TASKS_PER_NODE={variables['SLURM_STEP_TASKS_PER_NODE']}"
    for name, is_value in ((_tasks_name(variables), sum(counts)), ("SLURM_STEP_NUM_NODES", len(counts))):
        said = integer(variables, name)
        if said is not None and said != is_value:
            what = "nodes" if name.endswith("NODES") else "tasks"
            yield Contradiction(
                ("SLURM_STEP_TASKS_PER_NODE", name),
                f"{text} is {is_value} {what}, but {name}={said}: they are of different steps; start the task with "
                "srun, or unset the SLURM variables that a shell has kept",
            )


def _lists_and_counts(variables: Mapping[str, str]) -> Iterator[Contradiction]:
    """Check each list of nodes against its number of nodes."""
    pairs = (("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"), ("SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES"))
    for list_name, count_name in pairs:
        text, count = variables.get(list_name), integer(variables, count_name, minimum=1)
        hosts = _hosts(text, list_name) if text else []
        if text and count is not None and len(hosts) != count:
            yield Contradiction(
                (list_name, count_name),
                f"{list_name}={text} lists {len(hosts)} nodes, but {count_name}={count}; unset the one that is not of "
                "this job",
            )


def _step_within_job(variables: Mapping[str, str]) -> Iterator[Contradiction]:
    """Check that a step runs on nodes of its job."""
    step, job = variables.get("SLURM_STEP_NODELIST"), variables.get("SLURM_JOB_NODELIST")
    if not step or not job or not is_step(variables):
        return
    strangers = sorted(set(_hosts(step, "SLURM_STEP_NODELIST")) - set(_hosts(job, "SLURM_JOB_NODELIST")))
    if strangers:
        yield Contradiction(
            ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
            f"SLURM_STEP_NODELIST={step} has {strangers[0]}, which is not in SLURM_JOB_NODELIST={job}; start the task "
            "with srun inside of this job",
        )


def _two_names(variables: Mapping[str, str]) -> Iterator[Contradiction]:
    """Check old against new names of the same value."""
    for new, old in (
        ("SLURM_JOB_ID", "SLURM_JOBID"),
        ("SLURM_STEP_ID", "SLURM_STEPID"),
        ("SLURM_NTASKS", "SLURM_NPROCS"),
        ("SLURM_NNODES", "SLURM_STEP_NUM_NODES" if is_step(variables) else "SLURM_JOB_NUM_NODES"),
    ):
        first, second = variables.get(new), variables.get(old)
        if first and second and first != second:
            yield Contradiction(
                (new, old), f"{new}={first} but {old}={second}: one is of another job or step; unset the stale one"
            )


def _rank_beside(variables: Mapping[str, str]) -> Iterator[Contradiction]:
    """Check RANK and WORLD_SIZE of a launch script against srun, if they count the same processes."""
    if not is_step(variables) or variables.get("LOCAL_RANK"):
        return
    rank, world_size = integer(variables, "RANK"), integer(variables, "WORLD_SIZE")
    here, tasks = integer(variables, "SLURM_PROCID"), integer(variables, _tasks_name(variables))
    if rank is not None and world_size == tasks and rank != here:
        yield Contradiction(
            ("RANK", "SLURM_PROCID"),
            f"RANK={rank} WORLD_SIZE={world_size} contradict srun's SLURM_PROCID={here} of {tasks} tasks; unset RANK "
            "and WORLD_SIZE, srun's own numbers are used",
        )


def _meeting_place(variables: Mapping[str, str]) -> Iterator[Contradiction]:
    """Check that MASTER_ADDR, if it is a node of the step, is the one with rank 0."""
    nodes, address = variables.get("SLURM_STEP_NODELIST"), variables.get("MASTER_ADDR")
    if not nodes or not address or not is_step(variables) or variables.get("SLURM_DISTRIBUTION") == "arbitrary":
        return
    hosts = _hosts(nodes, "SLURM_STEP_NODELIST")
    if address in hosts[1:]:
        yield Contradiction(
            ("MASTER_ADDR", "SLURM_STEP_NODELIST"),
            f"MASTER_ADDR={address} is not the first of SLURM_STEP_NODELIST={nodes}, where rank 0 listens; set it to "
            f"{hosts[0]} or unset it",
        )


def _memory_said_twice(variables: Mapping[str, str]) -> Iterator[Contradiction]:
    """Check that at most one of these is set, because otherwise srun refuses to start."""
    said = tuple(name for name in _MEMORY if variables.get(name))
    if len(said) > 1:
        values = " and ".join(f"{name}={variables[name]}" for name in said)
        yield Contradiction(said, f"{values} exclude each other and srun starts nothing; unset all but one")


def _gpus(variables: Mapping[str, str]) -> Iterator[Contradiction]:
    """Check that no more GPUs are named than SLURM has given."""
    given, visible = integer(variables, "SLURM_GPUS_ON_NODE"), variables.get("CUDA_VISIBLE_DEVICES")
    if given is None or not visible:
        return
    named = len([part for part in visible.split(",") if part.strip()])
    if named > given:
        yield Contradiction(
            ("CUDA_VISIBLE_DEVICES", "SLURM_GPUS_ON_NODE"),
            f"CUDA_VISIBLE_DEVICES={visible} names {named} GPUs, but SLURM_GPUS_ON_NODE={given}; unset "
            "CUDA_VISIBLE_DEVICES where you set it, SLURM sets it itself",
        )


_CHECKS: tuple[Callable[[Mapping[str, str]], Iterator[Contradiction]], ...] = (
    _place_in_step,
    _lists_and_counts,
    _tasks_and_nodes,
    _step_within_job,
    _two_names,
    _rank_beside,
    _meeting_place,
    _memory_said_twice,
    _gpus,
)
