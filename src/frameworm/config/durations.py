"""Durations as people write them: 90s, 10m, 1h."""

from __future__ import annotations

import re

from frameworm.errors import ConfigError

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Convert a duration such as 90s, 10m or 1.5h to seconds.

    Raises:
        ConfigError: The text is not a duration.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower())
    if match is None or not float(match[1]):
        raise ConfigError(f"--budget {text} is not a time; give one such as 90s, 10m or 1h")
    return float(match[1]) * _UNITS_S[match[2]]
