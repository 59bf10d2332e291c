"""Two runs side by side: what was set, on what they ran, and where the time of a step went."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from frameworm.guard.figures import RunFigures, read_runs
from frameworm.guard.parting import COMPARED_BYTES, Parting, first_parting
from frameworm.guard.statistics import RatioInterval, independent_ratio, run_spread
from frameworm.records.schema import PHASES
from frameworm.records.store import RunFolder

# Facts of the fingerprint that make another machine; the others are versions, or chosen by whoever starts the run.
HARDWARE = {
    "machine": 0.0,
    "cpu_model": 0.0,
    "cpus_usable": 0.0,
    "cpus_total": 0.0,
    "memory_bytes": 0.1,
    "device": 0.0,
    "device_memory_bytes": 0.05,
}
# Tokens and samples of a step vary with the texts that happened to be drawn.
WORK = {"workload": 0.0, "dataset": 0.0, "global_batch": 0.0, "parameters": 0.0, "tokens_per_step": 0.1}
SAME_SAMPLES = 0.02
# A share of the difference that is worth the name of a cause.
EXPLAINS = 0.3
CROWDED = 0.03
_TWO_SIDED = 2.1


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact that is not the same; None is absent or unknown."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """One phase of the mean step before and after; seconds per step, or per sample."""

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
        """Whether the difference is more than noise."""
        return abs(self.difference_s) > self.margin_s


@dataclass(frozen=True, slots=True)
class Explanation:
    """The phase with the largest part in a difference."""

    phase: str
    difference_s: float
    total_s: float

    @property
    def share(self) -> float:
        """Its part of the whole difference; beyond 1 where others went the other way."""
        return self.difference_s / self.total_s


@dataclass(slots=True)
class Comparison:
    """What changed between two runs."""

    before: RunFigures
    after: RunFigures
    per_sample: bool = False
    settings: list[Difference] = field(default_factory=list)
    environment: list[Difference] = field(default_factory=list)
    hardware: list[Difference] = field(default_factory=list)
    work: list[Difference] = field(default_factory=list)
    typical: RatioInterval | None = None  # of the time per step or per sample; None: too few steps
    mean: RatioInterval | None = None
    phases: list[PhaseChange] = field(default_factory=list)
    explanation: Explanation | None = None
    parting: Parting | None = None  # None: nobody has looked, or there is no step to compare


def compare_folders(
    before: str | os.PathLike[str], after: str | os.PathLike[str], *, exact: bool = False
) -> Comparison:
    """Compare two stored runs, and find the step at which they part.

    Args:
        before: Folder of a run.
        after: Folder of another.
        exact: Read all steps of long runs, not a sample of them.

    Raises:
        BaselineError: One of them cannot be compared.
    """
    comparison = compare_runs(*read_runs([os.fspath(before), os.fspath(after)], exact=exact))
    comparison.parting = first_parting(RunFolder(before), RunFolder(after), None if exact else COMPARED_BYTES)
    return comparison


def compare_runs(before: RunFigures, after: RunFigures) -> Comparison:
    """Put two runs side by side; nothing is refused here, differences are shown."""
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
    """All keys whose values are not the same, in the order of the first."""
    names = dict.fromkeys([*before, *after])
    return [
        Difference(name, before.get(name), after.get(name))
        for name in names
        if not _alike(before.get(name), after.get(name), 0.0)
    ]


def hardware_differences(before: RunFigures, after: RunFigures) -> list[Difference]:
    """What makes the machines two kinds; what is unknown of one of them is no difference."""
    found = _known_differences(before.environment, after.environment, HARDWARE)
    if before.world_size != after.world_size:
        found.append(Difference("world_size", before.world_size, after.world_size))
    return found


def work_differences(before: RunFigures, after: RunFigures) -> list[Difference]:
    """What makes the steps of two runs different work."""
    mine = {name: getattr(before.work, name) for name in WORK}
    theirs = {name: getattr(after.work, name) for name in WORK}
    return _known_differences(mine, theirs, WORK)


def phase_changes(
    before: Sequence[RunFigures], after: Sequence[RunFigures], *, per_sample: bool = False
) -> list[PhaseChange]:
    """Each phase of the mean step before and after, in the order of a step; empty where one side has no phases."""
    if not all(run.phases for run in (*before, *after)):
        return []
    groups = [[level for run in group if (level := run.mean()) is not None] for group in (before, after)]
    spread, _ = run_spread(*groups)
    names = dict.fromkeys(name for run in (*before, *after) for name in run.phases)
    ordered = [*(name for name in PHASES if name in names), *(name for name in names if name not in PHASES)]
    return [_phase_change(name, before, after, spread, per_sample) for name in ordered]


def explain(changes: Sequence[PhaseChange]) -> Explanation | None:
    """The phase that a difference is mostly due to; None where no phase stands out of the noise."""
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
    name: str, before: Sequence[RunFigures], after: Sequence[RunFigures], spread: float, per_sample: bool
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


def _ratio(before: RunFigures, after: RunFigures, scale: float, kind: str) -> RatioInterval | None:
    """`scale` turns a ratio of steps into one of samples."""
    levels = [getattr(run, kind)() for run in (before, after)]
    if any(level is None for level in levels):
        return None
    found = widened(independent_ratio([levels[0]], [levels[1]]), [before], [after])
    return RatioInterval(found.ratio * scale, found.low * scale, found.high * scale)


def widened(found: RatioInterval, before: Sequence[RunFigures], after: Sequence[RunFigures]) -> RatioInterval:
    """The interval with what other programs on the machine may have done to one side and not to the other.

    Programs that take a share of the cores make a run longer by up to 1 / (1 - share). Where both sides were crowded,
    half of the smaller effect is taken to be common to them.
    """
    mine, theirs = (max(-math.log(1 - crowded(run)) for run in group) for group in (before, after))
    slower, faster = max(theirs - mine / 2, 0.0), max(mine - theirs / 2, 0.0)
    return RatioInterval(found.ratio, found.low * math.exp(-slower), found.high * math.exp(faster))


def crowded(run: RunFigures) -> float:
    """Share of the cores that other programs took from a run, where that is worth mentioning."""
    return run.crowding if run.crowding is not None and run.crowding >= CROWDED else 0.0


def _other_batches(before: RunFigures, after: RunFigures) -> bool:
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
