"""Build the table of a scaling report from stored runs: grouped and graded, with intervals."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from frameworm.records.estimate import OpenInterval, known, without_spread
from frameworm.records.schema import EpochRecord
from frameworm.report.kit.tables import plain
from frameworm.report.scaling.table import (
    BASELINE,
    LOSSES,
    NEGATIVE,
    OVER_EPOCHS,
    OVER_NOTHING,
    OVER_RUNS,
    Configuration,
    DatasetTable,
    EpochCurve,
    Row,
    ScalingReport,
)
from frameworm.scaling import analysis
from frameworm.scaling.points import Point, mean_interval, student, variance_of_mean
from frameworm.scaling.run_points import Collection, plain_name

_ADVICE = {
    "communication": "raise training.global_batch (or training.accumulation) so that each synchronisation has more "
    "compute to hide it, or set parallel.compression to bf16 and check the accuracy",
    "stragglers": "find the slow rank in the runs' report.html; batching: bucketed evens out lengths, and every rank "
    "needs cores of its own",
    "input": "raise data.num_workers and data.prefetch_factor, or use batching: packed, until data_wait is gone",
    "smaller_batch": "raise training.global_batch: the batch of one device has become too small to use it well",
    "shared_device": "give each process cores or a device of its own",
    "other": "run `frameworm profile` at this world size: no phase of the runs explains the lost time",
}
# A factor of e**20 either way means that nothing is known.
_LARGEST_MARGIN = 20.0

Epochs = Mapping[str, Sequence[EpochRecord]]  # by run, including warm-up


def build_report(root: str, warmup: int, collection: Collection, epochs: Epochs) -> ScalingReport:
    """Grade each group of runs and build the report's tables.

    Args:
        root: The folder that the report is named after.
        warmup: Epochs that were left out of each run.
        collection: The runs that can be compared, and the others.
        epochs: The epochs of each run, by its folder.
    """
    curves = analysis.analyse(collection.points).curves
    names = sorted({curve.dataset for curve in curves}, key=lambda name: shown_name(name).lower())
    stems = file_stems(names)
    tables = [
        _dataset(name, stems[name], warmup, [curve for curve in curves if curve.dataset == name], root, epochs)
        for name in names
    ]
    left_out = sorted(collection.excluded, key=lambda item: (item.kind, item.run))
    return ScalingReport(plain(root), warmup, tuple(tables), tuple(left_out), collection.notes)


def _dataset(
    dataset: str, stem: str, warmup: int, curves: Sequence[analysis.Curve], root: str, epochs: Epochs
) -> DatasetTable:
    configurations: list[Configuration] = []
    epoch_curves: list[EpochCurve] = []
    for index, (curve, label) in enumerate(zip(curves, _labels(curves))):
        alone = len(curve.rows) == 1
        rows = [_row(row, None if row is curve.base else curve.base.point, root, alone=alone) for row in curve.rows]
        serial = curve.serial_fraction
        configurations.append(Configuration(label, curve.mode, tuple(rows), serial, _notes(curve)))
        for row in curve.rows:
            found = [epochs.get(run.run or "", ()) for run in row.point.measurements]
            epoch_curves.append(_epoch_curve(index, row.world_size, found))
    on_gpu = any(str(row.point.device or "").startswith("cuda") for curve in curves for row in curve.rows)
    unit = "GPU" if on_gpu else "process"
    return DatasetTable(dataset, shown_name(dataset), stem, unit, warmup, tuple(configurations), tuple(epoch_curves))


def _notes(curve: analysis.Curve) -> tuple[str, ...]:
    """The analysis' notes, without those on missing intervals of single runs, which epochs provide here."""
    return tuple(note for note in curve.notes if "run once" not in note)


def _labels(curves: Sequence[analysis.Curve]) -> list[str]:
    """Labels that distinguish the configurations of a data set: their names, or the batch that stays constant."""
    named = len({curve.name for curve in curves}) > 1
    labels = []
    for curve in curves:
        point = curve.base.point
        if curve.mode == "strong":
            batch = f"global batch {point.global_batch}" if point.global_batch else "strong scaling"
        else:
            batch = f"{point.device_batch} samples per device" if point.device_batch else "weak scaling"
        labels.append(plain(curve.name) if named and curve.name else batch)
    return [f"{label}, {curve.mode}" if labels.count(label) > 1 else label for label, curve in zip(labels, curves)]


def _row(row: analysis.Row, base: Point | None, root: str, *, alone: bool) -> Row:
    point = row.point
    runs = point.measurements
    times = [time_s for run in runs for time_s in run.epochs_s]
    over = OVER_RUNS if len(runs) > 1 else OVER_EPOCHS if len(times) > 1 else OVER_NOTHING
    speedup = efficiency = None
    if not alone:
        margin = None if base is None or row.speedup.low is not None else _epochs_margin(base, point)
        speedup, efficiency = (_widened(item, margin) for item in (row.speedup, row.efficiency))
    return Row(
        world_size=row.world_size,
        runs=tuple(_below(root, run.run) for run in runs),
        epochs=len(times),
        global_batch=point.global_batch,
        micro_batch=point.micro_batch,
        accumulation=point.accumulation,
        epoch_times_s=tuple(times),
        epoch_time_s=_positive_mean(times if over == OVER_EPOCHS else point.values("epoch_s")),
        samples_per_s=_speed(point, over),
        speedup=speedup,
        efficiency=efficiency,
        val_accuracy=mean_interval(point.values("val_accuracy")),
        val_loss=mean_interval(point.values("val_loss")),
        train_loss=mean_interval(point.values("train_loss")),
        status=BASELINE if row.grade is None else NEGATIVE if row.finding is not None else row.grade,
        interval_over=over,
        serial_fraction=row.serial_fraction,
        losses={} if row.losses is None else {name: row.losses.parts[name] for name in LOSSES},
        cause=_cause(row),
        recommendation=_recommendation(row, speedup, alone=alone),
    )


