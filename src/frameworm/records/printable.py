"""Text for people: results in a few lines, and text from files made safe for a terminal and for a spreadsheet."""

from __future__ import annotations

import html
import re
from abc import ABC, abstractmethod
from typing import Any

_KEPT = "\n\t"  # kept although not printable
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:inf|nan)")


def printable(text: object) -> str:
    r"""Escape what could steer a terminal (escape codes, backspaces, bidirectional marks), for instance as \u001b.

    Line breaks and tabs stay. JSON stays valid, because there such an escape means the same character.
    """
    words = str(text)
    if words.isprintable():
        return words
    return "".join(letter if letter.isprintable() or letter in _KEPT else _escaped(letter) for letter in words)


def csv_cell(value: object) -> object:
    """Escape a cell that a spreadsheet would take for a formula; numbers stay as they are."""
    if isinstance(value, str) and value.startswith(_FORMULA) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value


def _escaped(letter: str) -> str:
    code = ord(letter)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class Shown(ABC):
    """A result with a short repr instead of everything that it holds."""

    __slots__ = ()

    @abstractmethod
    def in_words(self) -> list[str]:
        """The lines to show; the first says most."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON-ready data: what the verb of the command line prints with `--json`."""

    def __repr__(self) -> str:
        return printable("\n".join(self.in_words()))

    def _repr_html_(self) -> str:
        """Called by notebooks."""
        first, *others = (html.escape(printable(line)) for line in self.in_words())
        return "<br>".join([f"<b>{first}</b>", *others])


def number(value: float | None, form: str, unit: str = "") -> str:
    """A formatted number. A stored record holds null, read as None, where a value was not finite or is unknown."""
    return "unknown" if value is None else format(value, form) + unit


def speedup_in_words(value: float | None, low: float | None, high: float | None) -> str:
    """A speed-up with its interval."""
    return f"{number(value, '.2f', 'x')} as fast ({number(low, '.2f')} to {number(high, '.2f')})"
