"""Small trainings with a known fault, and healthy ones: what `diagnosis.py` asks the rules about.

Each case is a real run of the engine. Where a case is about anything but computing, the model's own work is a layer
that sleeps in forward and backward: it takes the same time however busy the machine is, so that the fault, not the
neighbours, decides. Simulated parts say so in `about`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from frameworm import Config, RunRecord, Trainer
from frameworm.records.events import Listener
from frameworm.records.schema import StepRecord

HEALTHY = "healthy"
STEPS = 120


@dataclass(frozen=True)
class Case:
    """One training and the verdict it should get."""

    name: str
    expected: str
    about: str
    run: Callable[[Path, int], RunRecord]  # from a folder and a rank
    ranks: int = 1
    needs: str | None = None  # cuda | clock | root | compiler | cores
    threads: int | None = 1
    deadline_s: float = 90.0
    fast: bool = False


CASES: dict[str, Case] = {}


def planted(name: str, expected: str, about: str, **settings: Any) -> Callable[[Any], Any]:
    """Register a case."""

    def register(run: Callable[[Path, int], RunRecord]) -> Callable[[Path, int], RunRecord]:
        CASES[name] = Case(name, expected, about, run, **settings)
        return run

    return register


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        context.backward_s = backward_s
        time.sleep(forward_s)
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(context.backward_s)
        return gradient, None, None


class Sleeper(nn.Module):
    """A small classifier whose step takes a given time."""

    def __init__(self, forward_s: float = 0.01, backward_s: float = 0.02, extra: int = 0) -> None:
        super().__init__()
        self.times = (forward_s, backward_s)
        self.body = nn.Linear(16, 16)
        self.extra = nn.Linear(16, extra) if extra else None
        self.head = nn.Linear(16 + extra, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.body(inputs)
        if self.extra is not None:
            hidden = torch.cat([hidden, self.extra(hidden)], -1)
        return self.head(_Sleep.apply(hidden, *self.times))


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Random samples; `work` is called for each."""

    def __init__(self, count: int, work: Callable[[int], object] = lambda index: None) -> None:
        self.inputs = torch.randn(count, 16, generator=torch.Generator().manual_seed(0))
        self.work = work

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.work(index)
        return self.inputs[index], index % 4


def busy(seconds: float) -> Callable[[int], object]:
    """Python code that computes for that long."""

    def work(index: int) -> int:
        end, total = time.thread_time() + seconds, 0
        while time.thread_time() < end:
            total += index
        return total

    return work


def waiting(seconds: float) -> Callable[[int], object]:
    return lambda index: time.sleep(seconds)


