"""Step times with the character of real ones, from a seed.

Taken from steps files of the quickstart: on a quiet machine steps scatter by a few percent with hardly any memory and
one in a hundred takes half as long again; on a busy one they scatter by a fifth and remember each other for tens of
steps. Runs of one program differ by about a percent.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from frameworm.guard.run_metrics import RunMetrics, Work
from frameworm.records.estimate import Estimate
from frameworm.records.schema import Batch, Memory, Quality, RunRecord, StepRecord
from frameworm.records.store import RunFolder
from frameworm.records.writer import step_line

MACHINE = {"machine": "x86_64", "cpu_model": "Some CPU", "cpus_usable": 8, "cpus_total": 8, "device": "cpu"}


@dataclass(frozen=True)
class Noise:
    """What a machine does to steps; spreads are shares of the step."""

    scatter: float  # of the correlated part
    memory: float  # AR(1): correlation of a step with the next one
    white: float
    outliers: float  # share of steps
    outlier_size: float  # times the step, at most
    drift: float  # from the first step to the last, at most either way
    between: float  # spread of runs


QUIET = Noise(scatter=0.01, memory=0.3, white=0.02, outliers=0.01, outlier_size=1.6, drift=0.005, between=0.01)
LIVELY = Noise(scatter=0.04, memory=0.9, white=0.03, outliers=0.01, outlier_size=5.0, drift=0.03, between=0.012)
CORRELATED = Noise(scatter=0.05, memory=0.95, white=0.01, outliers=0.003, outlier_size=10.0, drift=0.0, between=0.01)


def times(seed: int, noise: Noise, steps: int, step_s: float = 0.04) -> list[float]:
    """Times of the measured steps of one run."""
    draw = random.Random(seed)
    level = step_s * math.exp(draw.gauss(0, noise.between))
    drift = draw.uniform(-noise.drift, noise.drift)
    state = draw.gauss(0, noise.scatter)
    found = []
    for index in range(steps):
        state = noise.memory * state + draw.gauss(0, noise.scatter * math.sqrt(1 - noise.memory**2))
        value = level * math.exp(state + draw.gauss(0, noise.white) + drift * (index / steps - 0.5))
        if draw.random() < noise.outliers:
            value *= draw.uniform(1.3, noise.outlier_size)
        found.append(value)
    return found


def figures(step_times: list[float], name: str = "run", **values: object) -> RunMetrics:
    """A run as the guard sees it, three quarters of its steps in backward."""
    run = RunMetrics(name=name, steps=len(step_times) + 5, left_out=5, environment=dict(MACHINE))
    run.set_times(step_times)
    mean_s = sum(step_times) / len(step_times)
    run.phases = {
        "forward": Estimate(mean_s * 0.25, mean_s * 0.001),
        "backward": Estimate(mean_s * 0.75, mean_s * 0.003),
    }
    run.memory = {"host_bytes": 400 * 2**20}
    run.quality = {"val_accuracy": 0.964, "val_loss": 0.164, "train_loss": 0.153}
    run.work = Work("text_classifier", "generated", 64, 127_364, 1300.0, 64.0)
    for field, value in values.items():
        setattr(run, field, value)
    return run


def store(path: Path, step_times: list[float], **values: Any) -> RunFolder:
    """A run folder with those measured steps after five slow ones of warm-up; `values` go into the record."""
    path.mkdir(parents=True)
    folder = RunFolder(path)
    config = {"name": "synthetic", "workload": "text_classifier", "data": {"dataset": "generated"}}
    config["gpu"] = {"compile_model": values.pop("compile_model", False)}
    folder.write_config(yaml.safe_dump(config))
    backward = values.pop("backward", 0.75)
    with folder.steps(0).open("w") as file:
        for index, step_s in enumerate([0.5] * 5 + step_times):
            base_s = min(step_s, 0.04)
            phases = {"forward": base_s * (1 - backward), "backward": step_s - base_s * (1 - backward)}
            step = StepRecord(index + 1, 1, 1e9 + index, step_s, 1.0, 0.1, 64, 64, tokens=1300, phases=phases)
            file.write(step_line(step) + "\n")
    record = RunRecord("synthetic", "completed", dict(MACHINE), Batch(64, 1, 1, 64), started="2026-01-01T00:00:00")
    record.steps = len(step_times) + 5
    record.parameters = 127_364
    record.memory = Memory(peak_bytes=400 * 2**20, host_peak_bytes=400 * 2**20)
    record.quality = Quality(0.153, 0.164, 0.964)
    for name, value in values.items():
        setattr(record, name, value)
    folder.write_summary(record)
    return folder
