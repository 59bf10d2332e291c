"""A measured network, and the cost of compressing gradients, as tables of plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from frameworm.report.kit.tables import data_size, number, plain, seconds, share
from frameworm.scaling.network import NetworkModel, NetworkPoint, bus_share

_UNKNOWN = "unknown"


def render_network(model: NetworkModel) -> str:
    """For each collective its latency and bandwidth, then every size with its time, spread and bus bandwidth."""
    places = "1 host" if model.hosts == 1 else f"{model.hosts} hosts"
    device = model.environment.get("device")
    title = f"network · {model.world_size} ranks on {places} · {model.backend} · {plain(device or model.device)}"
    lines = [title, "─" * len(title)]
    rows = [("collective", "latency", "bandwidth", "per link")]
    for collective, numbers in model.summary().items():
        latency_us, rate, bus = (numbers[key] for key in ("latency_us", "bandwidth_gbps", "bus_bandwidth_gbps"))
        rows.append((collective, _duration(None if latency_us is None else latency_us * 1e-6), _rate(rate), _rate(bus)))
    lines += _aligned(rows)
    for collective, points in model.points.items():
        lines += ["", collective, *_sizes(model, collective, points)]
    lines += ["", "per link: bytes that each link carries in a ring, to compare with what the link is sold as"]
    return "\n".join(lines) + "\n"


def render_compression(data: Mapping[str, Any]) -> str:
    """The result of `benchmark_compression`: one row per size and method."""
    title = f"gradient compression · {plain(data['device'])}"
    rows = [("values", "method", "bytes", "ratio", "time", "error")]
    rows += [
        (
            f"{row['values']:,}",
            plain(row["method"]),
            data_size(row["compressed_bytes"]),
            f"{number(row['ratio'])}x",
            seconds(row["time_ms"] / 1e3),
            share(row["error"]),
        )
        for row in data["rows"]
    ]
    lines = [title, "─" * len(title), *_aligned(rows), ""]
    lines.append("time: compressing and decompressing; error: norm of what one step loses, without error feedback")
    return "\n".join(lines) + "\n"


def _sizes(model: NetworkModel, collective: str, points: Sequence[NetworkPoint]) -> list[str]:
    rows = [("size", "median", "middle half", "per link", "times")]
    share = bus_share(collective, model.world_size)
    for point in points:
        spread = f"{_duration(point.q1_s)} to {_duration(point.q3_s)}"
        bus_gbps = point.size_bytes * share * 8e-9 / point.median_s
        rows.append(
            (_size(point.size_bytes), _duration(point.median_s), spread, _rate(bus_gbps), str(point.repetitions))
        )
    return _aligned(rows)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]


def _size(size_bytes: int) -> str:
    value, units = float(size_bytes), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while value >= 1024 and unit != "GiB":
        value, unit = value / 1024, next(units)
    return f"{value:.4g} {unit}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return _UNKNOWN
    # The limits are where three digits round up to the next unit.
    for limit, scale, unit in ((0.9995e-3, 1e6, "µs"), (0.9995, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * scale:.3g} {unit}"
    return f"{_digits(seconds)} s"


def _rate(gbps: float | None) -> str:
    if gbps is None:
        return _UNKNOWN
    return f"{_digits(gbps)} Gbit/s" if gbps >= 0.9995 else f"{_digits(gbps * 1e3)} Mbit/s"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
