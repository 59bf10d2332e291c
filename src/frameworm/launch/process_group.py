"""Joining and leaving the process group of a job."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from frameworm.errors import DeviceError, EnvironmentSetupError
from frameworm.launch.environment import (
    ProcessInfo,
    collective_timeout_s,
    detect,
    ranks_per_gpu,
    read_surroundings,
    seem_on_own_host,
)
from frameworm.launch.stores import PrefixStore, Store, first_line, open_store
from frameworm.torch_private.distributed import abort_group, default_store

DEFAULT_TIMEOUT_S = 600.0

T = TypeVar("T")


@dataclass
class _Membership:
    """The group this process belongs to."""

    info: ProcessInfo
    store: Store


_membership: _Membership | None = None


def setup_ddp(
    rank: int | None = None,
    world_size: int | None = None,
    backend: str = "auto",
    timeout_s: float | None = None,
) -> ProcessInfo:
    """Join the process group of this job.

    Under torchrun and srun no arguments are needed. Under `torch.multiprocessing.spawn`, rank and world size are
    enough: the processes find each other on a port that the system picks, unless MASTER_ADDR and MASTER_PORT are set.

    Args:
        rank: This process's rank; default: from the environment.
        world_size: Number of processes; default: from the environment.
        backend: nccl, gloo, or auto: nccl if there are GPUs, else gloo.
        timeout_s: Longest time for a collective; default: 600. NCCL_TIMEOUT overrides it.

    Returns:
        This process's place in the job.

    Raises:
        EnvironmentSetupError: The processes cannot find each other, or rank and world size are invalid.
        DeviceError: There is no GPU for this rank.
    """
    if (rank is None) != (world_size is None):
        raise EnvironmentSetupError("setup_ddp needs both rank and world_size, or neither")
    if rank is not None and world_size is not None and not 0 <= rank < world_size:
        raise EnvironmentSetupError(f"rank {rank} must be from 0 to {world_size - 1} with world_size {world_size}")
    if dist.is_initialized():
        return _check_current(rank, world_size)
    if rank is None or world_size is None:
        return _join(detect(), backend, timeout_s)
    around = read_surroundings()
    detected = detect()
    if (detected.rank, detected.world_size) == (rank, world_size):
        return _join(detected, backend, timeout_s)
    if around.worker is not None and detected.world_size > 1:
        raise EnvironmentSetupError(
            f"setup_ddp(rank={rank}, world_size={world_size}) contradicts RANK={detected.rank} "
            f"WORLD_SIZE={detected.world_size} of torchrun; call setup_ddp() without arguments"
        )
    info = ProcessInfo(
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        master_address=around.master_address,
        master_port=around.master_port,
        launcher="spawn",
    )
    return _join(info, backend, timeout_s)


@contextlib.contextmanager
def process_group(
    info: ProcessInfo | None = None, backend: str = "auto", timeout_s: float | None = None
) -> Iterator[ProcessInfo]:
    """Join the job's process group for the duration of a block; a group that already exists is kept.

    Args:
        info: This process's place; default: from the environment.
        backend: nccl, gloo or auto.
        timeout_s: Longest time for a collective.

    Yields:
        This process's place in the job.
    """
    if dist.is_initialized():
        yield _check_current(info.rank if info else None, info.world_size if info else None)
        return
    try:
        yield _join(info or detect(), backend, timeout_s)
    except Exception as error:
        # Before the connections close: then other ranks fail at once, and the launcher that stops this one needs the
        # cause.
        from frameworm.launch.failures import report_error  # late, because it imports torch's launcher

        report_error(error)
        cleanup(aborting=True)
        raise
    except BaseException:
        cleanup(aborting=True)
        raise
    cleanup()


def cleanup(aborting: bool = False, wait_s: float = 5.0) -> None:
    """Leave the process group; calling it again is harmless.

    Args:
        aborting: Another error is being raised: do not wait for collectives that will never finish.
        wait_s: Longest wait; after that the group is abandoned until the process ends.
    """
    global _membership
    _membership = None
    if not (dist.is_available() and dist.is_initialized()):
        return

    def leave() -> None:
        # In a dying process anything here may fail, and it matters less than the original error.
        with contextlib.suppress(Exception):
            abort = abort_group()
            if aborting and abort is not None and dist.get_backend() == "nccl":
                abort()
            else:
                dist.destroy_process_group()

    if dist.get_world_size() == 1:
        leave()
        return
    with contextlib.suppress(RuntimeError):  # no new threads while the interpreter shuts down
        thread = threading.Thread(target=leave, name="leave_process_group", daemon=True)
        thread.start()
        thread.join(wait_s)


def shared_store(prefix: str) -> Store | None:
    """Return a key-value store shared by the ranks, under the caller's own prefix; None outside a group."""
    if _membership is not None:
        return PrefixStore(prefix, _membership.store)
    if not is_distributed():
        return None
    return PrefixStore(prefix, default_store())


