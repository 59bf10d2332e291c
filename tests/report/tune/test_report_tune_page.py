"""The page of a search: what it says, and what a real browser draws of it."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest
from test_report_browser import EVIL, POLICY, brightness, in_browser, measure, open_page
from tune_samples import FACTORS, stored

from frameworm.report.tune.page import render_tune
from frameworm.report.tune.text import waterfall

SECTIONS = ["command", "waterfall", "changes", "learning", "phases", "rejected", "failed", "skipped"]


def evil() -> dict[str, Any]:
    """Every text of a search replaced by one that would run."""

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replaced(item) for key, item in value.items()}
        if isinstance(value, list):
            return [replaced(item) for item in value]
        return EVIL if isinstance(value, str) else value

    found: dict[str, Any] = replaced(stored())
    found["changes"] = {EVIL: {"before": EVIL, "after": EVIL}}
    found["baseline"]["details"]["phases"][EVIL] = {"mean_s": 1.0, "share": 0.1}
    return found


def long_names() -> dict[str, Any]:
    result = stored()
    for item in (*result["accepted"], *result["attempts"]):
        item["changes"] = {f"training.{'very_long_setting' * 4}": "value" * 12}
        item["label"] = "training." + "very_long_setting" * 8
    return result


def older() -> dict[str, Any]:
    """A search whose proofs compared loss curves, as earlier versions stored them."""
    result = stored()
    losses = [2.0 - 0.1 * step for step in range(10)]
    curves = {"losses_before": losses, "losses_after": losses, "allowed_drift": [0.01] * 10}
    for proof in (result["total"], *(item["proof"] for item in result["attempts"])):
        if proof:
            for name in ("outputs", "change", "compared"):
                proof.pop(name, None)
            proof |= curves
    return result


def test_every_reason_is_on_the_page() -> None:
    result = stored()
    page = render_tune(result, best="runs/tuned/best.yaml")
    for item in result["attempts"]:
        if item["status"] != "accepted":
            assert html.escape(item["reason"]).replace("&#x27;", "&#39;") in page
    assert "frameworm train --config runs/tuned/best.yaml" in page
    assert "src=" not in page
    assert "href=" not in page


def checked() -> dict[str, Any]:
    """A search whose first change was checked for longer."""
    result = stored()
    ends = [{"start_loss": 1.4, "loss": 0.5 + 0.01 * seed, "accuracy": 0.8, "samples": 6400} for seed in range(4)]
    result["accepted"][0] |= {"mathematics": "more", "checked": {"seeds": 4, "steps": 100}}
    result["total"]["quality"] = {"baseline": ends, "candidate": list(reversed(ends)), "steps": 100}
    return result


def test_longer_trainings_are_shown_seed_by_seed() -> None:
    page = render_tune(checked())
    assert "approximate, learns as well in 4 paired trainings of 100 steps" in page
    assert "<tr><td>1</td><td>0.5</td><td>0.53</td><td>80.0%</td><td>80.0%</td></tr>" in page
    result = checked()
    for side in ("baseline", "candidate"):
        for end in result["total"]["quality"][side]:
            end["accuracy"] = None
    assert "<tr><td>1</td><td>0.5</td><td>0.53</td></tr>" in render_tune(result)
    result["total"]["quality"] = {"baseline": "?", "candidate": [None]}
    assert "Validation at the end" not in render_tune(result)


def test_a_trade_off_is_shown_with_both_figures_and_how_to_switch_it_on() -> None:
    result = stored()
    assert "trade-offs" not in render_tune(result)
    difference = {"worse": 0.017, "low": -0.003, "high": 0.037, "margin": 0.003, "passed": None}
    offer = {
        "label": "data.batching=bucketed",
        "changes": {"data.batching": "bucketed"},
        "before": {"data.batching": "padded"},
        "speedup": {"value": 1.4, "low": 1.3, "high": 1.5, "pairs": 10},
        "loss": difference,
        "accuracy": {"worse": 0.016, "low": 0.004, "high": 0.028, "margin": 0.002, "passed": None},
        "seeds": 8,
        "steps": 100,
        "seeds_needed": 400,
        "same_loss_s": [6.2, 5.1],
        "switch_on": "--set data.batching=bucketed",
    }
    result["trade_offs"] = [offer, {**offer, "label": "b", "same_loss_s": None, "accuracy": None}, "?", {}]
    page, text = render_tune(result), " ".join(waterfall(result).split())
    for told in (
        "1.40x (1.30 to 1.50)",
        "+0.017 (-0.003 to +0.037)",
        "accuracy -1.60 points (-2.80 to -0.40)",
        "it reaches the same validation loss in about 5.10 s instead of 6.20 s",
        "8 paired seeds of 100 steps; about 400 would be needed",
        "--set data.batching=bucketed",
        "data.batching=bucketed instead of padded",
        "it does not reach the same validation loss within twice the samples",
    ):
        assert told in page, told
        assert told in text, told


def test_without_a_gain_there_is_no_command() -> None:
    page = render_tune(stored(1))
    assert "the config stays as it is" in page
    assert "frameworm train" not in page


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    pages = [render_tune(item) for item in (older(), long_names(), stored(1), checked(), stored())]
    frames = [(page, width) for page in pages for width in (1200, 360)]
    return measure(tmp_path_factory.mktemp("tune"), *frames)


@in_browser
def test_nothing_is_cut_off_and_no_page_scrolls_sideways(light: list[dict[str, Any]]) -> None:
    for data in light:
        assert data["page"] <= data["width"]
        assert data["cut"] == []


@in_browser
def test_figures_are_drawn(light: list[dict[str, Any]]) -> None:
    for data in light[:2]:
        assert data["sections"] == SECTIONS
        charts = data["charts"]
        # Before, after, and for each change what is left and what it took.
        assert charts["Time per sample from before to after"]["bars"] == 2 + 2 * len(FACTORS)
        for label in ("all changes together", "model.half_batch=true"):
            assert charts[f"Loss before and after: {label}"]["curves"] == 4
        bars = [charts[f"Phases of the mean step {side}"]["bars"] for side in ("before", "after")]
        assert bars == [5, 5]
    assert set(light[4]["charts"]) == {"Phases of the mean step before"}


@in_browser
def test_dark_where_dark_is_preferred(tmp_path: Path) -> None:
    (dark,) = measure(tmp_path, (render_tune(stored()), 360), dark=True)
    assert brightness(dark["ink"]) > 600 > 150 > brightness(dark["paper"])


@in_browser
def test_the_console_is_silent_whatever_the_words(tmp_path: Path) -> None:
    opened = open_page(render_tune(stored()), tmp_path)
    assert opened.console == []
    assert "</main>" in opened.dom
    opened = open_page(POLICY.sub("", render_tune(evil())), tmp_path)
    assert opened.console == []
    assert "<script" not in opened.dom
    assert "<img" not in opened.dom
