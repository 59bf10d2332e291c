"""Run folders of any size, written by the writer's own encoder: long runs, and runs of many ranks.

Step times have the character of real ones (a correlated part, white noise, one slow step in a hundred), phases that add
up, a checkpoint and a validation every so many steps, one rank that is slower than the others, and a loss that falls.
The summary holds the exact figures of all steps, so that what a reader says from fewer can be held against it.
"""

from __future__ import annotations

import math
import multiprocessing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from frameworm.attach.record import judge_stored
from frameworm.records.observations import RankSummary, SystemSample
from frameworm.records.samples import sample_line
from frameworm.records.schema import (
    Batch,
    CheckpointStatistics,
    Communication,
    EpochRecord,
    Memory,
    Phase,
    Quality,
    RunRecord,
    Statistics,
    StepRecord,
    Throughput,
)
from frameworm.records.statistics import DEFAULT_WARMUP
from frameworm.records.store import RunFolder
from frameworm.records.writer import step_line

CHUNK = 10_000
SAMPLES = 16  # of a rank in a step
SAMPLE_EVERY_S = 5.0
FIRST_TIME = 1_700_000_000.0
# Share of the usual step; what exposed communication takes is the wait for the slow rank, which itself waits for none.
SHARES = {"data_wait": 0.12, "forward": 0.27, "backward": 0.45, "communication_exposed": 0.12, "optimizer": 0.03}