def is_distributed() -> bool:
    """True if this process trains together with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def barrier() -> None:
    """Wait for all ranks."""
    if is_distributed():
        dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)


def all_reduce_sums(values: list[float], device: torch.device | str = "cpu") -> list[float]:
    """Sum each value over the ranks, in double precision.

    Args:
        values: The numbers to sum; equally many on every rank.
        device: Where the backend works: the rank's GPU for nccl, the CPU for gloo.

    Returns:
        The sums, the same on every rank.
    """
    if not is_distributed():
        return list(values)
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    return [float(value) for value in sums.tolist()]


def all_reduce_max(value: float, device: torch.device | str = "cpu") -> float:
    """Return the largest value among the ranks; `device` as for `all_reduce_sums`."""
    if not is_distributed():
        return value
    largest = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def broadcast_object(obj: T, source: int = 0) -> T:
    """Return one rank's object on every rank; what the others pass is ignored."""
    if not is_distributed():
        return obj
    held: list[Any] = [obj]
    dist.broadcast_object_list(held, src=source)
    result: T = held[0]
    return result


def gather_objects(obj: T) -> list[T] | None:
    """Collect one object per rank on rank 0, in rank order; None on the others."""
    if not is_distributed():
        return [obj]
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(obj, gathered, dst=0)
    return gathered


def _check_current(rank: int | None, world_size: int | None) -> ProcessInfo:
    """Check that the existing group is the requested one, and return this process's place in it."""
    current = (dist.get_rank(), dist.get_world_size())
    if rank is not None and (rank, world_size) != current:
        raise EnvironmentSetupError(
            f"this process is already rank {current[0]} of {current[1]} and cannot become rank {rank} of {world_size}; "
            "call cleanup() first"
        )
    if _membership is not None:
        return _membership.info
    detected = detect()
    if (detected.rank, detected.world_size) == current:
        return detected
    return ProcessInfo(
        rank=current[0], local_rank=current[0], world_size=current[1], local_world_size=current[1], launcher="spawn"
    )


def _join(info: ProcessInfo, backend: str, timeout_s: float | None) -> ProcessInfo:
    global _membership
    limit_s = collective_timeout_s(DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s)
    chosen, device = _choose_backend(backend, info)
    store = open_store(info, limit_s)
    try:
        dist.init_process_group(
            chosen,
            store=store,
            rank=info.rank,
            world_size=info.world_size,
            timeout=timedelta(seconds=limit_s),
            device_id=device,
        )
    except dist.DistError as error:
        raise EnvironmentSetupError(
            f"rank {info.rank} of {info.world_size} could not form the {chosen} group: {first_line(error)}"
        ) from error
    _membership = _Membership(info, store)
    return info


def _choose_backend(backend: str, info: ProcessInfo) -> tuple[str, torch.device | None]:
    """Return the backend and, for nccl, this rank's GPU, which becomes the current device."""
    if backend not in ("auto", "nccl", "gloo"):
        raise EnvironmentSetupError(f"backend {backend!r} is not one of auto, nccl, gloo")
    device_count = torch.cuda.device_count() if dist.is_nccl_available() else 0
    if backend == "auto":
        backend = "nccl" if device_count else "gloo"
    if backend == "gloo":
        return backend, None
    if not device_count:
        raise DeviceError("backend nccl needs a CUDA device and a torch built for it; use gloo or auto on CPU")
    index = info.device_index(device_count)
    if index >= device_count:
        raise DeviceError(
            f"rank {info.rank} is number {info.local_rank} on its node and needs GPU {index}, but {device_count} are "
            f"visible: start at most {device_count} processes per node, or use backend gloo"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    if ranks_per_gpu() > 1:
        seem_on_own_host(info.rank)
    return backend, device
