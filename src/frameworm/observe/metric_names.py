"""The names older code gives to the parts of a step, the phases they are, and what the rules make of them."""

from __future__ import annotations

from collections.abc import Mapping

from frameworm.diagnose.rules import apply_judgement, judge
from frameworm.records.schema import PHASES, RunRecord, StepRecord

TOTAL = "total_time"
METRIC_OF_PHASE = {phase: f"{phase}_time" for phase in PHASES} | {
    "data_wait": "data_loading_time",
    "communication_exposed": "communication_time",
}
PHASE_OF_METRIC = {metric: phase for phase, metric in METRIC_OF_PHASE.items()} | {phase: phase for phase in PHASES}


def join_metrics(step: StepRecord) -> dict[str, float]:
    """All times of a step under the names of metrics."""
    phases = {METRIC_OF_PHASE.get(phase, phase): seconds for phase, seconds in step.phases.items()}
    return {**phases, **step.metrics, TOTAL: step.step_s}


def divide_metrics(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """The phases among metrics, and the others; the total is neither."""
    phases: dict[str, float] = {}
    others: dict[str, float] = {}
    for name, seconds in metrics.items():
        phase = PHASE_OF_METRIC.get(name)
        if phase is not None:
            phases[phase] = phases.get(phase, 0.0) + seconds
        elif name != TOTAL:
            others[name] = seconds
    return phases, others


def judged(record: RunRecord) -> RunRecord:
    """The record with verdict and findings."""
    apply_judgement(record, judge(record))
    return record
