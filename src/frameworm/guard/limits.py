"""The limits of a guard."""

from __future__ import annotations

import math
from dataclasses import dataclass

from frameworm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest accepted degradations; None leaves a metric unguarded."""

    regression: float | None = 0.05  # of the time per step
    memory: float | None = 0.10
    accuracy_drop: float | None = 0.01  # in points of accuracy: 0.01 lets 90% become 89%
    loss_increase: float | None = 0.10
    mfu_drop: float | None = None  # relative: 0.05 lets 40% become 38%


def parse_limit(text: str | float | None, name: str) -> float | None:
    """Parse a limit as people write it: `5%`, `0.05`, or `off`.

    Args:
        text: The value.
        name: Name of the option, for the error.

    Raises:
        ConfigError: It is none of these, or not a fraction from 0 to 10.
    """
    if text is None or (isinstance(text, str) and text.strip().lower() in ("off", "none")):
        return None
    try:
        if isinstance(text, str) and text.strip().endswith("%"):
            value = float(text.strip()[:-1]) / 100
        else:
            value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 10:
        raise ConfigError(f"{name} takes a share such as 5% or 0.05, or off; not {str(text)[:40]!r}")
    if not isinstance(text, str) or "%" not in text:
        _refuse_bare_percent(value, text, name)
    return value


def _refuse_bare_percent(value: float, text: object, name: str) -> None:
    """Refuse numbers such as `5`, which more often mean 5% than five times as slow."""
    if value >= 1:
        raise ConfigError(
            f"{name} {text} would let {value * 100:.0f}% pass; write {text}% if that is meant, or a share"
        )
