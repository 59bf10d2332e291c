"""Reads numbers from environment variables, with errors for invalid ones."""

from __future__ import annotations

from collections.abc import Mapping

from frameworm.errors import EnvironmentSetupError


def integer(variables: Mapping[str, str], name: str, minimum: int = 0) -> int | None:
    """Return the whole number in a variable; None if it is unset or empty."""
    text = variables.get(name)
    if not text:
        return None
    try:
        value = int(text)
    except ValueError:
        raise EnvironmentSetupError(f"{name}={text} is not a whole number") from None
    if value < minimum:
        raise EnvironmentSetupError(f"{name}={value} must be {minimum} or more")
    return value


def required(variables: Mapping[str, str], name: str, beside: str, minimum: int = 0) -> int:
    """Return the whole number in a variable that must be set because another one is."""
    value = integer(variables, name, minimum)
    if value is None:
        raise EnvironmentSetupError(f"{name} is not set, but {beside} is: set both or neither")
    return value


def check_below(low: str, low_value: int, high: str, high_value: int) -> None:
    """Check that a rank is below the number of ranks."""
    if low_value >= high_value:
        raise EnvironmentSetupError(f"{low}={low_value} must be below {high}={high_value}; ranks count from 0")
