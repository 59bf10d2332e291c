"""How much a cost matters: its severity, its expected gain, and the finding made of both.

A fraction of the step counts by what removing it would gain, and only as far as it exceeds its own noise: the lower end
of its 95% interval decides.

| severity | removing the cost would gain at least | share of the step |
|---|---|---|
| info     | 1.02x | 2.0% |
| warning  | 1.10x | 9.1% |
| critical | 1.50x | 33.3% |
"""

from __future__ import annotations

from typing import Any

from frameworm.diagnose.rules.accounting import Facts
from frameworm.records.estimate import Estimate, clamp
from frameworm.records.schema import ExpectedSpeedup, Finding, Remedy

SEVERITIES = ("info", "warning", "critical")
GAINS = {"critical": 1.5, "warning": 1.1, "info": 1.02}
SHARES = {name: 1 - 1 / gain for name, gain in GAINS.items()}

_MOST = 0.99  # a step never costs nothing
# If the range spans more than this factor, or the lower end gains less than this, no number is shown.
WIDEST, LEAST_GAIN = 4.0, 1.05


def severity_of(share: Estimate) -> str | None:
    """How much a fraction of the step matters; None if it is not significant."""
    return next((name for name, least in SHARES.items() if share.low > least), None)


def undecided(share: Estimate) -> bool:
    """True if a cost may be worth a warning or nothing at all, which only more steps can decide."""
    return share.value > SHARES["warning"] and share.low <= SHARES["info"]


def expected_speedup(share: Estimate, removable: float = 1.0) -> ExpectedSpeedup | None:
    """Apply Amdahl's law to a fraction of the step; None if it is too uncertain to give a number.

    Args:
        share: What the cause costs.
        removable: Largest fraction of it that the remedy can remove.

    Returns:
        `value` if everything removable goes, `low` if half of that goes at the lower bound, `high` if everything goes
        at the upper bound.
    """
    low = 1 / (1 - min(clamp(share.low) * removable / 2, _MOST))
    high = 1 / (1 - min(clamp(share.high) * removable, _MOST))
    if low < LEAST_GAIN or high > WIDEST * low:
        return None
    return ExpectedSpeedup(1 / (1 - min(clamp(share.value) * removable, _MOST)), low, high, "modelled")


def costed(
    code: str,
    facts: Facts,
    share: Estimate | None,
    evidence: dict[str, Any],
    remedies: list[Remedy],
    *,
    removable: float = 1.0,
    most: str = "critical",
) -> Finding | None:
    """Build the finding for a cause that costs a fraction of the step; None if the cost is not significant.

    Args:
        code: The finding's code.
        facts: The run.
        share: What the cause costs.
        evidence: Metrics shown besides the share; unknown ones are omitted.
        remedies: What to do about it.
        removable: Largest fraction of the cost that the remedies can remove.
        most: The highest severity that the evidence supports.
    """
    if share is None:
        return None
    severity = severity_of(share)
    if severity is None:
        return None
    severity = min(severity, most, key=SEVERITIES.index)
    shown = {name: value for name, value in evidence.items() if value is not None}
    # A cost too small for a warning does not justify a change.
    worth = severity != "info"
    return Finding(
        code=code,
        severity=severity,
        share=clamp(share.value),
        evidence={
            **shown,
            "share_low": clamp(share.low),
            "share_high": clamp(share.high),
            "measured_steps": facts.measured_steps,
        },
        remedies=remedies if worth else [],
        expected_speedup=expected_speedup(share, removable) if worth else None,
    )
