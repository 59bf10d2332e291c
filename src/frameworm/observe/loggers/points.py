"""Turn records into named values: what a logger gets for a few steps, an epoch, a whole run."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from frameworm.records.schema import EpochRecord, RunRecord, StepRecord
from frameworm.report.run.progress import Mfu

_GROUP_STEPS = 64  # steps aggregated at a time; one by one, the code would have left the caches each time


class Point(NamedTuple):
    """Values of one step."""

    step: int
    values: dict[str, float]


class StepPoints:
    """Aggregates the steps between two points of a curve.

    Args:
        interval_s: Seconds of training between two points; 0: a point for every step.
        world_size: Number of ranks, assumed to do the same work as this one.
        mfu: Computes the MFU of this rank's steps.
        memory: Returns the peak memory of this process in bytes; called once per point.
    """

    def __init__(
        self,
        interval_s: float,
        world_size: int = 1,
        mfu: Mfu | None = None,
        memory: Callable[[], int | None] | None = None,
    ) -> None:
        self._interval_s = interval_s
        self._world_size = world_size
        self._mfu = mfu
        self._memory = memory
        self._due = -math.inf
        self._waiting: list[StepRecord] = []
        self._clear()

    def add(self, step: StepRecord) -> Point | None:
        """Add a step; returns the point that it completes, if any."""
        self._waiting.append(step)
        if step.time < self._due:
            if len(self._waiting) >= _GROUP_STEPS:
                self._sum_up()
            return None
        self._due = step.time + self._interval_s
        return self.rest()

    def rest(self) -> Point | None:
        """A point for the steps since the last one; None if there were none."""
        self._sum_up()
        if not self._steps:
            return None
        values = finite(self._values())
        step = self._last
        self._clear()
        return Point(step, values)

    def _clear(self) -> None:
        self._steps = self._last = self._samples = self._tokens = 0
        self._time_s = self._squared_tokens = 0.0
        self._losses, self._norms = _Mean(), _Mean()
        self._lr: float | None = None

    def _sum_up(self) -> None:
        for step in self._waiting:
            self._steps += 1
            self._last = step.step
            self._time_s += step.step_s
            self._samples += step.samples
            if step.tokens is not None:
                self._tokens += step.tokens
                self._squared_tokens += step.tokens**2 / max(step.samples, 1)
            self._losses.add(step.loss, step.count)
            self._norms.add(step.grad_norm)
            self._lr = step.lr
        self._waiting.clear()

    def _values(self) -> dict[str, float | None]:
        time_s, tokens = self._time_s, self._tokens or None
        squared = self._squared_tokens if tokens else None
        rate = self._world_size / time_s if time_s > 0 else None
        return {
            "train/loss": self._losses.value,
            "train/lr": self._lr,
            "train/grad_norm": self._norms.value,
            "time/step_s": time_s / self._steps,
            "time/samples_per_s": None if rate is None else self._samples * rate,
            "time/tokens_per_s": None if rate is None or tokens is None else tokens * rate,
            "time/mfu": None if self._mfu is None else self._mfu(self._samples, tokens, squared, time_s),
            "memory/peak_bytes": None if self._memory is None else self._memory(),
        }


class _Mean:
    """A weighted mean of the finite values."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float | None, weight: float = 1.0) -> None:
        if value is not None and weight > 0 and math.isfinite(value):
            self._sum += value * weight
            self._weight += weight

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight else None


def epoch_values(epoch: EpochRecord) -> dict[str, float]:
    """All numbers of an epoch's record as `epoch/NAME`; mappings such as metrics are expanded."""
    found: dict[str, Any] = {"epoch": epoch.epoch}
    for field in dataclasses.fields(epoch):
        value = getattr(epoch, field.name)
        if isinstance(value, Mapping):
            found.update({f"epoch/{name}": item for name, item in value.items()})
        elif field.name != "epoch":
            found[f"epoch/{field.name.removeprefix('epoch_')}"] = value
    return finite(found)


def summary_values(record: RunRecord) -> dict[str, float | int | bool | str]:
    """The record of a run as one flat mapping, with names such as `throughput.samples_per_s`.

    Lists are omitted, and so are samples of the machine, which trackers take themselves.
    """
    data = {name: value for name, value in record.to_dict().items() if name != "system"}
    plain = ((name, str(value) if isinstance(value, str) else value) for name, value in flat(data))
    return {name: value for name, value in plain if isinstance(value, (bool, int, float, str))}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings with their dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among values, as floats: trackers differ in how they handle others."""
    return {
        name: float(value)
        for name, value in values.items()
        if not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)
    }
