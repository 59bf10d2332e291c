"""Decides whether this process trains alone, joins others, or starts the workers of this node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from frameworm.errors import EnvironmentSetupError
from frameworm.launch.environment import (
    ExplicitRank,
    ProcessInfo,
    Surroundings,
    detect,
    join_step,
    read_surroundings,
    require_master,
)
from frameworm.launch.slurm_environment import SlurmStep

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class LaunchPlan:
    """What to do; for `launch`, with how many workers and where the nodes rendezvous."""

    action: Literal["single", "join", "launch"]
    process: ProcessInfo = field(default_factory=ProcessInfo)  # own place; for `launch` it only starts others
    nproc_per_node: int = 1
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = 0  # None: the rendezvous assigns the numbers
    rendezvous: Literal["local", "static", "c10d"] = "local"
    master_address: str = "127.0.0.1"
    master_port: int = 0  # 0: any free port of this machine
    run_id: str = "job"


def plan_launch(
    distributed: bool,
    nproc_per_node: int | Literal["auto"] | None = None,
    nnodes: str | int | None = None,
    node_rank: int | None = None,
    master_address: str | None = None,
    master_port: int | None = None,
    rdzv_endpoint: str | None = None,
    device_count: int = 0,
    environ: Mapping[str, str] | None = None,
) -> LaunchPlan:
    """Decide how this process takes part in training.

    Args:
        distributed: Whether `--distributed` was given. A worker of torchrun joins even without it.
        nproc_per_node: Workers per node; auto or None is one per GPU, or one where there is no GPU.
        nnodes: Number of nodes, or `MIN:MAX` for an elastic job.
        node_rank: Number of this node among them, from 0.
        master_address: Host of the first node.
        master_port: Port on the first node.
        rdzv_endpoint: `HOST[:PORT]` where the nodes meet and get their numbers.
        device_count: GPUs of this node.
        environ: The variables; default: those of the process.

    Returns:
        The plan.

    Raises:
        EnvironmentSetupError: Flags and variables contradict each other.
    """
    around = read_surroundings(environ)
    if around.worker is not None:
        return LaunchPlan("join", detect(environ))
    flags_given = nnodes is not None or node_rank is not None or master_address is not None or rdzv_endpoint is not None
    if not distributed:
        if flags_given or nproc_per_node is not None or master_port is not None:
            raise EnvironmentSetupError("--nproc-per-node, --nnodes and their like need --distributed")
        return LaunchPlan("single")
    if isinstance(nproc_per_node, int) and nproc_per_node < 1:
        raise EnvironmentSetupError(f"--nproc-per-node must be 1 or more, got {nproc_per_node}")
    wanted = nproc_per_node if isinstance(nproc_per_node, int) else None
    if around.explicit is not None and not _is_srun_task(around):
        return _plan_from_first_rank(around, around.explicit, wanted, nnodes, device_count)
    workers = wanted or device_count or 1
    run_id = around.job_id or "job"
    if around.step is not None and not flags_given:
        if nproc_per_node is None:
            return LaunchPlan("join", join_step(around.step, around.explicit))
        return _plan_from_step(around.step, workers, run_id)
    min_nodes, max_nodes = _parse_nnodes(nnodes)
    if max_nodes == 1 and rdzv_endpoint is None:
        return LaunchPlan("launch", nproc_per_node=workers, run_id=run_id)
    if rdzv_endpoint is not None:
        host, port = _parse_endpoint(rdzv_endpoint)
        if node_rank is None or min_nodes != max_nodes:
            return LaunchPlan(
                "launch",
                nproc_per_node=workers,
                min_nodes=min_nodes,
                max_nodes=max_nodes,
                node_rank=node_rank,
                rendezvous="c10d",
                master_address=host,
                master_port=port,
                run_id=run_id,
            )
        master_address, master_port = host, port
    if min_nodes != max_nodes:
        raise EnvironmentSetupError(f"--nnodes {nnodes} is a range: it needs --rdzv-endpoint HOST:PORT to meet at")
    node_rank = around.node_rank if node_rank is None else node_rank
    master_address = master_address or around.master_address
    if node_rank is None or master_address is None:
        raise EnvironmentSetupError(
            f"--nnodes {nnodes} needs a place to meet: --node-rank K with --master-addr HOST and --master-port PORT, "
            "or --rdzv-endpoint HOST:PORT, the same on every node but for K"
        )
    return _static_plan(
        workers, max_nodes, node_rank, master_address, master_port or around.master_port or DEFAULT_PORT, run_id
    )


def _is_srun_task(around: Surroundings) -> bool:
    """True if srun's numbers count, not RANK's: even inside srun, RANK may be the first rank of a node."""
    assert around.explicit is not None
    return around.step is not None and (
        around.explicit.world_size == around.step.world_size or around.master_address is None
    )


def _plan_from_first_rank(
    around: Surroundings, explicit: ExplicitRank, wanted: int | None, nnodes: str | int | None, device_count: int
) -> LaunchPlan:
    """Plan where RANK is this node's first rank: divided by the number of workers, it gives the node's number."""
    workers = wanted or explicit.local_world_size or device_count or 1
    rank, world_size = explicit.rank, explicit.world_size
    if world_size % workers or rank % workers:
        raise EnvironmentSetupError(
            f"RANK={rank} WORLD_SIZE={world_size} do not fit {workers} workers per node: RANK is the first rank of "
            f"this node, so both must be multiples of {workers}. Correct them or give --nproc-per-node."
        )
    num_nodes = world_size // workers
    if nnodes is not None and _parse_nnodes(nnodes) != (num_nodes, num_nodes):
        raise EnvironmentSetupError(
            f"--nnodes {nnodes} contradicts WORLD_SIZE={world_size} with {workers} workers per node, which is "
            f"{num_nodes} nodes"
        )
    run_id = around.job_id or "job"
    if num_nodes == 1:
        return LaunchPlan("launch", nproc_per_node=workers, run_id=run_id)
    address, port = require_master(around, world_size)
    assert address is not None
    assert port is not None
    return _static_plan(workers, num_nodes, rank // workers, address, port, run_id)


def _plan_from_step(step: SlurmStep, workers: int, run_id: str) -> LaunchPlan:
    """Plan where srun started one launcher per node."""
    if step.world_size != step.num_nodes:
        raise EnvironmentSetupError(
            f"srun started {step.world_size} tasks on {step.num_nodes} nodes, and --nproc-per-node asks each to start "
            "its node's workers: use srun --ntasks-per-node=1, or leave --nproc-per-node out so that each task is a "
            "worker"
        )
    if step.num_nodes == 1:
        return LaunchPlan("launch", nproc_per_node=workers, run_id=run_id)
    return _static_plan(workers, step.num_nodes, step.node_rank, step.master_address, step.master_port, run_id)


def _static_plan(workers: int, num_nodes: int, node_rank: int, address: str, port: int, run_id: str) -> LaunchPlan:
    if node_rank >= num_nodes or node_rank < 0:
        raise EnvironmentSetupError(f"node rank {node_rank} must be from 0 to {num_nodes - 1} with {num_nodes} nodes")
    return LaunchPlan(
        "launch",
        nproc_per_node=workers,
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        node_rank=node_rank,
        rendezvous="static",
        master_address=address,
        master_port=port,
        run_id=run_id,
    )


def _parse_nnodes(nnodes: str | int | None) -> tuple[int, int]:
    low, colon, high = str(1 if nnodes is None else nnodes).partition(":")
    try:
        smallest, largest = int(low), int(high if colon else low)
    except ValueError:
        smallest = largest = 0
    if not 1 <= smallest <= largest:
        raise EnvironmentSetupError(f"--nnodes must be a number of nodes or MIN:MAX, got {nnodes}")
    return smallest, largest


def _parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Parse `HOST`, `HOST:PORT` or `[IPv6]:PORT`."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint, str(DEFAULT_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise EnvironmentSetupError(f"--rdzv-endpoint must be HOST:PORT, got {endpoint}")
    return host.strip("[]"), int(port)