def _below(root: str, run: str | None) -> str:
    if run is None:
        return ""
    path = Path(run)
    return plain(path.relative_to(root)) if path.is_relative_to(root) and path != Path(root) else plain(path.name)


def _speed(point: Point, over: str) -> OpenInterval | None:
    """Samples per second; for a single run with the uncertainty of its epoch times."""
    values = point.values("samples_per_s")
    if not values or over != OVER_EPOCHS:
        return _positive_mean(values)
    return _widened(without_spread(values[0]), _margin([point.measurements[0].epochs_s]))


def _cause(row: analysis.Row) -> str:
    if row.finding is not None:
        return plain(row.cause or "")
    if row.losses is None or row.limit is None or row.losses.largest is None:
        return ""
    lost = f"{row.losses.parts[row.losses.largest]:.0%} of the step is lost to {row.limit}"
    return f"{lost}: {plain(row.cause)}" if row.cause else lost


def _recommendation(row: analysis.Row, speedup: OpenInterval | None, *, alone: bool) -> str:
    if alone:
        return "run it on another world size too: `frameworm scale` does both"
    advice = _advice(row)
    if speedup is None or speedup.low is None or speedup.high is None or not speedup.low < 1 < speedup.high:
        return advice
    return f"repeat the runs first: whether it is faster at all is not certain; then: {advice}"


def _advice(row: analysis.Row) -> str:
    if row.finding is not None:
        texts = [remedy.text for remedy in row.finding.remedies]
        return plain("; or ".join(texts)) or "train on fewer devices"
    if row.grade is None:
        return ""
    if row.grade == "excellent":
        return "use it, and try more devices"
    largest = None if row.losses is None else row.losses.largest
    if largest == "other" and "shared_device" in row.causes:
        largest = "shared_device"
    advice = "" if largest is None else _ADVICE[largest]
    if row.grade == "good":
        return f"use it; for more: {advice}" if advice else "use it"
    lost = f"{1 - row.efficiency.value:.0%} of the devices' time is lost"
    return f"{lost}: {advice}" if advice else lost


def _positive_mean(values: Sequence[float]) -> OpenInterval | None:
    """The mean of times or speeds, with an interval that stays positive."""
    mean = mean_interval(values)
    return None if mean is None else _widened(without_spread(mean.value), _margin([values]))


def _epochs_margin(base: Point, point: Point) -> float | None:
    """Half the interval of the logarithm of a ratio of speeds, from the scatter of epochs."""
    return _margin([[time_s for run in side.measurements for time_s in run.epochs_s] for side in (base, point)])


def _margin(sides: Sequence[Sequence[float]]) -> float | None:
    """Half the log interval of a product or ratio of times; None if one was measured only once."""
    if any(len(side) < 2 for side in sides):
        return None
    variance = math.fsum(variance_of_mean(side) / (math.fsum(side) / len(side)) ** 2 for side in sides)
    return min(student(min(len(side) for side in sides) - 1) * math.sqrt(variance), _LARGEST_MARGIN)


def _widened(measure: OpenInterval, margin: float | None) -> OpenInterval:
    if margin is None:
        return measure
    return dataclasses.replace(measure, low=measure.value * math.exp(-margin), high=measure.value * math.exp(margin))


def _epoch_curve(index: int, world_size: int, runs: Sequence[Sequence[EpochRecord]]) -> EpochCurve:
    columns: dict[int, list[EpochRecord]] = {}
    for epochs in runs:
        for epoch in epochs:
            columns.setdefault(epoch.epoch, []).append(epoch)
    numbers = sorted(columns)

    def means(pick: Callable[[EpochRecord], object]) -> tuple[float | None, ...]:
        found: list[float | None] = []
        for place in numbers:
            values = [value for value in (known(pick(epoch)) for epoch in columns[place]) if value is not None]
            found.append(math.fsum(values) / len(values) if values else None)
        return tuple(found)

    return EpochCurve(
        index,
        world_size,
        tuple(numbers),
        means(lambda epoch: epoch.epoch_time_s),
        means(lambda epoch: epoch.train_loss),
        means(lambda epoch: epoch.val_loss),
        means(lambda epoch: epoch.val_accuracy),
    )


_SHOWN = {"agnews": "AGNews", "imdb": "IMDB"}
_LONGEST_STEM = 80


def shown_name(name: str) -> str:
    """The name as plots and tables show it."""
    return _SHOWN.get(plain_name(name), plain(name) or "unknown")


def file_stems(names: Iterable[str]) -> dict[str, str]:
    """A unique file name prefix for each name: lower case, safe on any file system."""
    stems: dict[str, str] = {}
    for name in sorted(set(names)):
        stem = re.sub(r"[^a-z0-9_-]+", "_", name.lower()).strip("_-")[:_LONGEST_STEM] or "dataset"
        taken = set(stems.values())
        number = 2
        unique = stem
        while unique in taken:
            unique, number = f"{stem}_{number}", number + 1
        stems[name] = unique
    return stems