@dataclass(frozen=True)
class Shape:
    """What a run folder is to hold.

    Attributes:
        speed: Of its steps, relative to the others of this module.
        parted: The first step whose loss is not that of a run with another `parted`; None: none.
    """

    steps: int
    ranks: int
    seed: int = 0
    step_s: float = 0.25
    speed: float = 1.0
    parted: int | None = None
    checkpoint_every: int = 500
    epoch_steps: int = 2_500

    def step_time(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Times of so many steps, correlated over some tens of them."""
        noise = np.convolve(random.normal(0, 1, count + 31), np.ones(32) / math.sqrt(32), mode="valid")
        times = self.step_s / self.speed * np.exp(0.05 * noise + 0.03 * random.normal(0, 1, count))
        slow = random.random(count) < 0.01
        return np.where(slow, times * random.uniform(1.3, 3.0, count), times)


def write_run(path: Path, shape: Shape, processes: int = 2) -> None:
    """Write a whole run folder; the ranks of it by several processes."""
    path.mkdir(parents=True)
    folder = RunFolder(path)
    folder.write_config(CONFIG.format(name=path.name, ranks=shape.ranks, every=shape.checkpoint_every))
    jobs = [(path, shape, rank) for rank in range(shape.ranks)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        ranks = pool.starmap(_write_rank, jobs)
    record = _record(path.name, shape, ranks)
    folder.write_epochs(record.epochs)
    folder.write_summary(record)
    judge_stored(record, folder)
    folder.write_summary(record)


@dataclass
class _Sums:
    """Exact figures of one rank without its warm-up."""

    rank: int
    steps: int
    total_s: float
    squares: float
    phases: dict[str, float]
    times: np.ndarray | None  # of the first rank


def _write_rank(path: Path, shape: Shape, rank: int) -> _Sums:
    random = np.random.default_rng((shape.seed, rank))
    losses = np.random.default_rng((0, rank))  # the same in every run of this shape, until they part
    folder, now = RunFolder(path), FIRST_TIME
    sums = _Sums(rank, 0, 0.0, 0.0, dict.fromkeys((*SHARES, "checkpoint", "validation", "other"), 0.0), None)
    kept: list[np.ndarray] = []
    slow = rank == shape.ranks - 1 and shape.ranks > 1
    with folder.steps(rank).open("w", encoding="utf-8") as file:
        for begin in range(0, shape.steps, CHUNK):
            number = np.arange(begin + 1, min(begin + CHUNK, shape.steps) + 1)
            count = len(number)
            usual = shape.step_time(random, count)
            phases = {name: usual * share for name, share in SHARES.items()}
            phases["data_wait"] = phases["data_wait"] * random.gamma(4.0, 0.25, count)
            if slow:  # it works while the others wait
                phases["backward"] = phases["backward"] + 0.8 * phases["communication_exposed"]
                phases["communication_exposed"] = 0.2 * phases["communication_exposed"]
            saves, ends = number % shape.checkpoint_every == 0, number % shape.epoch_steps == 0
            checkpoint_s = np.where(saves, 4.0 * shape.step_s * random.gamma(9.0, 1 / 9, count), 0.0)
            validation_s = np.where(ends, 40.0 * shape.step_s, 0.0)
            other = usual * 0.01
            step_s = sum(phases.values()) + other + checkpoint_s + validation_s
            moments = now + np.cumsum(step_s)
            now = float(moments[-1])
            loss = 2.5 * np.exp(-number / (0.3 * shape.steps)) + 1.0 + 0.1 * losses.normal(0, 1, count)
            if shape.parted is not None:
                loss = np.where(number >= shape.parted, loss + 1e-7 * shape.seed, loss)
            columns = {name: values.tolist() for name, values in phases.items()}
            columns["other"] = other.tolist()
            names, rows = tuple(columns), zip(*columns.values())
            tokens = random.integers(900, 1_100, count).tolist()
            lines = []
            for index, (row, step, moment, taken, value, saved, validated) in enumerate(
                zip(
                    rows,
                    number.tolist(),
                    moments.tolist(),
                    step_s.tolist(),
                    loss.tolist(),
                    checkpoint_s.tolist(),
                    validation_s.tolist(),
                )
            ):
                parts = dict(zip(names, row))
                if saved:
                    parts["checkpoint"] = saved
                if validated:
                    parts["validation"] = validated
                exposed = parts["communication_exposed"]
                lines.append(
                    step_line(
                        StepRecord(
                            step=step,
                            epoch=(step - 1) // shape.epoch_steps + 1,
                            time=moment,
                            step_s=taken,
                            loss=value,
                            lr=3e-4,
                            samples=SAMPLES,
                            count=float(SAMPLES),
                            tokens=tokens[index],
                            padded_tokens=SAMPLES * 80,
                            grad_norm=value * 1.7,
                            skipped=False,
                            phases=parts,
                            communication_s=1.5 * exposed,
                            rank_wait_s=0.8 * exposed,
                        )
                    )
                )
            file.write("\n".join(lines) + "\n")
            first = max(0, min(DEFAULT_WARMUP, shape.steps // 2) - begin)
            measured = slice(first, None)
            sums.steps += len(step_s[measured])
            sums.total_s += float(step_s[measured].sum())
            sums.squares += float((step_s[measured] ** 2).sum())
            everything = {**phases, "checkpoint": checkpoint_s, "validation": validation_s, "other": other}
            for name, values in everything.items():
                sums.phases[name] += float(values[measured].sum())
            if rank == 0:
                kept.append(step_s[measured])
    sums.times = np.concatenate(kept) if kept else None
    _write_samples(folder, rank, random, now)
    return sums


def _write_samples(folder: RunFolder, rank: int, random: np.random.Generator, until: float) -> None:
    """What the sampler of a rank saw of its machine, every few seconds."""
    with folder.system(rank).open("w", encoding="utf-8") as file:
        for number in range(int((until - FIRST_TIME) / SAMPLE_EVERY_S) + 1):
            busy, wait, core = random.random(3).tolist()
            sample = SystemSample(
                time=FIRST_TIME + number * SAMPLE_EVERY_S,
                gpu_busy=0.8 + 0.2 * busy,
                gpu_memory_bytes=40 * 2**30,
                gpu_memory_total_bytes=80 * 2**30,
                gpu_clock_mhz=1_900.0,
                gpu_clock_max_mhz=1_980.0,
                gpu_power_w=600.0 + 50 * busy,
                gpu_energy_j=number * 3_000.0,
                gpu_temperature_c=65.0,
                cpu_cores=[core] * 8,
                cpu_process=1.0 + core,
                io_wait=0.02 * wait,
                host_memory=0.3,
                rss_bytes=8 * 2**30,
                threads=40,
                disk_read_bytes=number * 2**20,
                disk_write_bytes=number * 2**18,
                network_sent_bytes=number * 2**24,
                network_received_bytes=number * 2**24,
            )
            file.write(sample_line(sample) + "\n")


def _record(name: str, shape: Shape, ranks: list[_Sums]) -> RunRecord:
    first = ranks[0]
    assert first.times is not None
    mean_s = first.total_s / first.steps
    shares = {phase: seconds / first.total_s for phase, seconds in first.phases.items() if seconds}
    spread = Statistics(
        mean=mean_s,
        std=math.sqrt(max(first.squares / first.steps - mean_s**2, 0.0)),
        min=float(first.times.min()),
        max=float(first.times.max()),
        p50=float(np.quantile(first.times, 0.5)),
        p95=float(np.quantile(first.times, 0.95)),
        p99=float(np.quantile(first.times, 0.99)),
    )
    speed = shape.ranks * SAMPLES / mean_s
    epochs = math.ceil(shape.steps / shape.epoch_steps)
    exposed_s = shares["communication_exposed"] * mean_s
    saves = shape.steps // shape.checkpoint_every
    record = RunRecord(
        name=name,
        status="completed",
        environment={"device": "NVIDIA H100 80GB HBM3", "cpus_usable": 64, "cpus_total": 64},
        batch=Batch(SAMPLES, 1, shape.ranks, SAMPLES * shape.ranks),
        started="2026-01-01T00:00:00+00:00",
        wall_s=first.total_s,
        steps=shape.steps,
        device="NVIDIA H100 80GB HBM3",
        strategy="ddp" if shape.ranks > 1 else "single",
        precision="bf16",
        parameters=124_000_000,
        throughput=Throughput(speed, speed * 1_000 / SAMPLES, spread),
        phases={phase: Phase(share * mean_s, share) for phase, share in shares.items()},
        communication=Communication(1.5 * exposed_s, exposed_s, 496_000_000, 0.8 * exposed_s, shape.ranks - 1),
        memory=Memory(40 * 2**30, 42 * 2**30, 80 * 2**30, 8 * 2**30),
        quality=Quality(train_loss=1.1, val_loss=1.2),
        checkpoint=CheckpointStatistics(saves, first.phases["checkpoint"], first.phases["checkpoint"]),
        workload="gpt",
        epochs=[
            EpochRecord(number + 1, shape.epoch_steps * mean_s, 1.0 + 2.0 / (number + 1), 1.2, None, speed)
            for number in range(epochs)
        ],
    )
    waits = [item.phases["communication_exposed"] / item.steps for item in ranks]
    record.ranks = [
        RankSummary(
            rank=item.rank,
            step_s=item.total_s / item.steps,
            phases={phase: seconds / item.steps for phase, seconds in item.phases.items() if seconds},
            communication_s=1.5 * item.phases["communication_exposed"] / item.steps,
            rank_wait_s=wait - min(waits),
            host=f"node{item.rank // 8}",
        )
        for item, wait in zip(ranks, waits)
    ]
    return record


CONFIG = """\
name: {name}
seed: 0
workload: gpt
model: {{d_model: 768, n_heads: 12, num_layers: 12, max_seq_len: 80}}
data: {{dataset: text, root: data/text, num_workers: 8}}
training: {{epochs: 400, global_batch: {ranks}, micro_batch: 1, optimizer: adamw, lr: 3.0e-4}}
checkpoint: {{every_steps: {every}}}
"""
