"""Network model: seconds per collective and size, from measured points.

Sizes are counted as in nccl-tests, in bytes of the whole: for `all_reduce` and `broadcast` the tensor, for `all_gather`
the gathered result, for `all_to_all` what one rank sends. Between measured sizes, time is linear in bytes. Below the
smallest it is that of the smallest; beyond the largest it continues with the last slope.

Other world sizes than the measured one follow the ring algorithms. A collective of S bytes among n ranks takes

    steps(n) * a + share(n) * S / b

    all_reduce   steps 2(n-1)   share 2(n-1)/n
    all_gather   steps   n-1    share  (n-1)/n
    all_to_all   steps   n-1    share  (n-1)/n
    broadcast    steps   n-1    share  1

where a is the time of one step and b the bus bandwidth, which each link carries. Measured times are divided into
latency and transfer, and each part is scaled by the ratio of steps or shares. The formulas do not cover trees, links of
different speed (GPUs of one node against nodes) or more traffic in one switch: far from the measured world size,
measure.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from frameworm.errors import NetworkModelError
from frameworm.records.atomic import write_atomic
from frameworm.records.reading import read_json
from frameworm.records.statistics import percentile

SCHEMA_VERSION = 1
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "broadcast")

# Up to this size, the time of a message counts as latency only.
_SMALL_BYTES = 4096
# The bandwidth is fitted over sizes down to this fraction of the largest.
_LARGE_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class NetworkPoint:
    """One size of one collective: the spread of its times, each that of the slowest rank."""

    size_bytes: int
    median_s: float
    q1_s: float
    q3_s: float
    repetitions: int
    cpu_s: float | None = None  # processor time of a rank, all threads; None if not measured

    @classmethod
    def from_times(cls, size_bytes: int, times_s: Sequence[float], cpu_times_s: Sequence[float] = ()) -> NetworkPoint:
        """Summarise repetitions."""
        ordered = sorted(times_s)
        return cls(
            size_bytes,
            percentile(ordered, 0.5),
            percentile(ordered, 0.25),
            percentile(ordered, 0.75),
            len(ordered),
            percentile(sorted(cpu_times_s), 0.5) if cpu_times_s else None,
        )


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """A collective in two numbers: a latency, and the bandwidth for large sizes."""

    latency_s: float
    bytes_per_s: float | None  # None if time does not grow with size


def bus_share(collective: str, world_size: int) -> float:
    """Return the bytes that each link carries per byte of the collective's size, in a ring of that many ranks."""
    _known(collective)
    if world_size <= 1:
        return 0.0
    share = (world_size - 1) / world_size
    return {"all_reduce": 2 * share, "broadcast": 1.0}.get(collective, share)


def ring_steps(collective: str, world_size: int) -> int:
    """Return the number of consecutive messages in a ring of that many ranks."""
    _known(collective)
    return (2 if collective == "all_reduce" else 1) * max(0, world_size - 1)


def fit(points: Sequence[NetworkPoint]) -> CollectiveFit:
    """Fit the latency from the small sizes, and the bandwidth by least squares over the large ones.

    The latency is the shortest median among sizes up to 4 KiB, whose transfer is negligible; if no size is that small,
    it is the smallest size's time without its transfer. The line through the large sizes (a sixteenth of the largest
    and more, at least the two largest) has its own intercept, so that a burst after a pause does not count as
    bandwidth. Errors are relative, because they grow with the time.
    """
    large = [point for point in points if point.size_bytes >= points[-1].size_bytes * _LARGE_SHARE]
    if len(large) < 2:
        large = list(points[-2:])
    slope = _slope(large)
    small = [point.median_s for point in points if point.size_bytes <= _SMALL_BYTES]
    latency_s = min(small, default=points[0].median_s)
    if not small and slope is not None:
        latency_s = max(0.0, latency_s - points[0].size_bytes * slope)
    return CollectiveFit(latency_s, None if slope is None else 1 / slope)


