"""The memory planner against the truth: planned and measured peaks of real training steps on one device.

    PYTHONPATH=src python benchmarks/memory_plan.py                    # one GPU, about ten minutes
    PYTHONPATH=src python benchmarks/memory_plan.py --device cpu       # small sizes, to see that it runs

Every setting is planned by `MemoryPlanner` (dry run on fake tensors, nothing measured) and then trained for a few steps
and one validation batch by `Trainer` in a process of its own, on random tokens of the greatest length. Measured is
`torch.cuda.max_memory_allocated` over the whole process; the CPU's stand-in are the allocator's events in the profiler.
The error is planned / measured - 1. `reserved` and `beside torch` show what the plan's `allocator` and `context` stand
for. Compared with: the memory of the same settings counted by weights alone (16 bytes per parameter).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, table, tell_progress, write_results
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from frameworm.config.load import load_config
from frameworm.config.schema import Config
from frameworm.engine.dry_workload import dry_workload
from frameworm.engine.memory_planner import MemoryPlanner
from frameworm.engine.optimizers import build_optimizer
from frameworm.engine.trainer import Trainer

CONFIGS = Path(__file__).parents[1] / "configs"
DEADLINE_S = 300
STEPS = 4
MEDIAN_GOAL, WORST_GOAL = 0.05, 0.12
GPT, TEXTS = "gpt2_124m.yaml", "ag_news_single_gpu_optimized.yaml"
SIZES = {
    "124M": (),
    "350M": ("model.d_model=1024", "model.n_heads=16", "model.num_layers=24"),
    "774M": ("model.d_model=1280", "model.n_heads=20", "model.num_layers=36"),
}
FP32, SELECTIVE, FULL = (
    "gpu.mixed_precision=off",
    "memory.activation_checkpointing=selective",
    "memory.activation_checkpointing=full",
)


@dataclass(frozen=True)
class Case:
    """One setting; packed texts have `tokens` each."""

    name: str
    config: str
    overrides: tuple[str, ...]
    tokens: float | None = None


def gpt(size: str, micro_batch: int, *more: str) -> Case:
    """A decoder."""
    words = " ".join(item.split("=")[1] if "precision" not in item else "fp32" for item in more)
    overrides = (*SIZES[size], f"training.micro_batch={micro_batch}", f"training.global_batch={micro_batch}", *more)
    return Case(f"gpt {size} b{micro_batch} {words}".strip(), GPT, overrides)


def texts(micro_batch: int, *more: str, tokens: float | None = None) -> Case:
    """The classifier."""
    words = " ".join(item.split("=")[1] if "precision" not in item else "fp32" for item in more)
    overrides = (f"training.micro_batch={micro_batch}", f"training.global_batch={micro_batch}", *more)
    return Case(f"texts b{micro_batch} {words}".strip(), TEXTS, overrides, tokens)


CASES = (
    texts(128),
    texts(1024),
    texts(4096),
    texts(1024, FP32),
    texts(1024, FULL),
    texts(4096, "data.batching=packed", tokens=64.0),
    gpt("124M", 1),
    gpt("124M", 16),
    gpt("124M", 64),
    gpt("124M", 256),
    gpt("124M", 16, FP32),
    gpt("124M", 64, SELECTIVE),
    gpt("124M", 64, FULL),
    gpt("124M", 32, "gpu.compile_model=true"),
    gpt("350M", 16),
    gpt("350M", 32, SELECTIVE),
    gpt("774M", 8),
    gpt("774M", 32, FULL),
)
_TINY = ("model.d_model=64", "model.n_heads=4", "model.num_layers=2", "model.max_seq_len=64")
SMALL = (
    Case("texts b32", TEXTS, (*_TINY, "training.micro_batch=32", "training.global_batch=32")),
    Case("texts b32 full", TEXTS, (*_TINY, "training.micro_batch=32", "training.global_batch=32", FULL)),
    Case(
        "gpt b16",
        GPT,
        (*_TINY, "training.micro_batch=16", "training.global_batch=16", "model.vocab_size=1024"),
    ),
)


def load(case: Case, device: str) -> Config:
    """The case's config for a device, with the whole of it to use."""
    fixed = (f"gpu.device={device}", "gpu.memory_fraction=1.0", "observe.progress=false", "data.num_workers=0")
    return load_config(CONFIGS / case.config, [*case.overrides, *fixed])


def planner_of(case: Case, device: str) -> MemoryPlanner:
    """What plans the case."""
    return MemoryPlanner(load(case, device), tokens_per_sample=case.tokens)


