"""A trace summary on one screen of plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from frameworm.records.trace import WAIT_CAUSES, DeviceTime, OperatorTime, TraceSummary
from frameworm.report.kit import tables
from frameworm.report.run.text import bar

SHOWN = 5
_LABEL_WIDTH = 12
_NARROWEST = 60
_CAUSE_LABELS = {
    "data_loading": "waits for data loading",
    "synchronisation": "waits after a synchronisation",
    "host": "waits for the host",
    "transfer": "only a transfer runs",
    "communication": "only communication runs",
    "queued": "launched, not begun",
    "unknown": "idle, cause not in the trace",
}
_MATMUL_LABELS = {
    "tensor_core": "tensor cores",
    "tf32": "tensor cores (tf32)",
    "fp32": "fp32 without tensor cores",
    "unknown": "unknown units",
}


def render_trace(summary: TraceSummary, width: int = 80, shown: int = SHOWN) -> str:
    """The trace as lines of at most `width` characters (never under 60), without terminal codes."""
    width = max(width, _NARROWEST)
    lines = _title(summary, width)
    for device in summary.devices:
        lines += ["", *_device(device, width)]
    if summary.devices:
        lines.append("")
    lines += _kernels(summary, width)
    lines += _host(summary, width)
    lines += _steps(summary, width)
    lines += _operators("operators by device time", summary.operators_by_device, _device_cell, width, shown)
    lines += _operators("kernels and copies by time", summary.kernels_by_time, _device_cell, width, shown)
    lines += _operators("operators by host time", summary.operators_by_cpu, _cpu_cell, width, shown)
    lines += _operators("operators by memory allocated", summary.operators_by_memory, _memory_cell, width, shown)
    lines += _operators("ranges by time", summary.ranges, _range_cell, width, shown)
    if summary.notes:
        lines.append("")
    for note in summary.notes:
        lines += _field("note", tables.plain(note), width)
    return "\n".join(lines) + "\n"


def _title(summary: TraceSummary, width: int) -> list[str]:
    parts = ["trace", tables.seconds(summary.wall_s)]
    if summary.steps:
        parts.append(f"{len(summary.steps)} steps")
    parts.append(f"{summary.events:,} events")
    if summary.rank is not None:
        parts.append(f"rank {summary.rank} of {tables.UNKNOWN if summary.world_size is None else summary.world_size}")
    title = " · ".join(parts)
    return [title, "─" * min(width, len(title)), f"{'file':<{_LABEL_WIDTH}}{tables.plain(summary.source)}"]


def _device(device: DeviceTime, width: int) -> list[str]:
    name = f"device {device.device}" + (f" ({tables.plain(device.name)})" if device.name else "")
    rows = [("computes", device.compute_s)]
    rows += [(_CAUSE_LABELS[cause], device.waits_s.get(cause, 0.0)) for cause in WAIT_CAUSES]
    rows = [row for row in rows if row[1] > 0]
    busy = device.busy_s / device.wall_s if device.wall_s else None
    kinds = [(f"  {kind.replace('_', ' ')}", time_s) for kind, time_s in device.kernels_s.items() if time_s > 0]
    rows[1:1] = kinds if rows and rows[0][0] == "computes" else []
    lines = [f"{name}: busy {tables.share(busy)} of the time, {device.streams} stream{'s' * (device.streams != 1)}"]
    label_width = max((len(label) for label, _ in rows), default=0)
    bar_width = max(4, width - label_width - 24)
    for label, time_s in rows:
        part = time_s / device.wall_s if device.wall_s else 0.0
        text = f"  {label:<{label_width}}  {tables.seconds(time_s):>9}  {tables.share(part):>6} {bar(part, bar_width)}"
        lines.append(text.rstrip())
    hidden = device.communication_hidden_share
    if hidden is not None:
        text = f"{tables.seconds(device.communication_s)}, {tables.share(hidden)} of it hidden behind compute"
        lines += _field("network", text, width)
    return lines


def _kernels(summary: TraceSummary, width: int) -> list[str]:
    lines: list[str] = []
    kernels, launches = summary.kernels, summary.launches
    if kernels is not None:
        text = (
            f"{kernels.count:,}, mean {tables.seconds(kernels.mean_s)}, median {tables.seconds(kernels.median_s)}, "
            f"{tables.share(kernels.tiny_count / kernels.count)} shorter than a launch takes"
        )
        lines += _field("kernels", text, width)
        total = sum(kernels.matmul_s.values())
        if total:
            parts = (
                f"{tables.share(time_s / total)} {_MATMUL_LABELS.get(kind, kind)}"
                for kind, time_s in sorted(kernels.matmul_s.items(), key=lambda item: -item[1])
            )
            lines += _field("matrices", f"{tables.seconds(total)}, by kernel names: {', '.join(parts)}", width)
    if launches is not None:
        text = (
            f"{launches.count:,} calls of {tables.seconds(launches.call_mean_s)}, begun after "
            f"{tables.seconds(launches.lag_median_s)} (median), queue {tables.number(launches.queue_mean, 3)} deep, "
            f"empty {tables.share(launches.queue_empty_share)} of the time"
        )
        lines += _field("launches", text, width)
    for copy in summary.copies:
        kinds = f" {tables.plain(copy.source)} to {tables.plain(copy.target)}" if copy.source else ""
        text = f"{tables.plain(copy.direction)}{kinds}: {copy.count:,} in {tables.seconds(copy.time_s)}"
        if copy.bytes:
            text += f", {tables.data_size(copy.bytes)}"
            if copy.time_s:
                text += f" at {tables.number(copy.bytes / copy.time_s / 1e9, 3)} GB/s"
        lines += _field("copies" if copy is summary.copies[0] else "", text, width)
    if summary.peak_device_bytes:
        lines += _field("memory", f"device peak {tables.data_size(summary.peak_device_bytes)} allocated", width)
    return lines


def _host(summary: TraceSummary, width: int) -> list[str]:
    host = summary.host
    parts = [f"in operators {tables.seconds(host.operators_s)}"]
    if host.data_loading_s:
        parts.append(f"in the data loader {tables.seconds(host.data_loading_s)}")
    if host.synchronisation_s:
        parts.append(f"waiting for the device {tables.seconds(host.synchronisation_s)}")
    if host.communication_s:
        exposed = tables.seconds(host.communication_exposed_s)
        parts.append(f"collectives {tables.seconds(host.communication_s)}, {exposed} of it while no operator ran")
    lines = _field("host", ", ".join(parts), width)
    if len(summary.threads) > 1:
        text = ", ".join(f"{tables.plain(item.name)} {tables.seconds(item.busy_s)}" for item in summary.threads[:4])
        lines += _field("threads", f"{len(summary.threads)}: {text}", width)
    return lines


def _steps(summary: TraceSummary, width: int) -> list[str]:
    if not summary.steps:
        return []
    walls = sorted(step.wall_s for step in summary.steps)
    text = f"median {tables.seconds(walls[len(walls) // 2])}, slowest {tables.seconds(walls[-1])}"
    kernels = [step.kernels for step in summary.steps if step.kernels is not None]
    if kernels:
        text += f", {sum(kernels) / len(kernels):,.0f} kernels each"
    return _field("steps", text, width)


def _operators(
    title: str, items: Sequence[OperatorTime], cell: Callable[[OperatorTime], str], width: int, most: int
) -> list[str]:
    if not items:
        return []
    shown = [(cell(item), f"{item.count:,} x", tables.plain(item.name)) for item in items[:most]]
    cell_width, count_width = (max(len(row[column]) for row in shown) for column in (0, 1))
    lines = ["", title]
    for value, count, name in shown:
        text = f"  {value:>{cell_width}}  {count:>{count_width}}  {name}"
        lines.append(text if len(text) <= width else text[: width - 3] + "...")
    return lines


def _device_cell(item: OperatorTime) -> str:
    return tables.seconds(item.device_s)


def _cpu_cell(item: OperatorTime) -> str:
    return tables.seconds(item.self_cpu_s)


def _memory_cell(item: OperatorTime) -> str:
    return tables.data_size(item.allocated_bytes)


def _range_cell(item: OperatorTime) -> str:
    return tables.seconds(item.total_s)


def _field(label: str, text: str, width: int) -> list[str]:
    pieces = textwrap.wrap(text, width - _LABEL_WIDTH, break_on_hyphens=False) or [""]
    return [f"{label if index == 0 else '':<{_LABEL_WIDTH}}{piece}".rstrip() for index, piece in enumerate(pieces)]
