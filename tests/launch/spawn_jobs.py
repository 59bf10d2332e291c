"""Starts two spawn jobs side by side in one process, with no port chosen, and prints what their ranks summed up."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.multiprocessing


def rank_main(rank: int, world_size: int, job: int, folder: str) -> None:
    from frameworm.launch.process_group import all_reduce_sums, cleanup, setup_ddp

    torch.set_num_threads(1)
    info = setup_ddp(rank, world_size, backend="gloo", timeout_s=60)
    assert (info.rank, info.local_rank, info.world_size) == (rank, rank, world_size)
    total = all_reduce_sums([float(job), 1.0])
    if rank == 0:
        (Path(folder) / f"job-{job}").write_text(f"{total}")
    cleanup()


if __name__ == "__main__":
    start_method, first_job, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.multiprocessing.set_start_method(start_method)
    if start_method == "forkserver":
        torch.multiprocessing.get_context("forkserver").set_forkserver_preload(["torch"])
    jobs = [
        torch.multiprocessing.start_processes(
            rank_main, args=(2, job, folder), nprocs=2, join=False, start_method=start_method
        )
        for job in (first_job, first_job + 1)
    ]
    for job in jobs:
        while not job.join():
            pass
