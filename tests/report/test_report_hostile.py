"""No page of ours lets a word become markup or asks for anything from elsewhere, whatever the words are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_report_html import Page, make_record, make_series
from tune_samples import stored

import frameworm.report
from frameworm.records.observations import RankSummary
from frameworm.report.run.charts_ranks import rank_bars, rank_chart
from frameworm.report.run.html import render_html
from frameworm.report.tune.page import render_tune

TEMPLATES = sorted((Path(frameworm.report.__file__).parent / "kit" / "templates").iterdir())
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg/onload=alert(1)>",
    "</style><script>alert(1)</script>",
    "{{ 7 * 7 }}{% include '/etc/passwd' %}",
    "javascript:alert(1)",
    "url(https://example.com/x)",
    "\u202e\x00\x1b[31m&lt;b&gt;",
]
OUTSIDE = {"script", "img", "iframe", "object", "embed", "base", "form", "link"}


def check(page: str) -> None:
    found = Page(page)
    assert not {tag for tag, _ in found.tags} & OUTSIDE
    for tag, attributes in found.tags:
        assert not any(name.startswith("on") for name in attributes), tag
        for name in ("src", "href", "xlink:href", "action", "formaction"):
            assert not (attributes.get(name) or "#").strip().lower().startswith(("http", "//", "javascript", "data"))


def worded(value: Any, word: str) -> Any:
    if isinstance(value, str):
        return word
    if isinstance(value, dict):
        return {key: worded(item, word) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [worded(item, word) for item in value]
    return value


@pytest.mark.parametrize("word", HOSTILE)
def test_the_page_of_a_run(word: str) -> None:
    page = render_html(make_record(word), make_series(), f"name: {word}")
    check(page)
    assert ("7 * 7" in page) == ("7 * 7" in word), "a word is no template"


@pytest.mark.parametrize("word", HOSTILE)
def test_the_page_of_several_ranks(word: str) -> None:
    record = make_record(word)
    record.ranks = [RankSummary(rank, 0.02, {word: 0.01, "forward": 0.01}, host=word) for rank in range(2)]
    page = render_html(record, make_series())
    check(page)
    ElementTree.fromstring(rank_chart(rank_bars(record)))


@pytest.mark.parametrize("word", HOSTILE)
def test_the_page_of_a_search(word: str) -> None:
    result = worded(stored(), word)
    result["changes"] = {word: {"before": word, "after": word}}
    result["baseline"]["details"]["phases"][word] = {"mean_s": 1.0, "share": 0.1}
    check(render_tune(result, best=word))


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_templates_load_nothing_and_switch_escaping_off_for_our_own_drawings_only(template: Path) -> None:
    text = template.read_text(encoding="utf-8")
    assert not re.search(r"https?://(?!www\.w3\.org)|@import|<script[^>]*src=|<link|<iframe|autoescape\s+false", text)


def test_pages_are_made_with_escaping() -> None:
    for path in Path(frameworm.report.__file__).parent.rglob("*.py"):
        for made in re.findall(r"Environment\((?:[^()]|\([^()]*\))*\)", path.read_text(encoding="utf-8")):
            assert "autoescape=True" in made or "select_autoescape" in made, f"{path.name}: {made}"
