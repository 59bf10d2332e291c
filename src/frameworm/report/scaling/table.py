"""The content of a scaling report: one row per configuration and world size, computed before anything is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from frameworm.records.estimate import OpenInterval
from frameworm.scaling.points import MODES
from frameworm.scaling.run_points import Excluded

BASELINE = "baseline"
NEGATIVE = "negative_scaling"
LOSSES = ("communication", "stragglers", "input", "smaller_batch", "other")
OVER_RUNS, OVER_EPOCHS, OVER_NOTHING = "runs", "epochs of one run", ""


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration on one world size."""

    world_size: int
    runs: tuple[str, ...]
    epochs: int  # measured epochs over all runs
    global_batch: int | None
    micro_batch: int | None
    accumulation: int | None
    epoch_times_s: tuple[float, ...]  # of each measured epoch
    epoch_time_s: OpenInterval | None  # None for runs without a complete epoch
    samples_per_s: OpenInterval | None
    speedup: OpenInterval | None  # None if there is nothing to compare with
    efficiency: OpenInterval | None
    val_accuracy: OpenInterval | None  # of the last validation of each run
    val_loss: OpenInterval | None
    train_loss: OpenInterval | None
    status: str
    interval_over: str  # what the intervals are computed from: runs, the epochs of one run, or nothing
    serial_fraction: float | None = None  # from this world size alone
    losses: Mapping[str, float | None] = field(default_factory=dict)  # fractions of the step, by `LOSSES`
    cause: str = ""  # what the efficiency is lost to, as text
    recommendation: str = ""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One workload on several world sizes, in ascending order."""

    label: str
    mode: str  # strong or weak
    rows: tuple[Row, ...]
    serial_fraction: OpenInterval | None = None
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The label with the scaling mode."""
        return f"{self.label.removesuffix(f', {self.mode}')}, {MODES[self.mode]}"

    @property
    def base(self) -> Row:
        """The smallest world size, with which the others are compared."""
        return self.rows[0]


@dataclass(frozen=True, slots=True)
class EpochCurve:
    """Results of each epoch, as means over the runs of one row; None if no run has the value."""

    configuration: int  # index in the data set's table
    world_size: int
    epochs: tuple[int, ...]
    epoch_time_s: tuple[float | None, ...]
    train_loss: tuple[float | None, ...]
    val_loss: tuple[float | None, ...]
    val_accuracy: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class DatasetTable:
    """Everything a report shows about one data set."""

    dataset: str  # as the config spells it
    name: str  # as it is shown
    stem: str  # prefix of its files' names
    unit: str  # what a world size counts: GPU or process
    warmup: int
    configurations: tuple[Configuration, ...]
    curves: tuple[EpochCurve, ...]

    @property
    def rows(self) -> list[Row]:
        """The rows of all configurations."""
        return [row for item in self.configurations for row in item.rows]

    @property
    def world_sizes(self) -> list[int]:
        """All world sizes in ascending order."""
        return sorted({row.world_size for row in self.rows})

    @property
    def units(self) -> str:
        """The plural of what a world size counts."""
        return {"process": "processes"}.get(self.unit, f"{self.unit}s")

    def size_label(self, world_size: int) -> str:
        """A world size with what it counts."""
        return f"{world_size} {self.unit if world_size == 1 else self.units}"

    def curve_label(self, curve: EpochCurve) -> str:
        """A label that distinguishes the curve from the others."""
        size = self.size_label(curve.world_size)
        return size if len(self.configurations) == 1 else f"{size}, {self.configurations[curve.configuration].label}"


@dataclass(frozen=True, slots=True)
class ScalingReport:
    """All data sets below a root, and the runs that are not used."""

    root: str
    warmup: int
    datasets: tuple[DatasetTable, ...]
    left_out: tuple[Excluded, ...]
    notes: tuple[str, ...] = ()
