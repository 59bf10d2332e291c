"""What a scaling report shows: one row per configuration and world size, computed before anything is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from frameworm.scaling.points import MODES
from frameworm.scaling.run_points import Excluded

BASELINE = "baseline"
NEGATIVE = "negative_scaling"
LOSSES = ("communication", "stragglers", "input", "smaller_batch", "other")
OVER_RUNS, OVER_EPOCHS, OVER_NOTHING = "runs", "epochs of one run", ""


@dataclass(frozen=True, slots=True)
class Measure:
    """A mean with its 95% interval; a single value knows none."""

    mean: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration on one world size."""

    world_size: int
    runs: tuple[str, ...]
    epochs: int  # measured ones, over all runs
    global_batch: int | None
    micro_batch: int | None
    accumulation: int | None
    epoch_times_s: tuple[float, ...]  # of each measured epoch
    epoch_time_s: Measure | None  # None of runs without a whole epoch
    samples_per_s: Measure | None
    speedup: Measure | None  # None where there is nothing to compare with
    efficiency: Measure | None
    val_accuracy: Measure | None  # of the last validation of each run
    val_loss: Measure | None
    train_loss: Measure | None
    status: str
    interval_over: str  # what the intervals are of: runs, the epochs of one run, or nothing
    serial_fraction: float | None = None  # by this world size alone
    losses: Mapping[str, float | None] = field(default_factory=dict)  # shares of the step, by `LOSSES`
    cause: str = ""  # what the efficiency is lost to, in words
    recommendation: str = ""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One piece of work on several world sizes, the smallest first."""

    label: str
    mode: str  # strong or weak
    rows: tuple[Row, ...]
    serial_fraction: Measure | None = None
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The label with how it scales."""
        return f"{self.label.removesuffix(f', {self.mode}')}, {MODES[self.mode]}"

    @property
    def base(self) -> Row:
        """The smallest world size, which the others are compared with."""
        return self.rows[0]


@dataclass(frozen=True, slots=True)
class EpochCurve:
    """What came of each epoch, as the mean over the runs of one row; None where no run knows."""

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
    stem: str  # of its files
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
        """Every world size there is, the smallest first."""
        return sorted({row.world_size for row in self.rows})

    @property
    def units(self) -> str:
        """What a world size counts, of several."""
        return {"process": "processes"}.get(self.unit, f"{self.unit}s")

    def size_label(self, world_size: int) -> str:
        """A world size with what it counts."""
        return f"{world_size} {self.unit if world_size == 1 else self.units}"

    def curve_label(self, curve: EpochCurve) -> str:
        """What tells a curve from the others."""
        size = self.size_label(curve.world_size)
        return size if len(self.configurations) == 1 else f"{size}, {self.configurations[curve.configuration].label}"


@dataclass(frozen=True, slots=True)
class ScalingReport:
    """All data sets below a root, and the runs that no figure is made of."""

    root: str
    warmup: int
    datasets: tuple[DatasetTable, ...]
    left_out: tuple[Excluded, ...]
    notes: tuple[str, ...] = ()
