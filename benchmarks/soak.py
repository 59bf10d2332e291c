"""Train, stop and resume for half an hour in one process: does anything leak, do the numbers drift?

    python benchmarks/soak.py --minutes 30 --device cpu

A cycle is one small training (batch norm, dropout, AdamW, a schedule, accumulation with a short last batch, validation,
a checkpoint every second step) that is stopped by Ctrl-C in two steps, other ones in every cycle, and resumed by new
trainers with new models and loaders. The first training is not stopped. After each cycle:

- the loss of every step, the losses of every epoch and all parameters must be bitwise those of the first training;
- memory, GPU memory, open files, threads, child processes, Python objects and tensors that are alive are counted.

The trend of each count is a Theil-Sen slope over the second half, when caches are full. It is a leak where even the
lower end of its 95% interval is above the bound. The trend of the step time is reported and not judged: it follows
whatever else the machine does. Results go to benchmarks/results/soak-DEVICE.json; the exit code is 1 for a leak or a
drift.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import psutil
import torch
from harness import RESULTS, table, tell_progress, write_results
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from frameworm import Callback, Trainer

SAMPLES, BATCH, ACCUMULATION, EPOCHS = 94, 8, 3, 3
STEPS = EPOCHS * math.ceil(SAMPLES / BATCH / ACCUMULATION)
MOST_POINTS = 500  # of a series, when its trend is found
LEAST_POINTS = 12  # fewer prove nothing: some caches may not be full yet
KEPT_POINTS = 100  # of a series, in the results
# By how much a count may grow per cycle of three trainings and about ten checkpoints.
BOUNDS = {
    "memory_bytes": 8192.0,
    "gpu_allocated_bytes": 256.0,
    "gpu_reserved_bytes": 8192.0,
    "open_files": 0.02,
    "threads": 0.02,
    "children": 0.02,
    "objects": 2.0,
    "tensors": 0.02,
}


class Model(nn.Module):
    """Presses Ctrl-C in forward pass `interrupt_in` of training."""

    def __init__(self, interrupt_in: int | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(32, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 5),
        )
        self._interrupt_in = interrupt_in
        self._passes = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self._passes += 1
            if self._passes == self._interrupt_in:
                os.kill(os.getpid(), signal.SIGINT)
        scores: torch.Tensor = self.layers(inputs)
        return scores


class Losses(Callback):
    """Keeps the loss and the time of every step."""

    def __init__(self) -> None:
        self.steps: dict[int, float | None] = {}
        self.step_s: list[float] = []

    def on_step(self, step: Any) -> None:
        self.steps[step.step] = step.loss
        self.step_s.append(step.step_s)


def data(samples: int, seed: int) -> TensorDataset:
    """Samples of five classes."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 32, generator=generator)
    return TensorDataset(inputs, (inputs @ torch.randn(32, 5, generator=generator)).argmax(-1))


class Result(NamedTuple):
    """What must be the same in every cycle."""

    steps: dict[int, float | None]
    epochs: list[tuple[float | None, float | None]]
    parameters: dict[str, torch.Tensor]

    def differs(self, other: Result) -> str | None:
        """What is not bitwise the same, if anything."""
        if self.steps != other.steps:
            return "step losses"
        if self.epochs != other.epochs:
            return "epoch losses"
        names = [name for name, item in self.parameters.items() if not torch.equal(item, other.parameters[name])]
        return ", ".join(names) or None


def train(folder: Path, device: str, interruptions: Sequence[int]) -> tuple[Result, float]:
    """A training that is stopped after so many forward passes of each trainer; with the median time of a step."""
    losses = Losses()
    for number, interrupt_in in enumerate([*interruptions, None]):
        model = Model(interrupt_in)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        trainer = Trainer(
            model,
            optimizer,
            scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
            run_dir=folder,
            callbacks=[losses],
            device=device,
            seed=2,
            accumulation=ACCUMULATION,
            clip_norm=1.0,
            every_steps=2,
        )
        loaders = DataLoader(data(SAMPLES, 3), BATCH, shuffle=True), DataLoader(data(29, 4), BATCH)
        try:
            record = trainer.train(*loaders, epochs=EPOCHS, resume=folder if number else None)
        except KeyboardInterrupt:
            if interrupt_in is None:
                raise
        else:
            if interrupt_in is not None:
                raise RuntimeError("a training did not stop at Ctrl-C")
    epochs = [(epoch.train_loss, epoch.val_loss) for epoch in record.epochs]
    parameters = {name: item.detach().cpu().clone() for name, item in model.state_dict().items()}
    return Result(losses.steps, epochs, parameters), statistics.median(losses.step_s)


