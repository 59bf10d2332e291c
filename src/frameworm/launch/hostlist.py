"""SLURM's compact lists of host names, such as `gpu[001-003,7],login`."""

from __future__ import annotations

import re

from frameworm.errors import EnvironmentSetupError

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hostlist(text: str) -> list[str]:
    """Expand a hostlist to all its hosts, in order.

    Args:
        text: For example `n[001-003,7],x9`; several brackets in one name multiply.

    Returns:
        The host names, at least one.

    Raises:
        EnvironmentSetupError: The text is empty or malformed.
    """
    hosts: list[str] = []
    for entry in _split_outside_brackets(text):
        hosts.extend(_expand_entry(entry, text))
    return hosts


def _split_outside_brackets(text: str) -> list[str]:
    """Split at commas outside brackets, which separate hosts; those inside separate numbers."""
    entries, start, depth = [], 0, 0
    for position, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        if depth not in (0, 1):
            raise _malformed(text)
        if character == "," and depth == 0:
            entries.append(text[start:position])
            start = position + 1
    if depth != 0:
        raise _malformed(text)
    entries.append(text[start:])
    return entries


def _expand_entry(entry: str, text: str) -> list[str]:
    """Expand one entry without top-level commas; recursion handles the brackets after the first."""
    if not entry or entry != entry.strip():
        raise _malformed(text)
    prefix, bracket, rest = entry.partition("[")
    if not bracket:
        return [entry]
    inside, _, suffix = rest.partition("]")
    suffixes = _expand_entry(suffix, text) if suffix else [""]
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _malformed(text)
        first, last = match.group(1), match.group(2) or match.group(1)
        if int(last) < int(first):
            raise _malformed(text)
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return [f"{prefix}{number}{suffix}" for number in numbers for suffix in suffixes]


def _malformed(text: str) -> EnvironmentSetupError:
    return EnvironmentSetupError(
        f"the node list {text!r} cannot be read; expected host names like n[001-003,7],x9. "
        "Set MASTER_ADDR to the first node's name if your cluster writes it differently."
    )