def fit(model: nn.Module, loader: Any, folder: Path | None = None, *, epochs: int = 1, **settings: Any) -> RunRecord:
    """Train with AdamW on the CPU unless told otherwise."""
    settings = {"device": "cpu", "progress": False, "every_steps": None, **settings}
    callbacks = settings.pop("callbacks", ())
    loss_fn = settings.pop("loss_fn", None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    trainer = Trainer(model, optimizer, loss_fn, callbacks=callbacks, run_dir=folder, **settings)
    return trainer.train(loader, epochs=epochs)


def in_memory(batch: int = 8, steps: int = STEPS) -> DataLoader[Any]:
    """Batches that cost next to nothing."""
    return DataLoader(Samples(batch * steps), batch)


# Data.


@planted("slow_dataset", "input_bound", "each sample costs 5 ms of Python, read by the loop itself", fast=True)
def slow_dataset(folder: Path, rank: int) -> RunRecord:
    return fit(Sleeper(), DataLoader(Samples(8 * 80, busy(0.005)), 8))


@planted("slow_collate", "input_bound", "making a batch of samples costs 30 ms")
def slow_collate(folder: Path, rank: int) -> RunRecord:
    def collate(samples: list[Any]) -> Any:
        busy(0.03)(1)
        return torch.utils.data.default_collate(samples)

    return fit(Sleeper(), DataLoader(Samples(8 * STEPS), 8, collate_fn=collate))


@planted("too_few_workers", "input_bound", "one worker, samples that wait 8 ms each for a remote store (slept)")
def too_few_workers(folder: Path, rank: int) -> RunRecord:
    return fit(Sleeper(), DataLoader(Samples(8 * STEPS, waiting(0.008)), 8, num_workers=1))


@planted("restarted_workers", "input_bound", "epochs of 5 steps, workers started anew for each")
def restarted_workers(folder: Path, rank: int) -> RunRecord:
    return fit(Sleeper(), DataLoader(Samples(8 * 5), 8, num_workers=2), epochs=16)


@planted(
    "too_many_workers",
    "cpu_oversubscribed",
    "ten workers per core, each busy, beside a model that computes",
    needs="cores",
    deadline_s=150,
)
def too_many_workers(folder: Path, rank: int) -> RunRecord:
    workers = 10 * len(os.sched_getaffinity(0))
    loader = DataLoader(Samples(16 * 150, busy(0.008)), 16, num_workers=workers)
    return fit(wide_model(256), loader)


@planted("slow_disk", "input_bound", "samples read from a file through a reader held to 2 MB/s (simulated by sleeping)")
def slow_disk(folder: Path, rank: int) -> RunRecord:
    size, rate = 16_384, 2e6
    path = folder.parent / "samples.bin"
    path.write_bytes(os.urandom(size * 64))

    def read(index: int) -> None:
        begin = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            file.seek(index % 64 * size)
            file.read(size)
        time.sleep(max(0.0, size / rate - (time.perf_counter() - begin)))

    return fit(Sleeper(), DataLoader(Samples(8 * STEPS, read), 8))


# Output and saving.


class SlowTerminal(Listener):
    """Prints a table after each step to a pipe whose reader takes 150 kB/s: a terminal over a slow link."""

    def __init__(self) -> None:
        out, into = os.pipe()
        self._file = os.fdopen(into, "w")
        threading.Thread(target=self._read, args=(out,), daemon=True).start()

    @staticmethod
    def _read(out: int) -> None:
        while data := os.read(out, 4096):
            time.sleep(len(data) / 150e3)

    def on_step(self, step: StepRecord) -> None:
        for row in range(100):
            print(f"step {step.step:6d} row {row:3d} loss {step.loss!r:>24} {'-' * 40}", file=self._file)
        self._file.flush()


@planted("print_every_step", "logging_stall", "100 lines per step to a terminal that takes 150 kB/s", fast=True)
def print_every_step(folder: Path, rank: int) -> RunRecord:
    return fit(Sleeper(), in_memory(), callbacks=[SlowTerminal()])


class Measuring(Listener):
    """Computes statistics of all parameters after every step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def on_step(self, step: StepRecord) -> None:
        end = time.perf_counter() + 0.02
        while time.perf_counter() < end:
            for parameter in self._model.parameters():
                torch.histc(parameter.detach(), 100)


@planted("busy_callback", "logging_stall", "a callback makes histograms for 20 ms after every step")
def busy_callback(folder: Path, rank: int) -> RunRecord:
    model = Sleeper()
    return fit(model, in_memory(), callbacks=[Measuring(model)])


@planted("checkpoint_sync", "checkpoint_stall", "12 MB of state saved every 2 steps while training waits", fast=True)
def checkpoint_sync(folder: Path, rank: int) -> RunRecord:
    return fit(Sleeper(extra=60_000), in_memory(steps=60), folder, every_steps=2, mode="sync")


@planted("checkpoint_async", "checkpoint_stall", "120 MB of state saved every step beside training, which is too often")
def checkpoint_async(folder: Path, rank: int) -> RunRecord:
    return fit(Sleeper(extra=500_000), in_memory(steps=40), folder, every_steps=1, mode="async")


# Memory, threads, shapes.


@planted("leak", "memory_growth", "each step keeps 4 MB of outputs in a list")
def leak(folder: Path, rank: int) -> RunRecord:
    kept: list[torch.Tensor] = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        kept.append(torch.ones(2**20))
        return nn.functional.cross_entropy(output, target)

    return fit(Sleeper(), in_memory(steps=250), loss_fn=loss_fn)


def wide_model(width: int = 512) -> nn.Module:
    """A model that computes."""
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), *(_block(width) for _ in range(4)), nn.Linear(width, 4))


def _block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


@planted(
    "oversubscribed_threads", "cpu_oversubscribed", "eight computing threads per core", threads=None, needs="cores"
)
def oversubscribed_threads(folder: Path, rank: int) -> RunRecord:
    torch.set_num_threads(8 * len(os.sched_getaffinity(0)))
    return fit(wide_model(), in_memory(batch=512, steps=60))


@planted(
    "recompiling_shapes", "recompilation", "compiled for static shapes, which change", needs="compiler", deadline_s=300
)
def recompiling_shapes(folder: Path, rank: int) -> RunRecord:
    import torch._dynamo

    torch._dynamo.config.automatic_dynamic_shapes = False
    widths = [8, 9, 10, 11, 12, 13]
    batches = [(torch.randn(widths[index % 6], 16), torch.randint(0, 4, (widths[index % 6],))) for index in range(60)]
    return fit(Plain(), batches, compile_model=True)


class Plain(nn.Module):
    """Two layers in a class of its own: torch leaves an `nn.Sequential` that is compiled as a whole uncompiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs).relu())


@planted("tiny_batch", "small_batch", "batches of 2, found by the analyzer's experiment with 4", deadline_s=120)
def tiny_batch(folder: Path, rank: int) -> RunRecord:
    return analyzed(wide_model(128), TensorDataset(torch.randn(4000, 16), torch.randint(0, 4, (4000,))), 2)


