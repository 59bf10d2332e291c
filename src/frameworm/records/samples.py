"""Samples of the machine over time: on disk, and as curves of bounded length."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any

from frameworm.errors import RunFolderError
from frameworm.records.observations import SystemSample
from frameworm.records.reading import parse_line, read_lines
from frameworm.records.schema import json_ready

SERIES_LIMIT = 1_000

_FIELDS = tuple(item.name for item in dataclasses.fields(SystemSample))
# Counters that only ever rise: when samples are merged, the last value counts.
_COUNTERS = frozenset(
    {
        "time",
        "gpu_energy_j",
        "disk_read_bytes",
        "disk_write_bytes",
        "network_sent_bytes",
        "network_received_bytes",
    }
)
_WHOLE = frozenset(item.name for item in dataclasses.fields(SystemSample) if str(item.type) == "int | None")


def sample_line(sample: SystemSample) -> str:
    """Encode one sample as a line of JSON, rounded to the precision of the sources."""
    data = {name: _short(getattr(sample, name)) for name in _FIELDS}
    return json.dumps(json_ready(data), allow_nan=False, separators=(",", ":"))


def read_samples(path: str | os.PathLike[str]) -> Iterator[SystemSample]:
    """Yield the readable samples of a file; broken lines, as crashes leave them, are skipped.

    Raises:
        RunFolderError: The file cannot be read.
    """
    try:
        for line in read_lines(path):
            sample = parse_sample(line)
            if sample is not None:
                yield sample
    except OSError as error:
        raise RunFolderError(f"cannot read the samples in {path}: {error.strerror or error}") from error


class SampleSeries:
    """The samples of a run as at most `limit` points, each the mean of equally many samples."""

    def __init__(self, limit: int = SERIES_LIMIT) -> None:
        assert limit >= 3, "a curve needs points"
        self._limit = (limit - 1) // 2 * 2
        self._stride = 1
        self._full: list[SystemSample] = []
        self._filling: list[SystemSample] = []

    def add(self, sample: SystemSample) -> None:
        """Add one sample."""
        self._filling.append(sample)
        if len(self._filling) < self._stride:
            return
        if len(self._full) == self._limit:
            self._full = [mean_sample(self._full[index : index + 2]) for index in range(0, self._limit, 2)]
            self._stride *= 2
            return  # the samples being collected become the first half of the next, wider point
        self._full.append(mean_sample(self._filling))
        self._filling = []

    def points(self) -> list[SystemSample]:
        """Return the samples so far, in order of time."""
        return [*self._full, mean_sample(self._filling)] if self._filling else list(self._full)


def mean_sample(samples: list[SystemSample]) -> SystemSample:
    """Merge neighbouring samples: means, the last value of each counter, all throttle reasons."""
    if len(samples) == 1:
        return samples[0]
    values: dict[str, Any] = {}
    for name in _FIELDS:
        present = [value for sample in samples if (value := getattr(sample, name)) is not None]
        if name == "throttle_reasons":
            values[name] = list(dict.fromkeys(reason for reasons in present for reason in reasons))
        elif name == "cpu_cores":
            seen = [cores for cores in present if cores]
            values[name] = [sum(core) / len(core) for core in zip(*seen)]
        elif not present or name in _COUNTERS:
            values[name] = present[-1] if present else None
        else:
            mean = sum(present) / len(present)
            values[name] = round(mean) if name in _WHOLE else mean
    return SystemSample(**values)


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    return [_short(item) for item in value] if isinstance(value, list) else value


def parse_sample(line: bytes) -> SystemSample | None:
    """Parse one line; None if it is not a sample."""
    try:
        data = parse_line(line)
        sample = SystemSample(**{name: data[name] for name in _FIELDS if name in data})
    except (ValueError, TypeError, AttributeError):
        return None
    return sample if isinstance(sample.time, (int, float)) else None
