"""What each of several ranks holds under ddp, zero1, zero2 and zero3, against the planner's table.

    PYTHONPATH=src python benchmarks/memory_ranks.py                   # four ranks that share one GPU, by NCCL
    PYTHONPATH=src python benchmarks/memory_ranks.py --device cpu      # two gloo ranks, a tiny model

For each strategy the ranks train a GPT in bf16 for a few steps by `Trainer`, each in a process of its own. Parameters,
gradients and optimizer state are counted by walking this rank's tensors as the update begins; the peak is
`torch.cuda.max_memory_allocated`. Shown is the fullest rank. NCCL refuses two ranks on one GPU of a host, so each rank
is told to be on a host of its own (NCCL_HOSTID) and they talk by sockets. On the CPU there is no peak. Results are
written after every strategy.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from children import Job, run_all
from harness import RESULTS, end_on_term, table, tell_progress, write_results
from memory_plan import GPT, SIZES, Case, filled, load, with_weights
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from frameworm.config.schema import Config
from frameworm.engine.memory.dry_workload import dry_workload
from frameworm.engine.memory.planner import MemoryPlanner
from frameworm.engine.optim.optimizers import build_optimizer
from frameworm.engine.trainer import Trainer
from frameworm.scaling.memory_shapes import block

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
STEPS = 4
DEADLINE_S = 150.0
MOMENTS = ("parameters", "gradients", "optimizer")


def case_of(strategy: str, size: str, micro_batch: int, world_size: int, device: str) -> Case:
    """The setting of all ranks."""
    tiny = ("model.d_model=64", "model.n_heads=4", "model.num_layers=3", "model.max_seq_len=32", "model.vocab_size=512")
    sizes = SIZES[size] if device == "cuda" else tiny
    batch = (f"training.micro_batch={micro_batch}", f"training.global_batch={micro_batch * world_size}")
    more = ("gpu.mixed_precision=bf16", f"parallel.strategy={strategy}")
    return Case(f"gpt {size} {strategy}", GPT, (*sizes, *batch, *more))


def plan(case: Case, device: str, world_size: int) -> dict[str, Any]:
    """In a process of its own: what the planner says of one rank."""
    torch.set_num_threads(1)
    planner = MemoryPlanner(load(case, device), world_size=world_size)
    made = planner.plan(replace(planner.setting, world_size=world_size))
    shapes = planner.shapes
    sharded = made.setting.sharded
    held = shapes.shard_bytes(world_size, device) if sharded else shapes.whole_bytes(device)
    return {
        "parameters": held + shapes.fixed_bytes,
        "gradients": held,
        "optimizer": made.optimizer,
        "peak": made.allocated,
        "plan": made.to_dict(),
    }


def train(case: Case, device: str, rank: int, world_size: int, backend: str, port: int) -> dict[str, Any]:
    """In a process of its own: one rank; what it held."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(0)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=DEADLINE_S),
        device_id=torch.device("cuda", 0) if backend == "nccl" else None,
    )
    config: Config = MemoryPlanner(load(case, device), world_size=world_size).config
    if device == "cuda":
        config.gpu.device_ids = [0] * world_size  # a config file may name a GPU only once
    work = dry_workload(config)
    micro_batch = config.training.micro_batch
    assert isinstance(micro_batch, int)
    torch.manual_seed(0)
    # A list of batches is dealt out to the ranks.
    batches = [filled(work.make_batch(micro_batch), 0, None)] * (STEPS * world_size)
    model = with_weights(work.model, device)
    optimizer = build_optimizer(model, config)
    found: dict[str, Any] = {}

    def look(inner: torch.optim.Optimizer, *_: Any) -> None:
        parameters = list(model.parameters())
        found["gradients"] = _bytes([item.grad for item in parameters], device)
        found["parameters"] = _bytes([*parameters, *model.buffers()], device)
        held = [value for values in inner.state.values() for value in values.values()]
        found["optimizer"] = _bytes(held, device)

    # Under zero1 the optimizer is built anew inside of another; every optimizer's steps are looked at.
    handle = register_optimizer_step_pre_hook(look)
    begun = monotonic()
    try:
        Trainer(model, optimizer, config=config, run_dir=None).train(batches)
    finally:
        handle.remove()
    found["training_s"] = monotonic() - begun
    if device == "cuda":
        found["peak"] = torch.cuda.max_memory_allocated()
        found["reserved"] = torch.cuda.max_memory_reserved()
    dist.barrier(device_ids=[0] if backend == "nccl" else None)
    dist.destroy_process_group()
    return found