def analyzed(model: nn.Module, data: Dataset[Any], batch: int) -> RunRecord:
    """The analyzer's judgement instead of a run's."""
    from frameworm.diagnose.rules.judge import apply_judgement
    from frameworm.tune.analyzer.analyzer import BottleneckAnalyzer

    analyzer = BottleneckAnalyzer(model, DataLoader(data, batch), "cpu", budget_s=15)
    analysis = analyzer.run()
    return apply_judgement(analysis.record, analyzer.judge(analysis))


def text_config(**data: Any) -> Config:
    """The built-in text classifier on the built-in data."""
    model = {"d_model": 64, "n_heads": 4, "num_layers": 2, "dim_feedforward": 128, "max_seq_len": 128, "dropout": 0.0}
    return Config.model_validate(
        {
            "model": model,
            "data": {"dataset": "generated", "num_workers": 0, **data},
            "training": {"global_batch": 32, "max_steps": 60},
            "gpu": {"device": "cpu"},
            "checkpoint": {"every_steps": None},
            "observe": {"progress": False},
        }
    )


@planted("heavy_padding", "padding_waste", "texts of 20 words padded to 128")
def heavy_padding(folder: Path, rank: int) -> RunRecord:
    from frameworm.engine.run import run

    return run(text_config(pad_to="max"), out=None)


@planted("mixed_lengths", "padding_waste", "texts of 6 to 120 words in one batch, padded to its longest")
def mixed_lengths(folder: Path, rank: int) -> RunRecord:
    from frameworm.engine.run import run

    return run(text_config(), out=None)


# Ranks.


@planted("straggler_compute", "straggler", "rank 1's forward takes 40 ms longer", ranks=2, deadline_s=120)
def straggler_compute(folder: Path, rank: int) -> RunRecord:
    return fit(Sleeper(forward_s=0.01 + 0.04 * rank), in_memory(batch=16), device="cpu")


@planted("straggler_data", "straggler", "rank 1 reads samples that take 5 ms each", ranks=2, deadline_s=120)
def straggler_data(folder: Path, rank: int) -> RunRecord:
    return fit(Sleeper(), DataLoader(Samples(16 * STEPS, waiting(0.005 * rank)), 8))


@planted(
    "large_gradients",
    "communication_bound",
    "60 MB of gradients over loopback beside a short step",
    ranks=2,
    deadline_s=150,
)
def large_gradients(folder: Path, rank: int) -> RunRecord:
    return fit(Sleeper(0.002, 0.004, extra=450_000), in_memory(batch=2, steps=60))


@planted(
    "slow_link",
    "communication_bound",
    "2 MB of gradients between two hosts at 100 Mbit/s",
    ranks=2,
    needs="root",
    deadline_s=150,
)
def slow_link(folder: Path, rank: int) -> RunRecord:
    return fit(Sleeper(extra=25_000), in_memory(batch=8, steps=60))


# Healthy.


@planted("healthy_compute", HEALTHY, "a model that computes, data in memory", fast=True)
def healthy_compute(folder: Path, rank: int) -> RunRecord:
    return fit(wide_model(), in_memory(batch=128, steps=80))


@planted("healthy_workers", HEALTHY, "one worker that keeps up, checkpoints every 100 steps", deadline_s=120)
def healthy_workers(folder: Path, rank: int) -> RunRecord:
    loader = DataLoader(Samples(8 * 120, waiting(0.001)), 8, num_workers=1)
    return fit(Sleeper(0.03, 0.06), loader, folder, every_steps=100)


@planted("healthy_text", HEALTHY, "texts of like length in each batch")
def healthy_text(folder: Path, rank: int) -> RunRecord:
    from frameworm.engine.run import run

    return run(text_config(batching="bucketed"), out=None)


@planted("healthy_accumulation", HEALTHY, "four micro-batches per step, a callback that does little")
def healthy_accumulation(folder: Path, rank: int) -> RunRecord:
    return fit(Sleeper(), in_memory(batch=4, steps=240), accumulation=4, callbacks=[Listener()])


@planted("healthy_ranks", HEALTHY, "two equal ranks, few gradients", ranks=2, deadline_s=120)
def healthy_ranks(folder: Path, rank: int) -> RunRecord:
    return fit(Sleeper(0.02, 0.04), in_memory(batch=16))


@planted("healthy_convolutions", HEALTHY, "a small network for images")
def healthy_convolutions(folder: Path, rank: int) -> RunRecord:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 4),
    )  # fmt: skip
    data = TensorDataset(torch.randn(16 * 100, 3, 32, 32), torch.randint(0, 4, (1600,)))
    return fit(model, DataLoader(data, 16))
