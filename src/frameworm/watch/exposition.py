"""The table of runs in the Prometheus text format."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from frameworm.watch.catalogue import RUNNING, Row

CONTENT_TYPE = "text/plain; version=0.0.4"
MOST_RUNS = 500  # each has several time series; running ones come first, then the newest

_GAUGES: tuple[tuple[str, str, Callable[[Row], float | None]], ...] = (
    ("frameworm_run_running", "1 while the run writes steps.", lambda row: float(row.status == RUNNING)),
    ("frameworm_run_started_seconds", "When the run began, as Unix time.", lambda row: row.started),
    ("frameworm_run_steps", "Optimizer steps so far.", lambda row: row.steps),
    ("frameworm_run_loss", "Training loss.", lambda row: row.loss),
    ("frameworm_run_samples_per_second", "Samples per second on all ranks.", lambda row: row.samples_per_s),
)


def exposition(rows: Iterable[Row]) -> str:
    """All runs as gauges labelled with the run, and one info series for its texts."""
    chosen = sorted(rows, key=lambda row: row.status != RUNNING)[:MOST_RUNS]
    lines = []
    for name, text, value_of in _GAUGES:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        for row in chosen:
            value = value_of(row)
            if value is not None:
                lines.append(f"{name}{_labels(run=row.name)} {_number(value)}")
    lines += ["# HELP frameworm_run_info Status, model and verdict.", "# TYPE frameworm_run_info gauge"]
    for row in chosen:
        labels = _labels(run=row.name, status=row.status, model=row.model or "", verdict=row.verdict or "")
        lines.append(f"frameworm_run_info{labels} 1")
    return "\n".join(lines) + "\n"


def _labels(**values: str) -> str:
    escaped = (
        f'{name}="' + value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") + '"'
        for name, value in values.items()
    )
    return "{" + ",".join(escaped) + "}"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