def _slope(points: Sequence[NetworkPoint]) -> float | None:
    """Seconds per byte; None if time does not grow with size."""
    if len(points) < 2:
        return None
    weights = [1 / point.median_s**2 for point in points]
    total = math.fsum(weights)
    size = math.fsum(weight * point.size_bytes for weight, point in zip(weights, points)) / total
    time_s = math.fsum(weight * point.median_s for weight, point in zip(weights, points)) / total
    spread = math.fsum(weight * (point.size_bytes - size) ** 2 for weight, point in zip(weights, points))
    together = math.fsum(
        weight * (point.size_bytes - size) * (point.median_s - time_s) for weight, point in zip(weights, points)
    )
    return together / spread if together > 0 else None


@dataclass(frozen=True)
class NetworkModel:
    """Measured times of collectives between the ranks of one job.

    Attributes:
        points: By collective, in ascending sizes.
        world_size: Number of ranks.
        hosts: Number of machines, as the network sees them.
        backend: gloo or nccl.
        device: Device of the tensors: cpu or cuda.
        environment: Fingerprint of the hardware and software measured on.
    """

    points: Mapping[str, tuple[NetworkPoint, ...]]
    world_size: int
    hosts: int = 1
    backend: str = "unknown"
    device: str = "cpu"
    environment: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.world_size < 2:
            raise NetworkModelError(f"a network is measured between 2 ranks or more, not {self.world_size}")
        for collective, points in self.points.items():
            _known(collective)
            sizes = [point.size_bytes for point in points]
            if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 0:
                raise NetworkModelError(f"sizes of {collective} must ascend from 0 or more, got {sizes}")
            if not all(math.isfinite(point.median_s) and point.median_s > 0 for point in points):
                raise NetworkModelError(f"times of {collective} must be positive numbers of seconds")

    def seconds(self, collective: str, size_bytes: float, world_size: int | None = None) -> float:
        """Return how long a collective of that size takes.

        Args:
            collective: all_reduce, all_gather, all_to_all or broadcast.
            size_bytes: Counted as in the module docstring.
            world_size: Number of ranks if it is not the measured one; computed by the ring formulas.

        Raises:
            NetworkModelError: The collective is unknown or was not measured.
        """
        measured_s = _interpolate(self._of(collective), size_bytes)
        if world_size is None or world_size == self.world_size:
            return measured_s
        if world_size <= 1:
            return 0.0
        latency_s = min(measured_s, self.fit(collective).latency_s)
        steps = ring_steps(collective, world_size) / ring_steps(collective, self.world_size)
        share = bus_share(collective, world_size) / bus_share(collective, self.world_size)
        return latency_s * steps + (measured_s - latency_s) * share

    def host_seconds(self, collective: str, size_bytes: float, world_size: int | None = None) -> float:
        """Return the processor time of a collective on a rank; 0 if it was not measured."""
        seen = [point for point in self.points.get(collective, ()) if point.cpu_s is not None]
        if not seen:
            return 0.0
        taken = [replace(point, median_s=max(point.cpu_s or 0.0, 1e-9)) for point in seen]
        share = bus_share(collective, world_size or self.world_size) / bus_share(collective, self.world_size)
        return _interpolate(taken, size_bytes) * share

    def fit(self, collective: str) -> CollectiveFit:
        """Return latency and bandwidth of a collective (bytes of its size per second)."""
        return fit(self._of(collective))

    def latency_s(self, collective: str = "all_reduce") -> float:
        """Return the time of a collective that carries next to nothing."""
        return self.fit(collective).latency_s

    def bus_bytes_per_s(self, collective: str = "all_reduce") -> float | None:
        """Return each link's bandwidth during a large collective; it is comparable across collectives."""
        rate = self.fit(collective).bytes_per_s
        return None if rate is None else rate * bus_share(collective, self.world_size)

    def summary(self) -> dict[str, dict[str, float | None]]:
        """Return latency_us, bandwidth_gbps (of the size) and bus_bandwidth_gbps (of a link) of each collective."""
        found: dict[str, dict[str, float | None]] = {}
        for collective in self.points:
            numbers = self.fit(collective)
            found[collective] = {
                "latency_us": _rounded(numbers.latency_s, 1e6),
                "bandwidth_gbps": _rounded(numbers.bytes_per_s, 8e-9),
                "bus_bandwidth_gbps": _rounded(self.bus_bytes_per_s(collective), 8e-9),
            }
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `network.json`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "world_size": self.world_size,
            "hosts": self.hosts,
            "backend": self.backend,
            "device": self.device,
            "summary": self.summary(),
            "points": {name: [asdict(point) for point in points] for name, points in self.points.items()},
            "environment": dict(self.environment),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NetworkModel:
        """Read what `to_dict` returned; the summary is computed again.

        Raises:
            NetworkModelError: Something is missing, malformed, or from a later version.
        """
        try:
            version = data["schema_version"]
            if version != SCHEMA_VERSION:
                raise NetworkModelError(f"schema_version {version} is not {SCHEMA_VERSION}: measure again")
            points = {
                name: tuple(
                    NetworkPoint(
                        size_bytes=int(item["size_bytes"]),
                        median_s=float(item["median_s"]),
                        q1_s=float(item["q1_s"]),
                        q3_s=float(item["q3_s"]),
                        repetitions=int(item["repetitions"]),
                        cpu_s=None if item.get("cpu_s") is None else float(item["cpu_s"]),
                    )
                    for item in items
                )
                for name, items in data["points"].items()
            }
            return cls(
                points=points,
                world_size=int(data["world_size"]),
                hosts=int(data["hosts"]),
                backend=str(data["backend"]),
                device=str(data["device"]),
                environment=dict(data.get("environment") or {}),
            )
        except KeyError as error:
            raise NetworkModelError(f"{error.args[0]} is missing") from error
        except (AttributeError, TypeError, ValueError) as error:
            if isinstance(error, NetworkModelError):
                raise
            raise NetworkModelError(f"malformed: {error}") from error

    def save(self, path: Path) -> None:
        """Write `network.json` as a whole or not at all."""
        write_atomic(path, json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> NetworkModel:
        """Read a `network.json`.

        Raises:
            NetworkModelError: The file is missing or does not contain a network.
        """
        try:
            data = read_json(path)
        except OSError as error:
            raise NetworkModelError(f"cannot read {path}: {error.strerror}; `frameworm network` writes one") from error
        except ValueError as error:
            raise NetworkModelError(f"{path} is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise NetworkModelError(f"{path} holds no network; `frameworm network --out {path}` writes one")
        try:
            return cls.from_dict(data)
        except NetworkModelError as error:
            raise NetworkModelError(f"{path}: {error}") from error

    def _of(self, collective: str) -> tuple[NetworkPoint, ...]:
        _known(collective)
        if collective not in self.points:
            raise NetworkModelError(f"{collective} was not measured, only {', '.join(self.points) or 'nothing'}")
        return self.points[collective]


def _known(collective: str) -> None:
    if collective not in COLLECTIVES:
        raise NetworkModelError(f"{collective} is not one of {', '.join(COLLECTIVES)}")


def _interpolate(points: Sequence[NetworkPoint], size_bytes: float) -> float:
    first, last = points[0], points[-1]
    if size_bytes <= first.size_bytes or len(points) == 1:
        # A single size shows no growth; counting all of its time as transfer is never too optimistic.
        return first.median_s * max(1.0, size_bytes / max(1, first.size_bytes))
    if size_bytes > last.size_bytes:
        before = points[-2]
        slope = (last.median_s - before.median_s) / (last.size_bytes - before.size_bytes)
        if slope <= 0:  # noise: more bytes never take less time
            slope = _slope(points) or last.median_s / last.size_bytes
        return last.median_s + slope * (size_bytes - last.size_bytes)
    above = bisect.bisect_left([point.size_bytes for point in points], size_bytes)
    low, high = points[above - 1], points[above]
    part = (size_bytes - low.size_bytes) / (high.size_bytes - low.size_bytes)
    return low.median_s + (high.median_s - low.median_s) * part


def _rounded(value: float | None, scale: float) -> float | None:
    """Round to four digits, more than a network reproduces."""
    return None if value is None else float(f"{value * scale:.4g}")
