"""Memory plans as tables of plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from frameworm.report.kit.tables import data_size, plain, share
from frameworm.report.run.text import bar
from frameworm.scaling.memory import MemoryReport
from frameworm.scaling.memory_model import COMPONENTS, MemoryPlan, Setting, capacity

_BAR = 24
_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "weight_copies": "half-precision weights",
    "loss": "logits and loss",
    "communication": "communication",
    "workspace": "workspace",
    "batch": "batch",
    "allocator": "allocator (estimate)",
}
_MOMENTS = {
    "forward_backward": "in forward and backward",
    "optimizer": "in the update",
    "rebuild": "when DDP orders its buckets, after the first step",
    "validation": "in validation",
}
_GIGA = 1e9


def render_savings(num_params: float, world_size: int, savings: Mapping[str, Mapping[str, float]]) -> str:
    """The result of `calculate_zero_savings`: one row per strategy."""
    devices = "1 device" if world_size == 1 else f"{world_size} devices"
    title = f"memory per device · {num_params:,.0f} parameters on {devices} · Adam, without activations"
    rows = [("strategy", "fp32", "saved", "mixed precision", "saved")]
    for name in savings["fp32"]:
        cells = [name]
        for kind in ("fp32", "mixed"):
            cells += [gigabytes(savings[kind][name]), share(1 - savings[kind][name] / savings[kind]["ddp"])]
        rows.append(tuple(cells))  # type: ignore[arg-type]
    lines = [title, "─" * len(title), *_aligned(rows), ""]
    lines.append("fp32: 4 + 4 + 8 bytes per parameter (weight, gradient, Adam). Mixed precision: 2 + 2 + 12.")
    lines.append("As in the ZeRO paper, divided evenly; a real run holds more: frameworm memory --config F --gpus N")
    return "\n".join(lines) + "\n"


def render_memory(report: MemoryReport) -> str:
    """A report on one screen: where the memory goes, what fits, and what to change."""
    plan, setting = report.plan, report.plan.setting
    title = f"memory · {plain(report.name)} · {report.parameters:,} parameters · {_setting_text(setting)}"
    lines = [title, "─" * len(title), *_components(plan), "", _verdict(report)]
    if report.largest is not None:
        lines.append(_largest(report))
    if report.saved_by:
        saved = ", ".join(f"{mode} {share(part)}" for mode, part in report.saved_by.items())
        lines.append(f"activation checkpointing saves: {saved} of the total")
    if report.changes:
        lines += ["", "to make it fit, cheapest first"]
        for number, change in enumerate(report.changes, 1):
            lines.append(f"  {number}. {change.words}: {data_size(change.plan.total)}")
            lines += textwrap.wrap(change.cost, 100, initial_indent="     ", subsequent_indent="     ")
            lines.append("     " + " ".join(f"--set {item}" for item in change.overrides))
    elif report.fits is False:
        lines.append("no micro-batch, checkpointing or strategy makes it fit: use more or larger devices")
    if len(report.strategies) > 1:
        lines += ["", f"the same micro-batch on {setting.world_size} devices, per device", *_strategies(report)]
    lines += ["", *_notes(report)]
    return "\n".join(lines).rstrip() + "\n"


def _components(plan: MemoryPlan) -> list[str]:
    rows = [(_LABELS[name], getattr(plan, name)) for name in (*COMPONENTS, "allocator")]
    rows = [(label, size) for label, size in rows if size]
    width = max(len(label) for label, _ in rows)
    lines = [
        f"  {label:<{width}}  {data_size(size):>10}  {share(part):>6} {bar(part, _BAR)}".rstrip()
        for label, size, part in ((label, size, size / plan.total) for label, size in rows)
    ]
    moment = _MOMENTS[plan.moment]
    total = f"  {'total per device':<{width}}  {data_size(plan.total):>10}          at its most {moment}"
    return [*lines, total]


def _verdict(report: MemoryReport) -> str:
    if report.memory_bytes is None:
        return "no GPU is here to compare with: give --memory 80GB to see what fits"
    usable = capacity(report.memory_bytes, report.memory_fraction, report.plan.setting.device)
    of = f"{data_size(usable)} that training may use of {plain(report.device_name or 'the device')}"
    if report.device_name is None or report.plan.setting.device == "cuda":
        of += f" ({data_size(report.memory_bytes)}"
        of += f" x memory_fraction {report.memory_fraction:g})" if report.memory_fraction < 1 else ")"
    return f"{'fits' if report.fits else 'does not fit'}: {data_size(report.plan.total)} in {of}"


def _largest(report: MemoryReport) -> str:
    found = ", ".join(f"{size or 'none'} with checkpointing {mode}" for mode, size in report.largest_by.items())
    if len(report.largest_by) == 1:
        found = str(report.largest or "none")
    return f"largest micro-batch: {found} (a sample adds {data_size(report.per_sample_bytes)})"


def _strategies(report: MemoryReport) -> list[str]:
    names = [name for name in COMPONENTS if any(getattr(plan, name) for plan in report.strategies)]
    rows: list[tuple[str, ...]] = [("", *(plan.setting.strategy for plan in report.strategies))]
    for name in names:
        rows.append((_LABELS[name], *(data_size(getattr(plan, name)) for plan in report.strategies)))
    rows.append(("total", *(data_size(plan.total) for plan in report.strategies)))
    if report.memory_bytes is not None:
        memory, fraction = report.memory_bytes, report.memory_fraction
        rows.append(("fits", *("yes" if plan.fits(memory, fraction) else "no" for plan in report.strategies)))
    return _aligned(rows)


def _notes(report: MemoryReport) -> list[str]:
    notes = list(report.notes)
    if report.plan.context:
        notes.append(f"besides torch's memory, the driver and libraries take about {data_size(report.plan.context)}")
    return [line for note in notes for line in textwrap.wrap(f"note: {note}", 110, subsequent_indent="      ")]


def _setting_text(setting: Setting) -> str:
    precision = {"off": "fp32"}.get(setting.precision, setting.precision)
    words = [f"micro-batch {setting.micro_batch}", f"{setting.strategy} x {setting.world_size}", precision]
    if setting.world_size == 1:
        words[1] = setting.strategy
    if setting.accumulation > 1:
        words[0] += f" x accumulation {setting.accumulation}"
    if setting.checkpointing != "off":
        words.append(f"checkpointing {setting.checkpointing}")
    return " · ".join(words)


def gigabytes(size_bytes: float) -> str:
    """In powers of ten, as model sizes are usually given."""
    if size_bytes < 0.01 * _GIGA:
        return f"{size_bytes / 1e6:,.3f} MB"
    return f"{size_bytes / _GIGA:,.4f}".rstrip("0").rstrip(".") + " GB"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
