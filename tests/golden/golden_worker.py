"""A process that runs tasks of `golden_cases`, or starts two ranks that do; see `golden_cases.run_tasks`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import golden_cases
import torch

from frameworm import Trainer, run  # noqa: F401  (imported before ranks are forked)
from frameworm.distributed import cleanup, setup_ddp

COLLECTIVE_TIMEOUT_S = 120.0


def work(rank: int, world_size: int, out: str, tasks: list[str]) -> None:
    """Run the tasks in order and write what they return."""
    torch.set_num_threads(1)
    if world_size > 1:
        setup_ddp(rank, world_size, backend="gloo", timeout_s=COLLECTIVE_TIMEOUT_S)
    results = {task: golden_cases.perform(task) for task in tasks}
    if world_size > 1:
        cleanup()
    (Path(out) / f"rank-{rank}.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    world_size, out, *tasks = sys.argv[1:]
    if world_size == "1":
        work(0, 1, out, tasks)
    else:
        # Forked, not spawned: nothing of torch has run yet, and imports are paid for once.
        if not torch.cuda.is_available():  # the compiler may ask for a GPU, which must not be forked
            import torch._dynamo
            import torch.distributed.fsdp
        ranks = (int(world_size), out, tasks)
        torch.multiprocessing.start_processes(work, ranks, nprocs=int(world_size), start_method="fork")
