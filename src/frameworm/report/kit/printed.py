"""Plain data that prints as people read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Printed(dict[str, Any]):
    """A dict of results: `print(result)` shows it as text, everything else sees the data.

    Args:
        data: The data.
        render: From the data to its text; a function at the top of a module, so that results can be pickled.
    """

    def __init__(self, data: Mapping[str, Any], render: Callable[[Mapping[str, Any]], str]) -> None:
        super().__init__(data)
        self._render = render

    def __str__(self) -> str:
        return self._render(self).rstrip("\n")

    def print_summary(self) -> None:
        """Print it as text."""
        print(self)
