"""Several ranks of NCCL on one GPU, which NCCL takes only if each believes to be on a host of its own."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from frameworm.launch.process_group import cleanup, shared_store


def join_on_one_gpu(rank: int, world_size: int) -> None:
    """Replace this rank's process group by one of NCCL on the first GPU."""
    store = shared_store("nccl")
    assert store is not None
    cleanup()
    os.environ["NCCL_HOSTID"] = f"host-{rank}"
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", 0),
    )
