"""The result of the analyzer as plain text, with a unit for every number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from frameworm.records.schema import RunRecord
from frameworm.report.kit.layout import field, heading
from frameworm.report.kit.tables import UNKNOWN, batch_text, data_size, number, share
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


def render_step(data: Mapping[str, Any]) -> str:
    """The result of `benchmark_training_step`."""
    step, phases = data["step_ms"], data["phases_ms"]
    lines = heading(f"training step · {number(data['samples_per_s'])} samples/s over {data['steps']} steps", WIDTH)
    lines += field("step", _times(step), WIDTH)
    lines += field("phases", _times(phases), WIDTH)
    return "\n".join(lines) + "\n"


def _times(times_ms: Mapping[str, float]) -> str:
    return "  ".join(f"{name}\N{NO-BREAK SPACE}{number(value)}\N{NO-BREAK SPACE}ms" for name, value in times_ms.items())


def render_step_memory(data: Mapping[str, Any]) -> str:
    """The result of `profile_memory_usage`."""
    lines = heading(f"memory of a training step · {data_size(data['step'])}", WIDTH)
    for name in ("parameters", "gradients", "optimizer", "buffers", "activations"):
        lines += field(
            name, f"{data_size(data[name])}  {share(data[name] / data['step'] if data['step'] else 0.0)}", WIDTH
        )
    lines += field("peak", f"{data_size(data['peak'])} of {data_size(data['total'])} ({share(data['usage'])})", WIDTH)
    lines += field("efficiency", f"{share(data['efficiency'])} of the peak is what the step needs", WIDTH)
    if data["checkpointing_saved_pct"] is not None:
        words = f"activation checkpointing saves {share(data['checkpointing_saved_pct'] / 100)} of the activations"
        lines += field("saved", words, WIDTH)
    return "\n".join(lines) + "\n"


def render_effectiveness(data: Mapping[str, Any]) -> str:
    """The result of `measure_optimization_effectiveness`."""
    word = {True: "faster", False: "slower", None: "no clear difference"}[data["effective"]]
    lines = heading(f"before and after · {word}", WIDTH)
    for side in ("before", "after"):
        time_ms, size = data[f"{side}_ms"], data["memory"][f"{side}_bytes"]
        lines += field(side, f"{number(time_ms)} ms per step  {data_size(size)}", WIDTH)
    gain = data["speedup"]
    if gain is not None:
        words = f"{number(gain['value'])}x, with 95% confidence {number(gain['low'])}x to {number(gain['high'])}x"
        lines += field("speedup", words, WIDTH)
    saved = data["memory"]["saved_pct"]
    lines += field("memory", f"{share(abs(saved) / 100)} {'saved' if saved >= 0 else 'more'}", WIDTH)
    return "\n".join(lines) + "\n"


def _figures(data: Mapping[str, Any]) -> str:
    return "  ".join(
        _figure(name, value).replace(" ", "\N{NO-BREAK SPACE}")
        for name, value in data.items()
        if value is not None or name != "tried_workers"
    )


def _figure(name: str, value: float | None) -> str:
    unit = UNITS[name]
    label = _LABELS.get(name, name.rpartition("_")[0] or name)
    if value is None:
        return f"{label} {UNKNOWN}"
    return f"{label} {number(value)}{'' if unit == '%' else ' '}{unit}"
