"""Jitter of the step time with Python's collector on its own schedule, and with `memory.enable_automatic_gc`.

    python benchmarks/gc_jitter.py --rounds 6 --steps 1500

The workload is a small model (32-64-10, batch 32) in a process with a large heap (500,000 Python objects, as a
tokenizer or an index of samples makes them), whose data set leaves cyclic garbage behind in every step. In the case
`records kept` it also keeps 200 small objects per step, as a log of samples does; what is kept is what makes Python go
through the whole heap now and then. Both ways of
collecting take turns, one training each per round, in an order drawn anew. The time of a step is what lies between two
requests for a batch, read in the data set by the wall clock and by the processor time of the loop's own thread, which
collects too and which neighbours on a shared machine disturb less; the first tenth of a block is left out. Nothing is
asserted: the figures are what they are on the machine at hand.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
from time import perf_counter, thread_time
from typing import Any

import torch
from harness import table, tell_progress, write_results
from torch import nn
from torch.utils.data import DataLoader, Dataset

from frameworm import Trainer

WAYS = {"python's own way": False, "heap set aside": True}
HEAP_OBJECTS = 500_000
CASES = {"records kept": 200, "nothing kept": 0}  # objects per step


class Node:
    """Two of these that know each other are garbage only a collector can free."""

    def __init__(self) -> None:
        self.other: Node | None = None
        self.row = [0.0, 1.0]


class Batches(Dataset[Any]):
    """The same batch over and over; notes when it is asked for, and litters."""

    def __init__(self, steps: int, cycles: int, kept: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._batch = torch.randn(32, 32, generator=generator), torch.randint(0, 10, (32,), generator=generator)
        self._steps = steps
        self._cycles = cycles
        self._kept = kept
        self._records: list[list[float]] = []
        self.moments: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Any:
        if index >= self._steps:
            raise IndexError
        self.moments.append((perf_counter(), thread_time()))
        for _ in range(self._cycles):
            one, other = Node(), Node()
            one.other, other.other = other, one
        self._records.extend([float(index)] for _ in range(self._kept))
        return self._batch


def step_times(between_steps: bool, steps: int, cycles: int, kept: int) -> list[tuple[float, float]]:
    """Wall and thread seconds of every step of one training, its first tenth left out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    batches = Batches(steps, cycles, kept)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        run_dir=None,
        device="cpu",
        enable_automatic_gc=between_steps,
    )
    trainer.train(DataLoader(batches, batch_size=None))
    moments = batches.moments[steps // 10 :]
    return [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(moments)]


def percentile(ordered: list[float], share: float) -> float:
    """By the nearest rank."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def figures(times: list[float]) -> dict[str, float]:
    """p50, p99 and the longest in milliseconds, and the mean."""
    ordered = sorted(times)
    return {
        "steps": len(ordered),
        "mean_ms": sum(ordered) / len(ordered) * 1e3,
        "p50_ms": percentile(ordered, 0.5) * 1e3,
        "p99_ms": percentile(ordered, 0.99) * 1e3,
        "p99_9_ms": percentile(ordered, 0.999) * 1e3,
        "max_ms": ordered[-1] * 1e3,
    }


def measure(kept: int, rounds: int, steps: int, cycles: int) -> dict[str, dict[str, dict[str, float]]]:
    """Both ways in turn, keeping so many objects per step."""
    heap = [[number, None] for number in range(HEAP_OBJECTS)]
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    order = list(WAYS)
    draw = random.Random(0)
    for number in range(rounds):
        draw.shuffle(order)
        for way in order:
            tell_progress(f"round {number + 1} of {rounds}: {way}, {len(heap):,} objects and {kept} more per step")
            gc.collect()
            times[way] += step_times(WAYS[way], steps, cycles, kept)
    return {
        way: {clock: figures([step[place] for step in found]) for place, clock in enumerate(("wall", "thread"))}
        for way, found in times.items()
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1500, help="per training")
    parser.add_argument("--cycles", type=int, default=20, help="pairs of objects left behind per step")
    parser.add_argument("--no-write", action="store_true", help="print only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {case: measure(kept, arguments.rounds, arguments.steps, arguments.cycles) for case, kept in CASES.items()}
    columns = ["case", "collector", "clock", "mean ms", "p50 ms", "p99 ms", "p99.9 ms", "max ms"]
    names = ["mean_ms", "p50_ms", "p99_ms", "p99_9_ms", "max_ms"]
    rows = [
        [case, way, clock, *(f"{values[name]:.3f}" for name in names)]
        for case, ways in found.items()
        for way, clocks in ways.items()
        for clock, values in clocks.items()
    ]
    print(table(columns, rows))
    if not arguments.no_write:
        settings = {
            "rounds": arguments.rounds,
            "steps": arguments.steps,
            "cycles": arguments.cycles,
            "heap_objects": HEAP_OBJECTS,
            "kept_per_step": CASES,
        }
        write_results("gc_jitter", torch.device("cpu"), settings, found)


if __name__ == "__main__":
    main()
