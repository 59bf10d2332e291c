"""Compares two runs: their settings, their hardware, and where the time of a step went."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from frameworm.guard.divergence import COMPARED_BYTES, Divergence, first_divergence
from frameworm.guard.run_metrics import RunMetrics, read_runs
from frameworm.guard.statistics import independent_ratio, run_spread
from frameworm.records.estimate import Interval
from frameworm.records.printable import Shown
from frameworm.records.schema import PHASES, json_ready
from frameworm.records.store import RunFolder

# Facts of the fingerprint that identify a machine; the others are versions, or chosen when the run is started.
HARDWARE = {
    "machine": 0.0,
    "cpu_model": 0.0,
    "cpus_usable": 0.0,
    "cpus_total": 0.0,
    "memory_bytes": 0.1,
    "device": 0.0,
    "device_memory_bytes": 0.05,
}
# Tokens and samples per step vary with the texts that happen to be drawn.
WORK = {"workload": 0.0, "dataset": 0.0, "global_batch": 0.0, "parameters": 0.0, "tokens_per_step": 0.1}
SAME_SAMPLES = 0.02
# A phase must explain this fraction of the difference to be named as its cause.
EXPLAINS = 0.3
CROWDED = 0.03
_TWO_SIDED = 2.1
_FEW = 4  # settings to show


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that differs; None means absent or unknown."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """One phase of the mean step before and after, in seconds per step or per sample."""

    name: str
    before_s: float
    after_s: float
    margin_s: float  # half the 95% interval of the difference

    @property
    def difference_s(self) -> float:
        """How much longer it takes."""
        return self.after_s - self.before_s

    @property
    def outside_noise(self) -> bool:
        """True if the difference is more than noise."""
        return abs(self.difference_s) > self.margin_s


@dataclass(frozen=True, slots=True)
class Explanation:
    """The phase that explains most of a difference."""

    phase: str
    difference_s: float
    total_s: float

    @property
    def share(self) -> float:
        """Fraction of the whole difference; above 1 if other phases changed in the opposite direction."""
        return self.difference_s / self.total_s


@dataclass(slots=True, repr=False)
class Comparison(Shown):
    """What changed between two runs."""

    before: RunMetrics
    after: RunMetrics
    per_sample: bool = False
    settings: list[Difference] = field(default_factory=list)
    environment: list[Difference] = field(default_factory=list)
    hardware: list[Difference] = field(default_factory=list)
    work: list[Difference] = field(default_factory=list)
    typical: Interval[float] | None = None  # of the time per step or per sample; None if there are too few steps
    mean: Interval[float] | None = None
    phases: list[PhaseChange] = field(default_factory=list)
    explanation: Explanation | None = None
    parting: Divergence | None = None  # None: not computed, or there is no step to compare
    sentences: list[str] = field(default_factory=list)  # what it comes to; `frameworm.report` has the words

    def in_words(self) -> list[str]:
        """What happened to the speed, and what was set differently."""
        lines = [f"Comparison: A is {self.before.name}, B is {self.after.name}", *self.sentences]
        if self.settings:
            changed = [f"{item.name} {item.before} -> {item.after}" for item in self.settings[:_FEW]]
            more = f" and {len(self.settings) - _FEW} more" if len(self.settings) > _FEW else ""
            lines.append(f"settings: {', '.join(changed)}{more}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON-ready data."""
        return comparison_dict(self)


def comparison_dict(value: Any, **more: Any) -> dict[str, Any]:
    """A comparison, or a judgement that compares, as JSON-ready data without the series it was made from."""
    data = dataclasses.asdict(value)
    for item in data["phases"]:
        item["difference_s"] = item["after_s"] - item["before_s"]
        item["outside_noise"] = abs(item["difference_s"]) > item["margin_s"]
    for name in ("typical", "mean"):
        if isinstance(data.get(name), dict):
            data[name] = {"ratio": data[name].pop("value"), **data[name]}
    for name in ("before", "after"):
        if isinstance(data.get(name), dict):
            for long in ("mean_s", "median_s", "settings", "environment"):
                data[name].pop(long)
    found: dict[str, Any] = json_ready({**more, **data})
    return found


def compare_folders(
    before: str | os.PathLike[str], after: str | os.PathLike[str], *, exact: bool = False
) -> Comparison:
    """Compare two stored runs, and find the step at which they diverge.

    Args:
        before: Folder of a run.
        after: Folder of another.
        exact: Read all steps of long runs instead of a sample.

    Raises:
        BaselineError: One of them cannot be compared.
    """
    comparison = compare_runs(*read_runs([os.fspath(before), os.fspath(after)], exact=exact))
    comparison.parting = first_divergence(RunFolder(before), RunFolder(after), None if exact else COMPARED_BYTES)
    return comparison


