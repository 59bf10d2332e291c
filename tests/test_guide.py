"""docs/guide.md: what it names exists (test_links.py follows its links)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from frameworm.config.keys import key_tree
from frameworm.config.schema import MODEL_SECTIONS, Config
from frameworm.diagnose.rules.judge import CODES
from test_links import anchors

DOCS = Path(__file__).parents[1] / "docs"
GUIDE = DOCS / "guide.md"
TEXT = GUIDE.read_text(encoding="utf-8")
# What doctor says is written there.
SOURCES = [
    *(DOCS.parent / "src/frameworm/diagnose").rglob("*.py"),
    DOCS.parent / "src/frameworm/engine/memory/fitness.py",
]
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


def advice() -> list[str]:
    """Rows of tables and numbered items, less titles; what doctor checks is a list, not advice."""
    before = TEXT.partition("## What doctor checks")[0]
    rows = [line for line in before.splitlines() if line.startswith("| ")]
    titles = {line for line, below in zip(before.splitlines(), before.splitlines()[1:]) if below.startswith("|---")}
    items = re.findall(r"^\d+\. .*(?:\n   .*)*", before, flags=re.MULTILINE)
    return [row for row in rows if row not in titles] + items


def doctor_names() -> set[str]:
    listed = TEXT.partition("## What doctor checks")[2].partition("The checklist says")[0]
    return set(re.findall(r"`([^`]+)`", "\n".join(line for line in listed.splitlines() if line.startswith("| "))))


def test_it_links_to_many_places() -> None:
    assert len(LINK.findall(TEXT)) > 60


def test_findings_exist_and_all_are_named() -> None:
    named = set(re.findall(r"findings\.md#([\w-]+)", TEXT))
    assert {name for name in named if "-" not in name} == set(CODES)
    for words, code in re.findall(r"\[([a-z]+_[a-z]+)\]\(findings\.md#([^)]+)\)", TEXT):
        assert words == code


def test_pages_that_doctor_names_exist() -> None:
    named = set(re.findall(r"docs/(\w+\.md)#([\w-]+)", SOURCE))
    assert named
    for page, anchor in named:
        assert anchor in anchors(DOCS / page), (page, anchor)


def test_knobs_exist() -> None:
    from frameworm.tune.knobs.registry import all_knobs

    named: set[str] = set()
    for part in re.findall(r"knobs? ((?:`\w+`(?:,\s+)?)+)", TEXT):
        named |= set(re.findall(r"`(\w+)`", part))
    knobs = {knob.name for knob in all_knobs()}
    assert named <= knobs
    assert len(named) > 15


def test_settings_exist() -> None:
    keys = {".".join(map(str, path)) for section in MODEL_SECTIONS.values() for path in key_tree(Config, section)}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    named = {
        name for name in re.findall(r"`([a-z]+\.[a-z_0-9]+)(?::[^`]*)?`", TEXT) if name.partition(".")[0] in sections
    }
    assert len(named) > 20
    assert named - {"loss.detach"} <= keys


def test_checks_of_doctor_exist() -> None:
    for name in doctor_names():
        assert f'"{name}"' in SOURCE, name
    for part in re.findall(r"doctor(?:'s)? ((?:`[^`]+`(?:,\s+)?)+)", TEXT):
        for name in re.findall(r"`([^`]+)`", part):
            assert f'"{name}"' in SOURCE, name


def test_checklist_items_exist() -> None:
    named = re.findall(r"item \*([^*]+)\*", TEXT)
    assert named
    for name in named:
        assert f'"{name}"' in SOURCE, name


@pytest.mark.parametrize("entry", advice(), ids=lambda entry: entry[:40])
def test_each_piece_of_advice_names_what_checks_it(entry: str) -> None:
    checked = LINK.search(entry) or re.search(r"knobs? `|doctor(?:'s)?,? |item \*|`[a-z]+\.[a-z_]+", entry)
    assert checked, entry
