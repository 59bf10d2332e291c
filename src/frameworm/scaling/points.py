"""What scaling is judged from: one configuration at one world size, and the runs that measured it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from frameworm.records.estimate import known, quantile

Mode = Literal["strong", "weak"]
# What each mode means, as every table says it.
MODES: dict[str, str] = {
    "strong": "strong scaling: the global batch stays",
    "weak": "weak scaling: the batch per device stays",
}

COMPUTE_PHASES = ("forward", "backward", "optimizer")
# Student's t at 97.5% where the expansion of `quantile` is not yet close.
_FEW = {1: 12.706, 2: 4.303}


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and its 95% interval over repeated runs; None where one run cannot tell."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run at one world size. Seconds are means; per step unless the name says epoch."""

    epoch_s: float | None = None  # training time of an epoch, without warm-up epochs
    step_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    epoch_samples: float | None = None  # samples of an epoch over all ranks
    epochs_s: tuple[float, ...] = ()  # every epoch that counts
    phases: Mapping[str, float] = field(default_factory=dict)
    communication_s: float | None = None  # hidden or not
    exposed_s: float | None = None  # communication that compute does not hide, with the wait for later ranks
    rank_wait_s: float | None = None  # of exposed_s
    data_wait_s: float | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None
    run: str | None = None  # its folder

    @property
    def compute_s(self) -> float | None:
        """Forward, backward and optimizer, where the first two were seen."""
        if self.phases.get("forward") is None or self.phases.get("backward") is None:
            return None
        return math.fsum(self.phases.get(name) or 0.0 for name in COMPUTE_PHASES)


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration at one world size, measured once or several times."""

    dataset: str
    world_size: int
    measurements: tuple[Measurement, ...]
    name: str = ""  # of the configuration, where a data set has several
    mode: Mode = "strong"
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    parameters: int | None = None
    sequence_length: int | None = None
    gradient_bytes: int | None = None
    model: Mapping[str, Any] = field(default_factory=dict)  # its section of the config
    device: str | None = None
    strategy: str | None = None
    precision: str | None = None
    cpus: int | None = None  # of all its machines, for runs on the CPU
    threads: int | None = None  # that one process computes with, for runs on the CPU

    @property
    def device_batch(self) -> int | None:
        """Samples per step on one device."""
        if self.global_batch is not None:
            return max(self.global_batch // self.world_size, 1)
        return None if self.micro_batch is None else self.micro_batch * (self.accumulation or 1)

    @property
    def sent_bytes(self) -> int | None:
        """Bytes of gradients per step; fp32 unless known better."""
        if self.gradient_bytes:
            return self.gradient_bytes
        return None if self.parameters is None else 4 * self.parameters

    def values(self, name: str) -> list[float]:
        """One figure of every run that has it."""
        found = (known(getattr(run, name)) for run in self.measurements)
        return [value for value in found if value is not None]

    def mean(self, name: str) -> float | None:
        """Mean of one figure over the runs that have it."""
        return mean(self.values(name))

    def phase(self, name: str) -> float | None:
        """Mean seconds of one phase."""
        found = (known(run.phases.get(name)) for run in self.measurements)
        return mean([value for value in found if value is not None])

    def interval(self, name: str) -> Interval | None:
        """Mean of one figure with its interval over the runs."""
        return mean_interval(self.values(name))


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None of nothing."""
    return math.fsum(values) / len(values) if values else None


def mean_interval(values: Sequence[float]) -> Interval | None:
    """The mean with Student's interval; one value has none."""
    centre = mean(values)
    if centre is None:
        return None
    if len(values) < 2:
        return Interval(centre)
    margin = student(len(values) - 1) * math.sqrt(variance_of_mean(values))
    return Interval(centre, centre - margin, centre + margin)


def variance_of_mean(values: Sequence[float]) -> float:
    """Squared standard error of the mean of two values or more."""
    centre = math.fsum(values) / len(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1) / len(values)


def student(freedom: float) -> float:
    """Student's t at 97.5%."""
    whole = max(int(freedom), 1)
    return _FEW.get(whole) or quantile(whole)
