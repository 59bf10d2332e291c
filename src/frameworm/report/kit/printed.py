"""Plain data that prints as a readable text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Printed(dict[str, Any]):
    """A dict of results: `print(result)` shows a readable text, everything else sees the data.

    Args:
        data: The data.
        render: Turns the data into text; a top-level function of a module, so that results can be pickled.
    """

    def __init__(self, data: Mapping[str, Any], render: Callable[[Mapping[str, Any]], str]) -> None:
        super().__init__(data)
        self._render = render

    def __str__(self) -> str:
        return self._render(self).rstrip("\n")

    def print_summary(self) -> None:
        """Print the text."""
        print(self)
