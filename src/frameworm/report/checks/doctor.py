"""What doctor found, as plain text: under each heading problems come first, with remedies and reasons."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from frameworm.records.machine import Check, ChecklistItem, KnownGain, MachineFacts
from frameworm.report.kit.layout import heading
from frameworm.report.kit.tables import plain

_NARROWEST = 60
_WIDTH = 80
_WIDEST_NAME = 20  # longer names, such as those of variables, shift the rest of their line
_MARKS = {"ok": "ok", "advice": "advice", "problem": "PROBLEM", "unknown": "unknown"}
_STATES = ("not done", "done", "does not apply")


def render_doctor(
    facts: MachineFacts,
    checks: Sequence[Check],
    items: Sequence[ChecklistItem] | None = None,
    subject: str = "",
    notes: Sequence[str] = (),
    width: int = 80,
) -> str:
    """Lines of at most `width` characters (never under 60), without terminal codes.

    Args:
        facts: The machine.
        checks: The results of the checks.
        items: The checklist; None: no config was given.
        subject: What the checklist is about.
        notes: Further remarks.
        width: Width of the terminal.
    """
    width = max(width, _NARROWEST)
    lines = heading(f"doctor · {_machine(facts)}", width)
    names = min(max((len(check.name) for check in checks), default=0), _WIDEST_NAME)
    for group in dict.fromkeys(check.group for check in checks):
        lines += ["", group]
        for check in checks:
            if check.group == group:
                lines += _check(check, names, width)
    if items is not None:
        lines += ["", *_checklist(items, subject, width)]
    lines += _notes(notes, width)
    lines += ["", *textwrap.wrap(_result(checks, items), width)]
    return "\n".join(lines) + "\n"


def render_checklist(data: Mapping[str, Any]) -> str:
    """The checklist of `print_optimization_checklist`; `data` is its return value."""
    items = [
        ChecklistItem(**{**item, "gain": None if item["gain"] is None else KnownGain(**item["gain"])})
        for item in data["items"]
    ]
    lines = _checklist(items, data["subject"], _WIDTH, in_python=data["in_python"])
    return "\n".join([*lines, *_notes(data["notes"], _WIDTH)]) + "\n"


def _checklist(items: Sequence[ChecklistItem], subject: str, width: int, *, in_python: bool = False) -> list[str]:
    lines = heading(f"checklist · {plain(subject)}", width)
    for state in _STATES:
        lines += _items([item for item in items if item.state == state], state, width, in_python)
    return lines


def _notes(notes: Sequence[str], width: int) -> list[str]:
    wrapped = (textwrap.wrap(f"note: {plain(note)}", width, subsequent_indent="      ") for note in notes)
    return [line for lines in wrapped for line in ("", *lines)]


def _machine(facts: MachineFacts) -> str:
    gpus = f"{len(facts.gpus)} x {facts.gpus[0].name}" if facts.gpus else "no GPU"
    parts = [gpus, f"{facts.cpus_usable or 'unknown'} cores", f"torch {facts.torch_version or 'unknown'}"]
    return plain(" · ".join(parts))


def _check(check: Check, names: int, width: int) -> list[str]:
    left = f"  {_MARKS[check.verdict]:<7}  {plain(check.name):<{names}}  "
    indent = " " * (2 + 7 + 2 + names + 2)
    lines = _wrapped(left, check.found, width, indent=len(indent))
    if check.verdict in ("advice", "problem") or check.remedy:
        lines += _wrapped(f"{indent}do:  ", check.remedy, width) if check.remedy else []
        lines += _wrapped(f"{indent}why: ", check.why, width) if check.why else []
    return lines


def _items(items: Sequence[ChecklistItem], state: str, width: int, in_python: bool) -> list[str]:
    if not items:
        return []
    lines = ["", f"{state} ({len(items)})"]
    if state != "not done":
        names = max(len(item.name) for item in items)
        if names > width // 2:
            names = width // 2
        return lines + [line for item in items for line in _wrapped(f"  {item.name:<{names}}  ", item.reason, width)]
    for item in items:
        lines += _wrapped(f"  {item.name}: ", item.reason, width, indent=6)
        if item.settings:
            how = _keyword if in_python else "--set {}".format
            lines += _wrapped("      set   ", " ".join(how(text) for text in item.settings), width)
        if item.gain is not None:
            lines += _wrapped("      gain  ", _gain(item.gain), width)
        if item.finding:
            lines.append(f"      see   docs/findings.md#{item.finding}")
    return lines


def _keyword(setting: str) -> str:
    """A setting written as a keyword argument in Python."""
    key, _, text = setting.partition("=")
    section, _, name = key.partition(".")
    value = {"true": "True", "false": "False", "off": '"off"'}.get(text)
    if value is None:
        value = text if text.replace(".", "", 1).isdigit() else f'"{text}"'
    taker = "OptimizedDataLoader.create" if section == "data" else "Trainer"
    return f"{taker}(..., {name}={value})"


def _gain(gain: KnownGain) -> str:
    if gain.basis == "unknown":
        return gain.text
    return f"{gain.text} ({gain.basis}: {gain.source})"


def _result(checks: Sequence[Check], items: Sequence[ChecklistItem] | None) -> str:
    count = Counter(check.verdict for check in checks)
    parts = [_number(count["problem"], "problem", "problems"), f"{count['advice']} with advice", f"{count['ok']} ok"]
    if count["unknown"]:
        parts.append(f"{count['unknown']} unknown")
    text = f"{len(checks)} checks: {', '.join(parts)}"
    if items is not None:
        states = Counter(item.state for item in items)
        text += "; checklist: " + ", ".join(
            f"{states[state]} {'do not apply' if state == 'does not apply' and states[state] != 1 else state}"
            for state in ("done", "not done", "does not apply")
        )
    return text


def _number(count: int, one: str, many: str) -> str:
    return f"{count or 'no'} {one if count == 1 else many}"


def _wrapped(left: str, text: str, width: int, indent: int | None = None) -> list[str]:
    after = " " * (len(left) if indent is None else indent)
    pieces = textwrap.wrap(
        plain(text),
        width,
        initial_indent=left,
        subsequent_indent=after,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [piece.rstrip() for piece in pieces] or [left.rstrip()]
