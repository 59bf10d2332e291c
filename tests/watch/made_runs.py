"""Run folders as training leaves them, made without training."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from frameworm.records.observations import Flops, RankSummary, SystemSample
from frameworm.records.samples import sample_line
from frameworm.records.schema import (
    Batch,
    EpochRecord,
    ExpectedSpeedup,
    Finding,
    Memory,
    Phase,
    Quality,
    Remedy,
    RunRecord,
    Statistics,
    StepRecord,
    Throughput,
)
from frameworm.records.store import RunFolder
from frameworm.records.writer import step_line

BEGAN = 1_760_000_000.0
STEPS_PER_EPOCH = 100
PHASES = {"data_wait": 0.002, "forward": 0.006, "backward": 0.010, "optimizer": 0.002}


def step(
    number: int, rank: int = 0, *, ranks: int = 1, began: float = BEGAN, slow_rank: int | None = None
) -> StepRecord:
    """One step of a training whose loss falls and whose step takes about 20 ms."""
    wave = 1 + 0.1 * math.sin(number / 7 + rank)
    phases = {name: seconds * wave for name, seconds in PHASES.items()}
    if ranks > 1:
        if rank == slow_rank:
            phases["backward"] += 0.004
        phases["communication_exposed"] = 0.005 if rank != slow_rank else 0.001
    step_s = sum(phases.values()) + 0.0003
    return StepRecord(
        step=number,
        epoch=1 + (number - 1) // STEPS_PER_EPOCH,
        time=began + number * 0.025,
        step_s=step_s,
        loss=2.3 * math.exp(-number / 300) + 0.2 + 0.05 * math.sin(number),
        lr=1e-3 * min(1.0, number / 50),
        samples=32,
        count=32.0,
        tokens=32 * 40,
        padded_tokens=32 * 60,
        grad_norm=1.0 + 0.2 * math.cos(number / 3),
        phases=phases,
        rank_wait_s=None if ranks == 1 else 0.001,
        metrics={"sync_s": 0.0004},
    )


def sample(number: int, rank: int = 0, began: float = BEGAN, gpu: bool = True) -> SystemSample:
    """One look at the machine."""
    return SystemSample(
        began + number,
        gpu_busy=0.6 + 0.3 * math.sin(number / 9 + rank) if gpu else None,
        gpu_memory_bytes=(30 + rank) * 2**30 if gpu else None,
        gpu_memory_total_bytes=141 * 2**30 if gpu else None,
        gpu_power_w=300.0 + number % 50 if gpu else None,
        cpu_cores=[0.2, 0.9],
        io_wait=0.01,
        host_memory=0.3,
        rss_bytes=2**30 + number * 2**20,
        network_sent_bytes=number * 10**7,
        network_received_bytes=number * 10**7 // 2,
        disk_read_bytes=number * 10**6,
        disk_write_bytes=number * 10**5,
    )


def append_steps(folder: Path, first: int, last: int, rank: int = 0, **options: object) -> None:
    """Write steps as a rank does."""
    with (folder / f"steps-rank{rank}.jsonl").open("a", encoding="utf-8") as file:
        for number in range(first, last + 1):
            file.write(step_line(step(number, rank, **options)) + "\n")  # type: ignore[arg-type]


def write_run(
    root: Path,
    name: str = "demo-20260101-120000",
    *,
    steps: int = 300,
    ranks: int = 1,
    finished: bool = True,
    status: str = "completed",
    word: str = "demo",
    slow_rank: int | None = None,
    began: float = BEGAN,
) -> Path:
    """A run folder with everything in it: steps and samples of all ranks, epochs, checkpoints, a log, a summary."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: demo\nworkload: text_classifier\n", encoding="utf-8")
    for rank in range(ranks):
        append_steps(folder, 1, steps, rank, ranks=ranks, slow_rank=slow_rank, began=began)
        lines = [sample_line(sample(number, rank, began)) for number in range(max(4, steps // 40))]
        (folder / f"system-rank{rank}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    epochs = [
        EpochRecord(number, 2.5, 2.0 / number, 2.1 / number, 1 - 0.5 / number, 1500.0)
        for number in range(1, steps // STEPS_PER_EPOCH + 1)
    ]
    RunFolder(folder).write_epochs(epochs)
    for number in range(STEPS_PER_EPOCH, steps + 1, STEPS_PER_EPOCH):
        place = folder / "checkpoints" / f"step-{number:08d}"
        place.mkdir(parents=True)
        (place / "manifest.json").write_text("{}", encoding="utf-8")
        (place / "model.bin").write_bytes(b"0" * 5000)
    (folder / "train.log").write_text(f"starting {word}\nepoch 1\n", encoding="utf-8")
    if finished:
        RunFolder(folder).write_summary(summary(folder, word, status, steps, ranks, epochs))
    return folder


def summary(folder: Path, word: str, status: str, steps: int, ranks: int, epochs: list[EpochRecord]) -> RunRecord:
    """The summary of such a run, with a word in every place that holds words."""
    step_s = sum(PHASES.values())
    return RunRecord(
        word,
        status,
        {"torch": "2.13", word: word},
        Batch(32, 1, ranks, 32 * ranks),
        started="2026-01-01T12:00:00+00:00",
        wall_s=7.5,
        steps=steps,
        device="NVIDIA H200",
        strategy="ddp" if ranks > 1 else "single",
        precision="bf16",
        parameters=1_234_567,
        throughput=Throughput(
            32 * ranks / step_s, 1280 * ranks / step_s, Statistics(0.02, 0.002, 0.018, 0.03, 0.02, 0.023, 0.028)
        ),
        phases={name: Phase(seconds, seconds / step_s) for name, seconds in PHASES.items()},
        memory=Memory(30 * 2**30, 31 * 2**30, 141 * 2**30, 2**31),
        mfu=0.31,
        flops=Flops(6e12, 6e12 / step_s, precision="bf16", peak_per_s=989e12),
        quality=Quality(0.31, 0.4, 0.91),
        ranks=[RankSummary(rank, step_s, dict(PHASES)) for rank in range(ranks)],
        workload="text_classifier",
        verdict="input_bound",
        findings=[
            Finding(
                "input_bound",
                "warning",
                0.12,
                {"data_wait_s": 0.002, word: word},
                [Remedy("data.num_workers", 4, f"read with more workers {word}")],
                ExpectedSpeedup(1.13, 1.1, 1.2, "modelled"),
            )
        ],
        notes=[word],
        epochs=epochs,
        run_dir=str(folder),
    )


def set_times(folder: Path, moment: float) -> None:
    """Let all files of a run be from one moment."""
    for path in folder.rglob("*"):
        os.utime(path, (moment, moment))


def parsed(text: str) -> object:
    """JSON as browsers take it: without NaN."""

    def refuse(word: str) -> object:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)
