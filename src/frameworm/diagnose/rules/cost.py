"""What a cost is worth saying: severity, expected gain, and the finding made of both.

A share of the step counts by what removing it would gain, and only as far as it stands out of its own noise: the lower
end of its 95% interval decides.

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
# An estimate that spans more than this factor, or may be nothing, is no figure to print.
WIDEST, LEAST_GAIN = 4.0, 1.05


def severity_of(share: Estimate) -> str | None:
    """How much a share of the step matters; None when it does not stand out."""
    return next((name for name, least in SHARES.items() if share.low > least), None)


def undecided(share: Estimate) -> bool:
    """Whether a cost may be worth a warning or nothing at all: only more steps can tell."""
    return share.value > SHARES["warning"] and share.low <= SHARES["info"]


def expected_speedup(share: Estimate, removable: float = 1.0) -> ExpectedSpeedup | None:
    """Amdahl's law on a share of the step; None where that is too uncertain for a figure.

    Args:
        share: What the cause costs.
        removable: How much of it the remedy takes away at best.

    Returns:
        `value` when all that is removable goes, `low` when half of the lower bound does, `high` when all of the upper
        bound does.
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
    """The finding of a cause that costs a share of the step, or None when that does not stand out.

    Args:
        evidence: Figures beside the share; unknown ones are left out.
        removable: How much of the share the remedies take away at best.
        most: The highest severity that the evidence supports.
    """
    if share is None:
        return None
    severity = severity_of(share)
    if severity is None:
        return None
    severity = min(severity, most, key=SEVERITIES.index)
    shown = {name: value for name, value in evidence.items() if value is not None}
    # A cost that is not worth a warning is not worth a change either.
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
