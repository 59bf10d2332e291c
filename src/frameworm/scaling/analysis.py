"""Scaling analysis: speedup, efficiency and their intervals, what limits them, and what to change.

Pure functions over `Point`s, which `run_points` makes from stored runs. The smallest world size of a configuration is
its base: speedup is relative to it, and efficiency is speedup / (world size / base's world size).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from frameworm.records.estimate import Interval, OpenInterval, without_spread
from frameworm.records.schema import Finding, json_ready
from frameworm.scaling.enough_work import model_step
from frameworm.scaling.losses import Losses as Losses
from frameworm.scaling.losses import split_losses
from frameworm.scaling.negative import Change as Change
from frameworm.scaling.negative import causes_of, negative_scaling, suggest_change
from frameworm.scaling.points import Measurement as Measurement
from frameworm.scaling.points import Mode as Mode
from frameworm.scaling.points import Point as Point
from frameworm.scaling.points import student, variance_of_mean

CLASSES = (("excellent", 0.85), ("good", 0.7), ("fair", 0.5))
POOR = "poor"
BEYOND_LINEAR = 1.05
# Rounding of published percentages and products of decimals, so that 0.85 is not below 0.85.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Row:
    """One world size of a curve. The base has speedup 1 and no losses, class or finding."""

    point: Point
    world_size: int
    speedup: OpenInterval
    efficiency: OpenInterval
    grade: str | None = None  # excellent, good, fair, poor
    losses: Losses | None = None
    serial_fraction: float | None = None  # from this world size alone (Karp and Flatt)
    limit: str | None = None  # the largest loss, in words
    cause: str | None = None  # why it is not excellent, with the evidence
    causes: tuple[str, ...] = ()  # names of the causes
    finding: Finding | None = None  # negative_scaling
    change: Change | None = None  # settings that are predicted to scale


@dataclass(frozen=True, slots=True)
class Curve:
    """One configuration over its world sizes."""

    dataset: str
    name: str
    mode: Mode
    label: str  # the data set, and the configuration's name if there are several
    basis: str  # where speed comes from: epoch_s, samples_per_s or step_s
    rows: tuple[Row, ...]
    serial_fraction: OpenInterval | None = None  # Amdahl's, over all world sizes; None with only one
    notes: tuple[str, ...] = ()

    @property
    def base(self) -> Row:
        """The smallest world size."""
        return self.rows[0]

    def row(self, world_size: int) -> Row | None:
        """Return the row of a world size, if there is one."""
        return next((row for row in self.rows if row.world_size == world_size), None)


@dataclass(frozen=True, slots=True)
class Analysis:
    """All configurations, in the order of their data sets."""

    curves: tuple[Curve, ...]

    @property
    def findings(self) -> list[Finding]:
        """Findings for every world size that trains slower than its base."""
        return [row.finding for curve in self.curves for row in curve.rows if row.finding is not None]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        data: dict[str, Any] = json_ready(dataclasses.asdict(self))
        return data


def analyse(points: Iterable[Point]) -> Analysis:
    """Analyse how configurations scale.

    Args:
        points: Points of any number of configurations; those of one configuration share data set, name and mode. Two
            points of one configuration and world size count as repetitions.

    Raises:
        ValueError: A point has no run, or no speed at all.
    """
    groups: dict[tuple[str, str, Mode], list[Point]] = {}
    for point in points:
        groups.setdefault((point.dataset, point.name, point.mode), []).append(point)
    alone = {dataset: sum(key[0] == dataset for key in groups) == 1 for dataset, _, _ in groups}
    several_names = {dataset: len({key[1] for key in groups if key[0] == dataset}) > 1 for dataset, _, _ in groups}
    curves = []
    for (dataset, name, mode), members in sorted(groups.items()):
        words = [dataset]
        if not alone[dataset]:
            words += [name] if several_names[dataset] and name else []
            words += [mode] if _has_both_modes(groups, dataset, name) else []
        curves.append(_curve(members, " ".join(words)))
    return Analysis(tuple(curves))


def _has_both_modes(groups: Iterable[tuple[str, str, Mode]], dataset: str, name: str) -> bool:
    return len({mode for other, title, mode in groups if (other, title) == (dataset, name)}) > 1


def grade_of(efficiency: float) -> str:
    """Return the grade of an efficiency: excellent from 0.85, good from 0.7, fair from 0.5, else poor."""
    return next((word for word, least in CLASSES if efficiency >= least - _ROUNDING), POOR)


def _curve(members: Sequence[Point], label: str) -> Curve:
    points = _merge(members)
    basis, cost = _basis_of(points)
    base = points[0]
    serial = serial_fraction_of(
        base.world_size, [(point.world_size, [cost(point, run) for run in point.measurements]) for point in points]
    )
    rows = tuple(_row(base, point, cost, basis, serial) for point in points)
    return Curve(base.dataset, base.name, base.mode, label, basis, rows, serial, tuple(_notes(rows, serial)))


def _merge(members: Sequence[Point]) -> list[Point]:
    """Merge to one point per world size, smallest first."""
    merged: dict[int, Point] = {}
    for point in members:
        if point.world_size < 1 or not point.measurements:
            raise ValueError(f"{point.dataset} at world size {point.world_size}: a point needs at least one run")
        before = merged.get(point.world_size)
        if before is not None:
            point = dataclasses.replace(before, measurements=(*before.measurements, *point.measurements))
        merged[point.world_size] = point
    return [merged[size] for size in sorted(merged)]


Cost = Callable[[Point, Measurement], float]


def _basis_of(points: Sequence[Point]) -> tuple[str, Cost]:
    """Choose the best clock that every run has; return its name and the seconds per unit of work."""
    runs = [(point, run) for point in points for run in point.measurements]
    if all(run.epoch_s for _, run in runs):
        # Epochs of unequal length (a limit of steps, a dropped last batch) are compared per sample.
        if all(run.epoch_samples for _, run in runs) and len({run.epoch_samples for _, run in runs}) > 1:
            return "epoch_s", lambda _, run: (run.epoch_s or 0.0) / (run.epoch_samples or 1.0)
        return "epoch_s", lambda _, run: run.epoch_s or 0.0
    if all(run.samples_per_s for _, run in runs):
        return "samples_per_s", lambda _, run: 1 / (run.samples_per_s or 1.0)
    if all(run.step_s for _, run in runs):
        if all(point.global_batch for point in points):
            return "step_s", lambda point, run: (run.step_s or 0.0) / (point.global_batch or 1)
        if all(point.mode == "strong" for point in points):
            return "step_s", lambda _, run: run.step_s or 0.0
        return "step_s", lambda point, run: (run.step_s or 0.0) / point.world_size
    raise ValueError(
        f"{points[0].dataset}: its runs share no measure of speed; each needs epoch_s, or each samples_per_s, or step_s"
    )


def _row(base: Point, point: Point, cost: Cost, basis: str, serial: OpenInterval | None) -> Row:
    if point is base:
        return Row(point, point.world_size, without_spread(1.0), without_spread(1.0))
    growth = point.world_size / base.world_size
    before = [cost(base, run) for run in base.measurements]
    now = [cost(point, run) for run in point.measurements]
    speedup = _ratio(before, now)
    efficiency = Interval(
        speedup.value / growth,
        None if speedup.low is None else speedup.low / growth,
        None if speedup.high is None else speedup.high / growth,
    )
    losses = split_losses(base, point, efficiency.value, _step_s(point, basis))
    own = serial_fraction_of(base.world_size, [(base.world_size, before), (point.world_size, now)])
    change = suggest_change(base, point, speedup.value) if speedup.value < 1.0 else None
    grade = grade_of(efficiency.value)
    finding = cause = None
    names: tuple[str, ...] = ()
    if speedup.value < 1.0:
        finding = negative_scaling(base, point, speedup, losses, serial, change)
        cause, names = str(finding.evidence["cause"]), tuple(finding.evidence["causes"])
    elif grade != CLASSES[0][0]:
        causes = causes_of(base, point, losses, model_step(base, point, speedup.value))
        cause, names = "; ".join(causes.values()), tuple(causes)
    return Row(
        point,
        point.world_size,
        speedup,
        efficiency,
        grade,
        losses,
        None if own is None else own.value,
        limit_of(losses),
        cause,
        names,
        finding,
        change,
    )


def _step_s(point: Point, basis: str) -> float | None:
    """Seconds of a step, by the clock that the speed is based on."""
    if basis == "epoch_s" and point.global_batch:
        steps = [(run.epoch_s or 0.0) / run.epoch_samples for run in point.measurements if run.epoch_samples]
        if len(steps) == len(point.measurements):
            return math.fsum(steps) / len(steps) * point.global_batch
    if basis == "samples_per_s" and point.global_batch:
        return (
            math.fsum(1 / (run.samples_per_s or 1.0) for run in point.measurements)
            / len(point.measurements)
            * point.global_batch
        )
    return point.mean("step_s")


def _ratio(before: Sequence[float], now: Sequence[float]) -> OpenInterval:
    """Mean before divided by mean now; with repeated runs on both sides, a Welch interval in logarithms."""
    value = (math.fsum(before) / len(before)) / (math.fsum(now) / len(now))
    if len(before) < 2 or len(now) < 2:
        return without_spread(value)
    parts = [_relative_variance(before), _relative_variance(now)]
    margin = _margin(parts, [len(before) - 1, len(now) - 1])
    return Interval(value, value * math.exp(-margin), value * math.exp(margin))


def _relative_variance(values: Sequence[float]) -> float:
    return variance_of_mean(values) / (math.fsum(values) / len(values)) ** 2


def _margin(variances: Sequence[float], freedoms: Sequence[float]) -> float:
    """Half the 95% interval of a sum of independent parts (Satterthwaite's degrees of freedom)."""
    total = math.fsum(variances)
    if total <= 0:
        return 0.0
    freedom = total**2 / math.fsum(part**2 / free for part, free in zip(variances, freedoms))
    return student(freedom) * math.sqrt(total)


def serial_fraction_of(base_size: int, costs: Sequence[tuple[int, Sequence[float]]]) -> OpenInterval | None:
    """Estimate Amdahl's serial fraction f: the time on n devices is f + (1 - f) / n of that on one.

    Least squares over all world sizes, in the form that is linear in f. Above 1 no serial part explains the times (more
    devices add work of their own); below 0 the speedup is superlinear. The interval is the wider of those from the
    repetitions and from the misfit of the curve; with one run at each of two world sizes there is neither.

    Args:
        base_size: World size that speed is relative to.
        costs: World size and the time of each run for the same work, the base first.
    """
    means = [math.fsum(values) / len(values) for _, values in costs]
    sizes = [size for size, _ in costs]
    value = _amdahl(base_size, sizes, means)
    if value is None:
        return None
    margins = []
    if len(sizes) > 2:
        terms = _amdahl_terms(base_size, sizes, means)
        misfit = math.fsum((c - a * value) ** 2 for a, c in terms)
        spread = math.fsum(a * a for a, _ in terms)
        margins.append(student(len(terms) - 1) * math.sqrt(misfit / (len(terms) - 1) / spread))
    if all(len(values) > 1 for _, values in costs):
        variances = []
        for index, (_, values) in enumerate(costs):
            step = means[index] * 1e-6
            moved = _amdahl(base_size, sizes, [*means[:index], means[index] + step, *means[index + 1 :]])
            slope = 0.0 if moved is None else (moved - value) / step
            variances.append(slope**2 * variance_of_mean(values))
        margins.append(_margin(variances, [len(values) - 1 for _, values in costs]))
    if not margins:
        return without_spread(value)
    return Interval(value, value - max(margins), value + max(margins))


def _amdahl(base_size: int, sizes: Sequence[int], means: Sequence[float]) -> float | None:
    terms = _amdahl_terms(base_size, sizes, means)
    squares = math.fsum(a * a for a, _ in terms)
    return math.fsum(a * c for a, c in terms) / squares if squares > 0 else None


def _amdahl_terms(base_size: int, sizes: Sequence[int], means: Sequence[float]) -> list[tuple[float, float]]:
    """Pairs (a, c) with a f = c, one for each world size other than the base."""
    terms = []
    for size, time_s in zip(sizes[1:], means[1:]):
        y = time_s / means[0]
        terms.append(((1 - 1 / size) - y * (1 - 1 / base_size), y / base_size - 1 / size))
    return terms


_LIMITS = {
    "communication": "exposed communication",
    "stragglers": "waiting for the slowest rank",
    "input": "waiting for input",
    "smaller_batch": "smaller batch per device",
    "other": "other (not seen in any phase)",
}


def limit_of(losses: Losses) -> str | None:
    """Name the largest loss in words; None if nothing is lost."""
    name = losses.largest
    return None if name is None or losses.total <= 0 else _LIMITS[name]


def _notes(rows: Sequence[Row], serial: OpenInterval | None) -> list[str]:
    notes = []
    if len(rows) == 1:
        notes.append(f"only world size {rows[0].world_size} was measured: there is no speedup to tell")
    elif rows[0].world_size > 1:
        notes.append(f"speedup is against world size {rows[0].world_size}, the smallest there is")
    if serial is not None and serial.value > 1:
        notes.append("no serial part explains these times: every device adds work of its own (communication)")
    crowded = [row for row in rows if row.point.cpus and row.world_size > row.point.cpus]
    if crowded:
        cores = crowded[-1].point.cpus
        notes.append(
            f"{crowded[-1].world_size} processes share {cores} cores: efficiency beyond world size {cores} says "
            "nothing of the code"
        )
    beyond = [str(row.world_size) for row in rows if row.efficiency.value > BEYOND_LINEAR]
    if beyond:
        notes.append(
            f"world size {', '.join(beyond)} is more than linear: the base was disturbed, or a device's share fits a "
            "nearer cache; repeat it before believing it"
        )
    if any(len(row.point.measurements) == 1 for row in rows) and len(rows) > 1:
        notes.append("some world sizes were run once: no interval for them")
    return notes
