"""Compares two sweeps: how much better one configuration scales than another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frameworm.records.estimate import OpenInterval
from frameworm.records.schema import json_ready
from frameworm.scaling.analysis import Analysis, Curve, Row


@dataclass(frozen=True, slots=True)
class Side:
    """One world size of one sweep."""

    epoch_s: float | None
    samples_per_s: float | None
    speedup: OpenInterval
    efficiency: OpenInterval
    status: str  # base, excellent, good, fair, poor, negative_scaling
    val_accuracy: float | None
    cause: str | None


@dataclass(frozen=True, slots=True)
class Pair:
    """One world size before and after; None if a sweep does not have this size."""

    world_size: int
    before: Side | None
    after: Side | None

    @property
    def epoch_gain(self) -> float | None:
        """Ratio of the epoch times: above 1 means a shorter epoch afterwards."""
        return self._ratio("epoch_s", inverse=True)

    @property
    def throughput_gain(self) -> float | None:
        """Ratio of the samples per second, after to before."""
        return self._ratio("samples_per_s")

    @property
    def speedup_gain(self) -> float | None:
        """Ratio of the speedups, after to before."""
        if self.before is None or self.after is None:
            return None
        return self.after.speedup.value / self.before.speedup.value

    def _ratio(self, name: str, *, inverse: bool = False) -> float | None:
        before, after = (None if side is None else getattr(side, name) for side in (self.before, self.after))
        if not before or not after:
            return None
        return float(before / after if inverse else after / before)


@dataclass(frozen=True, slots=True)
class Change:
    """One data set in both sweeps."""

    label: str
    mode_before: str
    mode_after: str
    base_before: str  # a run at the smallest world size, whose config represents all
    base_after: str
    pairs: tuple[Pair, ...]  # smallest world size first

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data, including the gains."""
        data: dict[str, Any] = json_ready(dataclasses.asdict(self))
        for pair, item in zip(self.pairs, data["pairs"]):
            for name in ("epoch_gain", "throughput_gain", "speedup_gain"):
                item[name] = getattr(pair, name)
        return data


def compare_sweeps(before: Analysis, after: Analysis) -> tuple[list[Change], list[str]]:
    """Pair the curves of two sweeps.

    Curves of the same data set are paired; if a data set has several, those with the same name and mode.

    Returns:
        The pairs, and descriptions of the curves without a counterpart.
    """
    left, right = list(before.curves), list(after.curves)
    found = []
    for rule in (_same_curve, _same_work, _only_one_of_its_data):
        for first in list(left):
            second = next((item for item in right if rule(first, item, left, right)), None)
            if second is not None:
                found.append(_change(first, second))
                left.remove(first)
                right.remove(second)
    alone = [f"only A has {curve.label}, {curve.mode} scaling" for curve in left]
    alone += [f"only B has {curve.label}, {curve.mode} scaling" for curve in right]
    return sorted(found, key=lambda item: item.label), alone


def _same_curve(first: Curve, second: Curve, *_: Sequence[Curve]) -> bool:
    return (first.dataset, first.name, first.mode) == (second.dataset, second.name, second.mode)


def _same_work(first: Curve, second: Curve, *_: Sequence[Curve]) -> bool:
    return (first.dataset, first.name) == (second.dataset, second.name)


def _only_one_of_its_data(first: Curve, second: Curve, left: Sequence[Curve], right: Sequence[Curve]) -> bool:
    """True if, whatever their names, each is the only curve of this data set on its side."""
    return first.dataset == second.dataset and all(
        sum(curve.dataset == first.dataset for curve in side) == 1 for side in (left, right)
    )


def _change(before: Curve, after: Curve) -> Change:
    sizes = sorted({row.world_size for curve in (before, after) for row in curve.rows})
    pairs = tuple(Pair(size, _side(before.row(size)), _side(after.row(size))) for size in sizes)
    label = before.label if before.label == after.label else before.dataset
    return Change(label, before.mode, after.mode, _run(before), _run(after), pairs)


def _run(curve: Curve) -> str:
    return curve.base.point.measurements[0].run or ""


def _side(row: Row | None) -> Side | None:
    if row is None:
        return None
    status = "base" if row.grade is None else "negative_scaling" if row.finding is not None else row.grade
    point = row.point
    return Side(
        point.mean("epoch_s"),
        point.mean("samples_per_s"),
        row.speedup,
        row.efficiency,
        status,
        point.mean("val_accuracy"),
        row.cause,
    )