def counts(device: str) -> dict[str, float]:
    """What is alive in this process now."""
    gc.collect()
    process = psutil.Process()
    objects = gc.get_objects()
    found: dict[str, float] = {
        "memory_bytes": process.memory_info().rss,
        "open_files": process.num_fds(),
        "threads": process.num_threads(),
        "children": len(process.children(recursive=True)),
        "objects": len(objects),
        "tensors": sum(issubclass(type(item), torch.Tensor) for item in objects),
    }
    if device == "cuda":
        found["gpu_allocated_bytes"] = torch.cuda.memory_allocated()
        found["gpu_reserved_bytes"] = torch.cuda.memory_reserved()
    return found


class Trend(NamedTuple):
    """A slope per cycle with its 95% interval."""

    slope: float
    low: float
    high: float


def trend(values: Sequence[float]) -> Trend:
    """Theil-Sen slope of a series, with Sen's interval."""
    stride = -(-len(values) // MOST_POINTS)
    points = [(place, values[place]) for place in range(0, len(values), stride)]
    count = len(points)
    slopes = sorted(
        (other[1] - one[1]) / (other[0] - one[0]) for start, one in enumerate(points) for other in points[start + 1 :]
    )
    if count < LEAST_POINTS:
        return Trend(statistics.median(slopes) if slopes else 0.0, -math.inf, math.inf)
    spread = 1.96 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low, high = math.floor((len(slopes) - spread) / 2), math.ceil((len(slopes) + spread) / 2)
    return Trend(
        statistics.median(slopes),
        slopes[low] if low >= 0 else -math.inf,
        slopes[high] if high < len(slopes) else math.inf,
    )


def second_half(values: Sequence[float]) -> Sequence[float]:
    """What comes after caches are full."""
    return values[len(values) // 2 :]


def thinned(values: Sequence[float]) -> list[float]:
    """A series short enough for a file of results."""
    return list(values[:: -(-len(values) // KEPT_POINTS)])


def soak(minutes: float, device: str, seed: int = 0) -> dict[str, Any]:
    """Run cycles for so long; returns the results."""
    draw = random.Random(seed)
    series: dict[str, list[float]] = {}
    drifts: list[str] = []
    begun, told, cycles = monotonic(), 0.0, 0
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        expected, _ = train(Path(scratch) / "first", device, ())
        while monotonic() - begun < minutes * 60 or cycles < 4:
            # Forward passes of training: an epoch has 12, the whole training 36.
            first = draw.randint(1, 16)
            second = draw.randint(1, 10)
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                result, step_s = train(Path(folder) / "run", device, (first, second))
            cycles += 1
            problem = expected.differs(result)
            if problem is not None:
                drifts.append(f"cycle {cycles}, stopped in forward passes {first} and {second}: {problem}")
            del result
            for name, value in {**counts(device), "step_s": step_s}.items():
                series.setdefault(name, []).append(value)
            if monotonic() - told > 60:
                told = monotonic()
                tell_progress(f"{cycles} cycles, {series['memory_bytes'][-1] / 2**20:.1f} MiB, {len(drifts)} drifts")
    trends = {}
    for name, values in series.items():
        found = trend(second_half(values))
        bound = BOUNDS.get(name)
        trends[name] = {
            "first": values[0],
            "last": values[-1],
            "slope_per_cycle": found.slope,
            "interval": [item if math.isfinite(item) else None for item in found[1:]],
            "bound": bound,
            "leaks": bound is not None and found.low > bound,
            "series": thinned(values),
        }
    return {"cycles": cycles, "minutes": (monotonic() - begun) / 60, "drifts": drifts, "trends": trends}


def main() -> int:
    """Soak, print the trends and write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="where Ctrl-C comes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    settings = parser.parse_args()
    torch.set_num_threads(1)
    results = soak(settings.minutes, settings.device, settings.seed)
    rows = [
        [
            name,
            f"{item['first']:.6g}",
            f"{item['last']:.6g}",
            f"{item['slope_per_cycle']:.3g}",
            "" if item["bound"] is None else f"{item['bound']:g}",
            "LEAKS" if item["leaks"] else "",
        ]
        for name, item in results["trends"].items()
    ]
    print(table(["count", "first", "last", "per cycle", "bound", ""], rows))
    print(
        f"\n{results['cycles']} cycles in {results['minutes']:.1f} minutes, {len(results['drifts'])} with other numbers"
    )
    for drift in results["drifts"][:10]:
        print(drift)
    chosen = {"minutes": settings.minutes, "seed": settings.seed}
    path = write_results("soak", torch.device(settings.device), chosen, results, settings.out)
    print(path)
    return 1 if results["drifts"] or any(item["leaks"] for item in results["trends"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
