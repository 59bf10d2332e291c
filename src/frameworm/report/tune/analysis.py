"""What the analyzer found, as plain text: every figure with its unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frameworm.records.schema import RunRecord
from frameworm.report.kit.layout import field, heading
from frameworm.report.kit.tables import UNKNOWN, batch_text, number
from frameworm.report.run.text import judgement_lines

WIDTH = 80
SECTIONS = {
    "compute": "compute",
    "communication": "network",
    "data_loading": "loader",
    "memory": "memory",
    "per_epoch": "epoch",
}
UNITS = {
    "time_ms": "ms per step",
    "throughput": "samples/s",
    "bandwidth_gbps": "Gbit/s",
    "param_size_mb": "MiB",
    "wait_ms": "ms per step",
    "num_workers": "processes",
    "tried_workers": "processes",
    "allocated_gb": "GiB",
    "reserved_gb": "GiB",
    "peak_gb": "GiB",
    "total_gb": "GiB",
    "usage_pct": "%",
    "steps": "per epoch",
    "communications": "per epoch",
    "sent_gb": "GiB per rank and epoch",
}
_AS_IN_A_RUN = ("batch", "verdict", "findings", "notes")
_LABELS = {
    "bandwidth_gbps": "bandwidth",
    "param_size_mb": "parameters",
    "num_workers": "workers",
    "tried_workers": "tried",
    "usage_pct": "peak of total",
}


def render_analysis(data: Mapping[str, Any]) -> str:
    """A whole analysis."""
    record = RunRecord.from_dict(
        {"name": "", "status": "", "environment": {}, **{key: data[key] for key in _AS_IN_A_RUN}}
    )
    lines = heading("bottleneck analysis", WIDTH)
    for name, label in SECTIONS.items():
        lines += field(label, _figures(data[name]), WIDTH)
    lines += field("batch", batch_text(record.batch), WIDTH)
    lines += judgement_lines(record, WIDTH)
    tried = data["experiments"]["step_ms"]
    steps = [f"{name} {number(step['value'])} ms" for name, step in tried.items() if step is not None]
    lines += field("tried", ", ".join(step.replace(" ", "\N{NO-BREAK SPACE}") for step in steps), WIDTH)
    for name, why in data["experiments"]["skipped"].items():
        lines += field("not tried", f"{name}: {why}", WIDTH)
    for note in data["notes"]:
        lines += field("note", note, WIDTH)
    return "\n".join(lines) + "\n"


def render_figures(data: Mapping[str, Any]) -> str:
    """One part of an analysis."""
    return _figures(data).replace("\N{NO-BREAK SPACE}", " ")


def _figures(data: Mapping[str, Any]) -> str:
    return "  ".join(_figure(name, value).replace(" ", "\N{NO-BREAK SPACE}") for name, value in data.items())


def _figure(name: str, value: float | None) -> str:
    unit = UNITS[name]
    label = _LABELS.get(name, name.rpartition("_")[0] or name)
    if value is None:
        return f"{label} {UNKNOWN}"
    return f"{label} {number(value)}{'' if unit == '%' else ' '}{unit}"