def compare_runs(before: RunMetrics, after: RunMetrics) -> Comparison:
    """Compare two runs; nothing is refused here, differences are shown."""
    comparison = Comparison(before, after)
    comparison.settings = differences(before.settings, after.settings)
    comparison.hardware = hardware_differences(before, after)
    hardware = {item.name for item in comparison.hardware}
    others = differences(before.environment, after.environment)
    comparison.environment = [item for item in others if item.name not in HARDWARE and item.name not in hardware]
    comparison.work = work_differences(before, after)
    comparison.per_sample = _other_batches(before, after)
    scale = 1.0
    if comparison.per_sample:
        assert before.work.samples_per_step
        assert after.work.samples_per_step
        scale = before.work.samples_per_step / after.work.samples_per_step
    comparison.typical = _ratio(before, after, scale, "typical")
    comparison.mean = _ratio(before, after, scale, "mean")
    comparison.phases = phase_changes([before], [after], per_sample=comparison.per_sample)
    comparison.explanation = explain(comparison.phases)
    return comparison


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Return all keys whose values differ, in the order of `before`."""
    names = dict.fromkeys([*before, *after])
    return [
        Difference(name, before.get(name), after.get(name))
        for name in names
        if not _alike(before.get(name), after.get(name), 0.0)
    ]


def hardware_differences(before: RunMetrics, after: RunMetrics) -> list[Difference]:
    """Return what distinguishes the machines; an unknown value is not a difference."""
    found = _known_differences(before.environment, after.environment, HARDWARE)
    if before.world_size != after.world_size:
        found.append(Difference("world_size", before.world_size, after.world_size))
    return found


def work_differences(before: RunMetrics, after: RunMetrics) -> list[Difference]:
    """Return what makes the steps of two runs different work."""
    mine = {name: getattr(before.work, name) for name in WORK}
    theirs = {name: getattr(after.work, name) for name in WORK}
    return _known_differences(mine, theirs, WORK)


def phase_changes(
    before: Sequence[RunMetrics], after: Sequence[RunMetrics], *, per_sample: bool = False
) -> list[PhaseChange]:
    """Compare each phase of the mean step, in the order of a step; empty if one side has no phases."""
    if not all(run.phases for run in (*before, *after)):
        return []
    groups = [[level for run in group if (level := run.mean()) is not None] for group in (before, after)]
    spread, _ = run_spread(*groups)
    names = dict.fromkeys(name for run in (*before, *after) for name in run.phases)
    ordered = [*(name for name in PHASES if name in names), *(name for name in names if name not in PHASES)]
    return [_phase_change(name, before, after, spread, per_sample) for name in ordered]


def explain(changes: Sequence[PhaseChange]) -> Explanation | None:
    """Return the phase that mostly explains a difference; None if no phase exceeds the noise."""
    total_s = math.fsum(change.difference_s for change in changes)
    if total_s == 0:
        return None
    same_way = [item for item in changes if item.difference_s * total_s > 0 and item.outside_noise]
    if not same_way:
        return None
    most = max(same_way, key=lambda change: abs(change.difference_s))
    found = Explanation(most.name, most.difference_s, total_s)
    return found if found.share >= EXPLAINS else None


def _phase_change(
    name: str, before: Sequence[RunMetrics], after: Sequence[RunMetrics], spread: float, per_sample: bool
) -> PhaseChange:
    means: list[float] = []
    variance = 0.0
    for group in (before, after):
        values: list[float] = []
        errors = 0.0
        for run in group:
            samples = run.work.samples_per_step if per_sample else None
            scale = 1.0 / samples if samples else 1.0
            item = run.phases.get(name)
            values.append(0.0 if item is None else item.value * scale)
            errors += 0.0 if item is None else (item.error * scale) ** 2
        mean = math.fsum(values) / len(values)
        means.append(mean)
        variance += errors / len(group) ** 2 + (spread * mean) ** 2 / len(group)
    disturbed_s = max(crowded(run) for run in (*before, *after)) * max(means)
    return PhaseChange(name, means[0], means[1], _TWO_SIDED * math.sqrt(variance) + disturbed_s)


def _ratio(before: RunMetrics, after: RunMetrics, scale: float, kind: str) -> Interval[float] | None:
    """Interval of the ratio; `scale` converts it from steps to samples."""
    levels = [getattr(run, kind)() for run in (before, after)]
    if any(level is None for level in levels):
        return None
    found = widened(independent_ratio([levels[0]], [levels[1]]), [before], [after])
    return Interval(found.value * scale, found.low * scale, found.high * scale)


def widened(found: Interval[float], before: Sequence[RunMetrics], after: Sequence[RunMetrics]) -> Interval[float]:
    """Widen an interval by what other programs on the machine may have done to one side but not to the other.

    Programs that use a fraction of the cores make a run longer by up to 1 / (1 - fraction). If both sides were crowded,
    half of the smaller effect is assumed to be common to both.
    """
    mine, theirs = (max(-math.log(1 - crowded(run)) for run in group) for group in (before, after))
    slower, faster = max(theirs - mine / 2, 0.0), max(mine - theirs / 2, 0.0)
    return Interval(found.value, found.low * math.exp(-slower), found.high * math.exp(faster))


def crowded(run: RunMetrics) -> float:
    """Fraction of the cores that other programs took from a run; 0 if too small to matter."""
    return run.crowding if run.crowding is not None and run.crowding >= CROWDED else 0.0


def _other_batches(before: RunMetrics, after: RunMetrics) -> bool:
    mine, theirs = before.work.samples_per_step, after.work.samples_per_step
    return bool(mine and theirs) and not _alike(mine, theirs, SAME_SAMPLES)


def _known_differences(
    before: Mapping[str, Any], after: Mapping[str, Any], tolerances: Mapping[str, float]
) -> list[Difference]:
    found = []
    for name, tolerance in tolerances.items():
        mine, theirs = before.get(name), after.get(name)
        if mine is not None and theirs is not None and not _alike(mine, theirs, tolerance):
            found.append(Difference(name, mine, theirs))
    return found


def _alike(mine: Any, theirs: Any, tolerance: float) -> bool:
    if tolerance and isinstance(mine, (int, float)) and isinstance(theirs, (int, float)):
        return abs(mine - theirs) <= tolerance * max(abs(mine), abs(theirs))
    return bool(mine == theirs)
