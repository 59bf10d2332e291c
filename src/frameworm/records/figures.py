"""Figures that several records share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Statistics:
    """Spread of one quantity over the steps of a run."""

    mean: float
    std: float
    min: float
    max: float
    p50: float
    p95: float
    p99: float
