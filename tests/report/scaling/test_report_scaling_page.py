"""The page of a scaling report: the same figures as the tables, offline, and what a real browser draws of it."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
from scaling_runs import store_published, store_run
from test_report_browser import EVIL, POLICY, in_browser, measure, open_page

from frameworm.report.scaling.page import render_scaling_page
from frameworm.report.scaling.report import read_report
from frameworm.report.scaling.table import ScalingReport


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> ScalingReport:
    """Two data sets, one of them with two configurations, and a run that was stopped."""
    root = tmp_path_factory.mktemp("runs")
    store_published(root)
    for size in (1, 2, 4, 8):
        times = [2.0, 1.0 / size**0.9, 1.01 / size**0.9]
        store_run(root / f"wide-{size}", "imdb", size, times, name="imdb_wide", settings={"model": {"d_model": 512}})
    store_run(root / "stopped", "imdb", 2, [1.0, 1.0], status="failed")
    return read_report(root)


def test_the_page_says_what_the_table_says(mixed: ScalingReport) -> None:
    page = render_scaling_page(mixed)
    for table in mixed.datasets:
        for row in table.rows:
            assert row.efficiency is not None
            assert f"{row.efficiency.value:.1%}" in page
            assert row.speedup is not None
            assert f"{row.speedup.value:.2f}" in page
            assert row.status in page
            assert html.escape(row.cause).replace("&#x27;", "&#39;")[1:] in page
    assert "stopped" in page
    assert "its status is failed" in page


def test_dots_tell_their_figures(mixed: ScalingReport) -> None:
    page = render_scaling_page(mixed)
    told = [html.unescape(text) for text in re.findall(r"<circle[^>]*><title>(.*?)</title>", page)]
    assert any(re.match(r"4 GPUs, global batch 32: 0\.46 \[.*\], negative_scaling", text) for text in told)
    assert any(text.startswith("epoch 1, 4 GPUs") and text.endswith("(warm-up)") for text in told)
    dots = sum(4 * len(table.rows) for table in mixed.datasets)  # speedup, efficiency, throughput, and epochs below
    assert len(told) >= dots


@pytest.fixture
def evil(tmp_path: Path) -> str:
    """A page on which every name would run."""
    name = EVIL.replace("/", "")
    for size in (1, 2):
        store_run(tmp_path / f"{size}{name}", EVIL, size, [2.0, 1.0, 1.0], name=EVIL)
    store_run(tmp_path / f"x{name}", EVIL, 2, [1.0], status=EVIL)
    return render_scaling_page(read_report(tmp_path))


def test_nothing_is_fetched_and_every_name_is_text(evil: str) -> None:
    assert POLICY.search(evil)
    assert "&lt;script&gt;" in evil
    assert "<script" not in evil
    assert "<img" not in evil
    tags = re.sub(r"&lt;.*?&gt;", "", evil)
    for way in ("src=", "href=", "url(", "@import", "http://", "https://"):
        assert way not in tags.replace("url(#hatch)", ""), way


@in_browser
def test_names_run_nothing_even_without_the_policy(tmp_path: Path, evil: str) -> None:
    folder = tmp_path / "browser"
    folder.mkdir()
    assert open_page(POLICY.sub("", evil), folder).console == []


def test_a_report_without_any_whole_run(tmp_path: Path) -> None:
    store_run(tmp_path / "one", "imdb", 1, [1.0, 1.0], status="failed")
    page = render_scaling_page(read_report(tmp_path))
    assert "No run below this folder can be compared" in page
    assert "its status is failed" in page


def unticked(page: str, box: str) -> str:
    """The page as it is after a click on a check box."""
    changed = page.replace(f'id="{box}" checked', f'id="{box}"')
    assert changed != page
    return changed


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, mixed: ScalingReport) -> list[dict[str, Any]]:
    page = render_scaling_page(mixed)
    pages = (page, unticked(page, "data-1-series-1"), unticked(page, "data-1-size-8"))
    frames = [(page, 1200), (page, 360), (pages[1], 1200), (pages[2], 1200)]
    return measure(tmp_path_factory.mktemp("page"), *frames)


@in_browser
def test_nothing_is_cut_off_and_no_page_scrolls_sideways(seen: list[dict[str, Any]]) -> None:
    for data in seen:
        assert data["page"] <= data["width"]
        assert data["cut"] == []
        assert data["sections"] == ["data-0", "data-1", "left-out", "reading"]


@in_browser
def test_check_boxes_hide_curves(seen: list[dict[str, Any]]) -> None:
    whole, _, without_wide, without_eight = (data["charts"] for data in seen)
    assert whole["Speedup on IMDB"]["curves"] == 3  # ideal and two configurations
    assert without_wide["Speedup on IMDB"]["curves"] == 2
    assert without_wide["Speedup on AGNews"]["curves"] == whole["Speedup on AGNews"]["curves"] == 2
    assert whole["Time of each epoch on IMDB"]["curves"] == 6
    assert without_wide["Time of each epoch on IMDB"]["curves"] == 2
    assert without_eight["Time of each epoch on IMDB"]["curves"] == 5
    assert without_eight["Speedup on IMDB"]["curves"] == 3
