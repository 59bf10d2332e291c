"""The input of a scaling analysis: one configuration at one world size, and the runs that measured it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from frameworm.records.estimate import Interval, OpenInterval, known, quantile, without_spread

Mode = Literal["strong", "weak"]
# What each mode means, in the words of every table.
MODES: dict[str, str] = {
    "strong": "strong scaling: the global batch stays",
    "weak": "weak scaling: the batch per device stays",
}

COMPUTE_PHASES = ("forward", "backward", "optimizer")
# Student's t at 97.5% for few degrees of freedom, where the expansion in `quantile` is inaccurate.
_FEW = {1: 12.706, 2: 4.303}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run at one world size. Seconds are means, per step unless the name says epoch."""

    epoch_s: float | None = None  # training time of an epoch, without warm-up epochs
    step_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    epoch_samples: float | None = None  # samples of an epoch over all ranks
    epochs_s: tuple[float, ...] = ()  # every epoch that counts
    phases: Mapping[str, float] = field(default_factory=dict)
    communication_s: float | None = None  # hidden or not
    exposed_s: float | None = None  # communication not hidden by compute, including the wait for later ranks
    rank_wait_s: float | None = None  # part of exposed_s
    data_wait_s: float | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None
    run: str | None = None  # its folder

    @property
    def compute_s(self) -> float | None:
        """Forward, backward and optimizer; None if forward or backward was not seen."""
        if self.phases.get("forward") is None or self.phases.get("backward") is None:
            return None
        return math.fsum(self.phases.get(name) or 0.0 for name in COMPUTE_PHASES)


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration at one world size, measured once or several times."""

    dataset: str
    world_size: int
    measurements: tuple[Measurement, ...]
    name: str = ""  # of the configuration, if a data set has several
    mode: Mode = "strong"
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    parameters: int | None = None
    sequence_length: int | None = None
    gradient_bytes: int | None = None
    model: Mapping[str, Any] = field(default_factory=dict)  # the config's model section
    device: str | None = None
    strategy: str | None = None
    precision: str | None = None
    cpus: int | None = None  # on all its machines, for runs on CPU
    threads: int | None = None  # of one process, for runs on CPU
    launches_steps: bool = False  # on a GPU without CUDA graph replay of steps

    @property
    def device_batch(self) -> int | None:
        """Samples per step on one device."""
        if self.global_batch is not None:
            return max(self.global_batch // self.world_size, 1)
        return None if self.micro_batch is None else self.micro_batch * (self.accumulation or 1)

    @property
    def sent_bytes(self) -> int | None:
        """Bytes of gradients per step; assumes fp32 unless known."""
        if self.gradient_bytes:
            return self.gradient_bytes
        return None if self.parameters is None else 4 * self.parameters

    def values(self, name: str) -> list[float]:
        """Return one metric of every run that has it."""
        found = (known(getattr(run, name)) for run in self.measurements)
        return [value for value in found if value is not None]

    def mean(self, name: str) -> float | None:
        """Return the mean of one metric over the runs that have it."""
        return mean(self.values(name))

    def phase(self, name: str) -> float | None:
        """Return the mean seconds of one phase."""
        found = (known(run.phases.get(name)) for run in self.measurements)
        return mean([value for value in found if value is not None])

    def interval(self, name: str) -> OpenInterval | None:
        """Return the mean of one metric with its interval over the runs."""
        return mean_interval(self.values(name))


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None if there are no values."""
    return math.fsum(values) / len(values) if values else None


def mean_interval(values: Sequence[float]) -> OpenInterval | None:
    """Return the mean with Student's interval; a single value has no interval."""
    centre = mean(values)
    if centre is None:
        return None
    if len(values) < 2:
        return without_spread(centre)
    margin = student(len(values) - 1) * math.sqrt(variance_of_mean(values))
    return Interval(centre, centre - margin, centre + margin)


def variance_of_mean(values: Sequence[float]) -> float:
    """Return the squared standard error of the mean of two or more values."""
    centre = math.fsum(values) / len(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1) / len(values)


def student(freedom: float) -> float:
    """Return Student's t at 97.5%."""
    whole = max(int(freedom), 1)
    return _FEW.get(whole) or quantile(whole)
