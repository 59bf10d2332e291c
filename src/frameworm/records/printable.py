"""Words from files and folders, made harmless where they leave the program: for a terminal and for a spreadsheet."""

from __future__ import annotations

import re

_KEPT = "\n\t"  # beside what can be printed
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:inf|nan)")


def printable(text: object) -> str:
    r"""Text for a terminal: what could steer it (escapes, backspaces, marks that turn the direction) becomes \u001b.

    Line breaks and tabs stay, and so does JSON, in which such an escape means the same character.
    """
    words = str(text)
    if words.isprintable():
        return words
    return "".join(letter if letter.isprintable() or letter in _KEPT else _escaped(letter) for letter in words)


def csv_cell(value: object) -> object:
    """A cell that no spreadsheet takes for a formula; numbers stay as they are."""
    if isinstance(value, str) and value.startswith(_FORMULA) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value


def _escaped(letter: str) -> str:
    code = ord(letter)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
