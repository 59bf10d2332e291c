"""The table in the docs: written by a run in which nothing was wrong, with the refusals that are allowed today."""

from __future__ import annotations

import re

from cells import AXES, IMPOSSIBLE, REFUSALS, Cell, cover
from table import DOCUMENT, LEAST_EQUAL, choose, describe, write
from verdicts import EQUAL, REFUSED, WRONG, Verdict


def section(page: str, name: str) -> list[str]:
    """The points of a section."""
    text = page.split(f"## {name}\n", 1)[1].split("\n## ", 1)[0]
    return [line for line in text.splitlines() if line.startswith("- ")]


def counted(page: str) -> tuple[int, int, int]:
    found = re.search(r"\*\*(\d+) equal, (\d+) refused, (\d+) wrong\*\*", page)
    assert found is not None
    equal, refused, wrong = map(int, found.groups())
    return equal, refused, wrong


def test_the_table_says_that_nothing_is_wrong() -> None:
    page = DOCUMENT.read_text(encoding="utf-8")
    equal, refused, wrong = counted(page)
    assert wrong == 0
    assert equal >= LEAST_EQUAL * (equal + refused)
    assert equal + refused >= len(cover(2)[0]), "all pairs were trained"
    for axis, options in AXES.items():
        if axis != "strategy":
            assert sum(line.startswith(f"| {axis} |") for line in page.splitlines()) == len(options), axis


def test_the_table_lists_what_may_be_refused_and_what_is_not_combined() -> None:
    page = DOCUMENT.read_text(encoding="utf-8")
    refused = section(page, "Refused")
    assert [line.rsplit(" (", 1)[0] for line in refused] == [
        f"- {describe(item.rule.options)}: {item.rule.reason}" for item in REFUSALS
    ]
    numbers = [int(re.findall(r"\((\d+) cells\)", line)[0]) for line in refused]
    assert all(numbers), "a refusal that no cell gets is none"
    assert sum(numbers) == counted(page)[1]
    assert section(page, "Not combined") == [f"- {describe(rule.options)}: {rule.reason}." for rule in IMPOSSIBLE]


def test_the_page_counts_every_verdict() -> None:
    cells, sentence = choose(3, 0)
    verdicts = [Verdict(cell, EQUAL) for cell in cells]
    verdicts[0] = Verdict(Cell(strategy="zero3", layer="sparse"), REFUSED, "sparse")
    verdicts[1] = Verdict(Cell(strategy="ddp"), WRONG, "rates are 1.0e-02 off")
    page = write(verdicts, sentence)
    assert counted(page) == (len(cells) - 2, 1, 1)
    assert "rates are 1.0e-02 off" in page
    rows = [line for line in page.splitlines() if line.startswith("| accumulation |")]
    numbers = [int(number) for row in rows for number in re.findall(r"\d+", row.split("|", 3)[3])]
    assert sum(numbers) == len(cells)
