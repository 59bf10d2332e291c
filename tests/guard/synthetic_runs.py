"""Step times with the character of real ones, from a seed.

Taken from steps files of the quickstart: on a quiet machine steps scatter by a few percent with hardly any memory and
one in a hundred takes half as long again; on a busy one they scatter by a fifth and remember each other for tens of
steps. Runs of one program differ by about a percent.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from frameworm.guard.figures import RunFigures, Work
from frameworm.records.estimate import Estimate

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


def figures(step_times: list[float], name: str = "run", **values: object) -> RunFigures:
    """A run as the guard sees it, three quarters of its steps in backward."""
    run = RunFigures(name=name, steps=len(step_times) + 5, left_out=5, environment=dict(MACHINE))
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