def _bytes(tensors: list[Any], device: str) -> int:
    """What the allocator holds for this rank's part of them; tensors that share memory count once."""
    total, seen = 0, set()
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            continue
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if own.device.type == device and own.numel() and own.data_ptr() not in seen:
            seen.add(own.data_ptr())
            total += block(own.nbytes, device)
    return total


def measure(case: Case, device: str, world_size: int, backend: str, limit_s: float) -> dict[str, Any]:
    """All ranks of one strategy; the fullest one's figures."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    jobs = [
        Job(
            f"{case.name} rank {rank}",
            train,
            (case, device, rank, world_size, backend, store.port),
            limit_s,
            {"NCCL_HOSTID": f"host-{rank}", "NCCL_P2P_DISABLE": "1", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world_size)
    ]
    try:
        outcomes = run_all(jobs)
    finally:
        for job in jobs:
            job.end()
    reasons = [f"rank {rank}: {outcome[1]}" for rank, outcome in enumerate(outcomes) if not outcome[0]]
    if reasons:
        return {"failed": "; ".join(reasons)}
    ranks = [outcome[1] for outcome in outcomes]
    fullest = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    return {"measured": fullest, "ranks": ranks}


def show(rows: list[dict[str, Any]]) -> None:
    """Planned and measured, strategy by strategy."""
    cells = []
    for row in rows:
        if "failed" in row:
            cells.append((row["strategy"], row["failed"][:160], *[""] * 7))
            continue
        planned, measured = row["planned"], row["measured"]
        figures = [f"{planned[name] / 2**20:.2f} / {measured[name] / 2**20:.2f}" for name in MOMENTS]
        if "peak" in measured:
            error = planned["peak"] / measured["peak"] - 1
            figures += [f"{planned['peak'] / 2**20:.0f} / {measured['peak'] / 2**20:.0f}", f"{error:+.1%}"]
        else:
            figures += ["-", "-"]
        cells.append((row["strategy"], *figures))
    width = max(len(cell) for cell in cells)
    columns = ("strategy", *MOMENTS, "peak", "error of the peak")
    print("MiB per rank, planned / measured\n")
    print(table(columns, [tuple([*cell, *[""] * width][: len(columns)]) for cell in cells]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="4 on a GPU, 2 on the CPU unless given")
    parser.add_argument("--size", choices=("124M", "350M"), default="124M")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="nccl on a GPU; gloo knows ddp and zero1 there")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="some of %(default)s")
    parser.add_argument("--budget-s", type=float, default=540.0, help="longest it may take (%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    name = arguments.device
    if name == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu runs a tiny model")
    world_size = arguments.ranks or (4 if name == "cuda" else 2)
    backend = arguments.backend or ("nccl" if name == "cuda" else "gloo")
    until = monotonic() + arguments.budget_s
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    settings = {
        "size": arguments.size if name == "cuda" else "tiny",
        "ranks": world_size,
        "backend": backend,
        "micro_batch": arguments.micro_batch,
        "steps": STEPS,
    }
    cases = {
        item: case_of(item, arguments.size, arguments.micro_batch, world_size, name)
        for item in arguments.strategies.split(",")
    }
    plans = [Job(f"plan of {item}", plan, (case, name, world_size), DEADLINE_S) for item, case in cases.items()]
    rows: list[dict[str, Any]] = []
    end_on_term()
    try:
        for (strategy, case), job in zip(cases.items(), plans):
            (planned,) = run_all([job])
            left_s = min(DEADLINE_S, until - monotonic())
            row: dict[str, Any] = {"strategy": strategy}
            if not planned[0]:
                row["failed"] = f"not planned: {planned[1]}"
            elif left_s < 1:
                row["failed"] = "there was no time left for it"
            else:
                tell_progress(f"{strategy}: {world_size} ranks")
                row.update(planned=planned[1], **measure(case, name, world_size, backend, left_s))
            rows.append(row)
            path = write_results("memory_ranks", torch.device(name), settings, {"strategies": rows}, arguments.out)
    except KeyboardInterrupt:
        tell_progress("stopped")
    finally:
        for job in plans:
            job.end()
    show(rows)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
