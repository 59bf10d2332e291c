"""Summarises the machine from its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from frameworm.records.observations import SystemSample, SystemSummary
from frameworm.records.samples import SampleSeries
from frameworm.records.statistics import Spread, percentile

FEWEST_POINTS = 6


def robust_slope(points: Sequence[tuple[float, float]], most_points: int = 200) -> float | None:
    """Median of the slopes between all pairs of points (Theil-Sen); robust to up to 29% outliers.

    Args:
        points: Pairs of time and value, in order of time.
        most_points: Use this many evenly spaced points if there are more.

    Returns:
        Growth per unit of time; None with fewer than six points or no time between them.
    """
    if len(points) < FEWEST_POINTS:
        return None
    if len(points) > most_points:
        step = (len(points) - 1) / (most_points - 1)
        points = [points[round(index * step)] for index in range(most_points)]
    slopes = sorted(
        (later - value) / (moment - at)
        for index, (at, value) in enumerate(points)
        for moment, later in points[index + 1 :]
        if moment > at
    )
    return percentile(slopes, 0.5) if slopes else None


GROWTH_POINTS = 200

_SPREAD = (
    *("gpu_busy", "gpu_memory_bytes", "gpu_power_w"),
    *("cpu_process", "io_wait", "cpu_waiting", "cpu_stolen", "host_memory", "rss_bytes"),
)
_RATES = ("disk_read_bytes", "disk_write_bytes", "network_sent_bytes", "network_received_bytes")


class SystemMetrics:
    """Summary of the samples so far, in bounded memory."""

    def __init__(self) -> None:
        self.count = 0
        self.series = SampleSeries()
        self._spreads = {name: Spread() for name in (*_SPREAD, "gpu_clock_share", "cpu_busy", "cpu_busiest_core")}
        self._throttled = 0
        self._throttle_known = False
        self._reasons: dict[str, None] = {}
        self._threads_max: int | None = None
        self._energy_j: float | None = None
        self._memory_total_bytes: int | None = None
        self._first: dict[str, tuple[float, int]] = {}
        self._last: dict[str, tuple[float, int]] = {}
        self._began = self._ended = 0.0

    @property
    def interval_s(self) -> float | None:
        """Mean time between two samples."""
        return (self._ended - self._began) / (self.count - 1) if self.count > 1 else None

    def add(self, sample: SystemSample, now: float) -> None:
        """Add one sample.

        Args:
            sample: The sample.
            now: When it was taken, by a monotonic clock.
        """
        if not self.count:
            self._began = now
        self._ended = now
        self.count += 1
        self.series.add(sample)
        for name in _SPREAD:
            value = getattr(sample, name)
            if value is not None:
                self._spreads[name].add(value)
        if sample.gpu_clock_mhz is not None and sample.gpu_clock_max_mhz:
            self._spreads["gpu_clock_share"].add(sample.gpu_clock_mhz / sample.gpu_clock_max_mhz)
        if sample.cpu_cores:
            self._spreads["cpu_busy"].add(sum(sample.cpu_cores) / len(sample.cpu_cores))
            self._spreads["cpu_busiest_core"].add(max(sample.cpu_cores))
        self._throttle_known = self._throttle_known or sample.gpu_clock_mhz is not None
        self._throttled += bool(sample.throttle_reasons)
        self._reasons.update(dict.fromkeys(sample.throttle_reasons))
        if sample.threads is not None:
            self._threads_max = max(self._threads_max or 0, sample.threads)
        self._energy_j = sample.gpu_energy_j if sample.gpu_energy_j is not None else self._energy_j
        self._memory_total_bytes = sample.gpu_memory_total_bytes or self._memory_total_bytes
        for name in _RATES:
            value = getattr(sample, name)
            if value is not None:
                self._first.setdefault(name, (now, value))
                self._last[name] = (now, value)

    def summary(self) -> SystemSummary | None:
        """Return the summary so far; None before the first sample."""
        if not self.count:
            return None
        points = self.series.points()
        computed: dict[str, Any] = {f"{name}_per_s": self._rate(name) for name in _RATES}
        computed |= {name: spread.statistics() for name, spread in self._spreads.items()}
        return SystemSummary(
            samples=self.count,
            interval_s=self.interval_s,
            gpu_memory_total_bytes=self._memory_total_bytes,
            gpu_energy_j=self._energy_j,
            throttled_share=self._throttled / self.count if self._throttle_known else None,
            throttle_reasons=list(self._reasons),
            rss_growth_bytes_per_s=_growth(points, "rss_grown_bytes", "rss_bytes"),
            gpu_memory_growth_bytes_per_s=_growth(points, "gpu_memory_bytes"),
            threads_max=self._threads_max,
            **computed,
        )

    def _rate(self, name: str) -> float | None:
        if name not in self._first:
            return None
        (began, first), (ended, last) = self._first[name], self._last[name]
        return (last - first) / (ended - began) if ended > began else None


def _growth(points: list[SystemSample], *names: str) -> float | None:
    """Growth of the first metric with values in the second half of the run; growth during start-up is not a leak."""
    for name in names:
        known = [(point.time, float(value)) for point in points if (value := getattr(point, name)) is not None]
        if known:
            return robust_slope(known[len(known) // 2 :], most_points=GROWTH_POINTS)
    return None