def train(case: Case, device: str) -> dict[str, Any]:
    """A few real steps and a validation batch; the memory they took."""
    planner = planner_of(case, device)
    config = planner.config
    work = dry_workload(config, case.tokens)
    micro_batch = config.training.micro_batch
    eval_batch = config.data.eval_batch
    assert isinstance(micro_batch, int)
    assert isinstance(eval_batch, int)
    assert work.make_validation is not None
    torch.manual_seed(0)
    model = work.model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    length = config.model.max_seq_len  # type: ignore[union-attr]
    batches = [filled(work.make_batch(micro_batch), length, case.tokens)] * STEPS
    validation = [filled(work.make_validation(eval_batch), length, None)]
    trainer = Trainer(model, build_optimizer(model, config), config=config, run_dir=None)
    if device == "cuda":
        trainer.train(batches, validation)
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        return {
            "measured_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "beside_torch_bytes": total - free - reserved,
        }
    before = sum(item.numel() * item.element_size() for item in model.parameters())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.train(batches, validation)
    return {"measured_bytes": before + most_allocated(profiler), "reserved_bytes": None, "beside_torch_bytes": None}


def filled(batch: dict[str, Tensor], length: int, tokens: float | None) -> dict[str, Tensor]:
    """Values for a batch that has only shapes: small tokens, texts of full or of the given length."""
    values = {name: torch.randint(0, 2, item.shape, dtype=item.dtype) for name, item in batch.items()}
    if "lengths" in values:
        values["lengths"].fill_(length)
    if "offsets" in values:
        samples, capacity = len(values["labels"]), len(values["input_ids"])
        each = min(length, int(tokens or length), capacity // samples)
        borders = torch.arange(samples + 1) * each
        tail = borders[-1] + length * torch.arange(1, len(values["offsets"]) - samples)
        values["offsets"] = torch.cat([borders, tail.clamp(max=capacity)]).int()
        values["positions"] = torch.arange(capacity) % each
    return values


def most_allocated(profiler: Any) -> int:
    """The largest sum of allocations less releases, from the profiler's events."""
    found: list[tuple[int, int]] = []

    def walk(events: Any) -> None:
        for event in events:
            if event.tag.name == "Allocation":
                found.append((event.start_time_ns, event.extra_fields.alloc_size))
            walk(event.children)

    walk(profiler.profiler.kineto_results.experimental_event_tree())
    held = most = 0
    for _, size in sorted(found, key=lambda item: item[0]):
        held += size
        most = max(most, held)
    return most


def measure(case: Case, device: str) -> dict[str, Any]:
    """The same in a process of its own; what went wrong is said instead."""
    command = [sys.executable, __file__, "--device", device, "--child", case.name]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=dict(os.environ))
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {DEADLINE_S} s"}
    if ended.returncode:
        return {"failed": (ended.stderr.strip().splitlines() or ["no message"])[-1][:300]}
    measured: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return measured


def run(cases: tuple[Case, ...], device: str) -> list[dict[str, Any]]:
    """Plan and measure every case."""
    rows = []
    for case in cases:
        tell_progress(case.name)
        plan = planner_of(case, device).plan()
        row: dict[str, Any] = {
            "name": case.name,
            "config": case.config,
            "overrides": list(case.overrides),
            "planned_bytes": plan.allocated,
            "plan": plan.to_dict(),
            "weights_only_bytes": 16 * planner_of(case, device).shapes.parameters,
            **measure(case, device),
        }
        if "measured_bytes" in row:
            row["error"] = row["planned_bytes"] / row["measured_bytes"] - 1
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The table, and how the goals were met."""
    cells = []
    for row in rows:
        if "error" not in row:
            cells.append((row["name"], _gib(row["planned_bytes"]), row["failed"], "", "", ""))
            continue
        cells.append(
            (
                row["name"],
                _gib(row["planned_bytes"]),
                _gib(row["measured_bytes"]),
                f"{row['error']:+.1%}",
                _gib(row["reserved_bytes"]),
                _gib(row["weights_only_bytes"]),
            )
        )
    print(table(("setting", "planned", "measured", "error", "reserved", "weights only"), cells))
    errors = [abs(row["error"]) for row in rows if "error" in row]
    if errors:
        median, worst = statistics.median(errors), max(errors)
        print(f"\nmedian error {median:.1%} (goal {MEDIAN_GOAL:.0%}), largest {worst:.1%} (goal {WORST_GOAL:.0%})")


def _gib(size: float | None) -> str:
    return "-" if size is None else f"{size / 2**30:.2f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", help="cases whose name holds these words")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    arguments = parser.parse_args()
    cases = CASES if arguments.device == "cuda" else SMALL
    if arguments.child is not None:
        case = next(item for item in cases if item.name == arguments.child)
        print(json.dumps(train(case, arguments.device)))
        return
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu runs small sizes")
    if arguments.only:
        cases = tuple(item for item in cases if arguments.only in item.name)
    rows = run(cases, arguments.device)
    show(rows)
    errors = [abs(row["error"]) for row in rows if "error" in row]
    results = {
        "cases": rows,
        "median_error": statistics.median(errors) if errors else None,
        "largest_error": max(errors, default=None),
    }
    goals = {"median": MEDIAN_GOAL, "largest": WORST_GOAL}
    settings = {"steps": STEPS, "deadline_s": DEADLINE_S, "goals": goals}
    path = write_results("memory_plan", torch.device(arguments.device), settings, results, arguments.out)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
