"""Headings, labelled entries and tables of plain text, as all our commands print them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

LABEL_WIDTH = 12

_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]iB|B|h|min|s|ms|us|pp)\b)")


def heading(text: str, width: int) -> list[str]:
    """A title, underlined."""
    lines = textwrap.wrap(text, width) or [""]
    return [*lines, "─" * min(width, max(len(line) for line in lines))]


def field(label: str, text: str, width: int) -> list[str]:
    """A labelled entry with wrapped lines aligned; a number stays on the same line as its unit."""
    text = _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text)
    pieces = textwrap.wrap(text, width - LABEL_WIDTH, break_on_hyphens=False) or [""]
    lines = [f"{label if index == 0 else '':<{LABEL_WIDTH}}{piece}" for index, piece in enumerate(pieces)]
    return [line.replace("\N{NO-BREAK SPACE}", " ").rstrip() for line in lines]


def table(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """A table: first and last column left-aligned, numbers between them right-aligned.

    The first row holds the titles. A last cell that does not fit is wrapped.
    """
    count = len(rows[0])
    widths = [max(len(row[column]) for row in rows) for column in range(count)]
    left = 2 + sum(size + 2 for size in widths[:-1])
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(size) for cell, size in zip(row[1:-1], widths[1:-1]))]
        pieces = textwrap.wrap(row[-1], max(width - left, 12)) or [""]
        lines.append(("  " + "  ".join([*cells, pieces[0]])).rstrip())
        lines += [" " * left + piece for piece in pieces[1:]]
    return lines
