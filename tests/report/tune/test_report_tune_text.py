from __future__ import annotations

import random
from typing import Any

import pytest
from tune_samples import FACTORS, stored

from frameworm.report.tune import tables as tune_tables
from frameworm.report.tune.page import render_tune
from frameworm.report.tune.text import attempts_table, waterfall

JUNK: tuple[Any, ...] = (None, "word", 3, -1.5, float("nan"), float("inf"), [], {}, [None], {"value": 0}, True)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there are values, all the way down."""
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = list(enumerate(value))[:3]
    found = [path] if path else []
    for key, item in inner:
        found += places(item, (*path, key))
    return found


def put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


def test_the_waterfall_goes_from_before_over_each_change_to_after() -> None:
    result = stored()
    lines = waterfall(result).splitlines()
    begin = next(index for index, line in enumerate(lines) if line.startswith("  before"))
    rows = lines[begin : begin + len(FACTORS) + 2]
    assert [row.split()[0] for row in rows] == ["before", *(f"model.{name}=true" for name in FACTORS), "after"]
    lengths = [row.count("█") for row in rows]
    assert lengths == sorted(lengths, reverse=True)
    # Four times as fast leaves a quarter of the bar.
    assert lengths[-1] == pytest.approx(lengths[0] * 0.25, abs=1.5)
    gain = tune_tables.gain_of(result["speedup"])
    assert gain is not None
    assert tune_tables.times(gain) in rows[-1]
    assert tune_tables.ends(gain) in rows[-1]


def test_the_whole_run_is_told_with_its_compile_time_and_the_command() -> None:
    text = waterfall(stored(), best="out/best.yaml")
    told = " ".join(text.split())
    assert "of which start-up and compile 1.00 s → 12.0 s" in told
    assert text.rstrip().endswith("frameworm train --config out/best.yaml")


def test_break_even_memory_and_what_a_longer_budget_would_try_are_told() -> None:
    result = {**stored(), "pays_after_steps": 1234}
    for name, peak_bytes in (("baseline", 2 * 2**30), ("final", 3 * 2**30)):
        result[name] = {**result[name], "details": {"peak_bytes": peak_bytes}}
    skipped = {"label": "gpu.compile_scope=model", "status": "skipped", "reason": "the budget of 170 s is spent"}
    result["attempts"] = [*result["attempts"], skipped]
    told = " ".join(waterfall(result).split())
    assert "pays after 1,234 steps, start-up included" in told
    assert "memory 2.00 GiB → 3.00 GiB" in told
    assert "not tried a longer budget would try gpu.compile_scope=model" in told
    page = render_tune(result)
    assert "after 1,234 steps, start-up included" in page
    assert "not tried" not in " ".join(waterfall({**result, "attempts": []}).split())


def test_what_is_expected_follows_from_the_proof_and_not_from_trials_minutes_apart() -> None:
    result = stored()
    gain = result["speedup"]["value"]
    before_s = result["run_s_before"] - result["baseline"]["setup_s"]
    assert result["run_s_after"] == pytest.approx(before_s / gain + result["final"]["setup_s"])
    result["final"]["seconds_per_sample"] = [1e-9]
    before, after = (float(text.replace(",", "")) for text in tune_tables.samples_per_s(result))
    assert after / before == pytest.approx(gain, rel=0.01)


def test_without_a_gain_nothing_is_claimed() -> None:
    text = waterfall(stored(1))
    assert "the config stays as it is" in " ".join(text.split())
    assert "frameworm train" not in text
    assert "█" not in text


def test_the_config_that_fails_says_so() -> None:
    text = waterfall({"baseline": {"failure": {"kind": "crash", "reason": "no data"}}})
    assert "the config itself fails: no data" in text


def test_every_attempt_is_listed_with_its_reason() -> None:
    result = stored()
    text = " ".join(attempts_table(result, width=400).split())
    for item in result["attempts"]:
        assert item["status"] in text
        if item["status"] in ("failed", "skipped"):
            assert item["reason"] in text
    assert "out of memory: CUDA out of memory" in text
    assert "skipped needs a GPU" in text


def test_what_was_accepted_when_tried_again_does_not_look_like_a_contradiction() -> None:
    doubted = {"label": "a=1", "status": "inconclusive", "reason": "may be noise"}
    others = [{"label": "b=1", "status": "rejected", "reason": "no gain"}, {"label": "c=1", "status": "skipped"}]
    accepted = {"label": "a=1", "status": "accepted", "reason": "1.05 x"}
    once = {"attempts": [accepted, *others]}
    text = attempts_table({"attempts": [doubted, *others, accepted]}, width=200, without=("accepted", "skipped"))
    rows = [" ".join(line.split()) for line in text.splitlines()[1:]]
    assert rows == ["a=1 inconclusive accepted when tried again; at first may be noise", "b=1 rejected no gain"]
    assert "tried again" not in attempts_table(once)
    assert "tried again" not in attempts_table({"attempts": [accepted, *others, doubted]})


@pytest.mark.parametrize("width", [50, 80, 120])
def test_lines_fit(width: int) -> None:
    result = stored()
    result["attempts"][0]["reason"] = "word " * 200
    result["attempts"][1]["label"] = "x" * 300
    for text in (waterfall(result, width=width), attempts_table(result, width=width)):
        assert max(len(line) for line in text.splitlines()) <= width


@pytest.mark.slow
def test_missing_and_wrong_values_never_stop_a_report() -> None:
    draw = random.Random(0)
    spots = places(stored())
    for _ in range(300):
        result = stored()
        for path in draw.sample(spots, 3):
            try:
                put(result, path, draw.choice(JUNK))
            except (TypeError, KeyError, IndexError):
                continue  # another junk value lies above it
        assert waterfall(result)
        attempts_table(result)
        assert "</html>" in render_tune(result)
    assert waterfall({})
    assert attempts_table({}) == ""
    assert "</html>" in render_tune({})


def test_no_word_steers_a_terminal() -> None:
    result = stored()
    result["name"] = "a\x1b[31mb"
    result["attempts"][0]["label"] = "c\x1b]0;d\x07"
    result["accepted"][0]["changes"] = {"model.\x1b[2J": "\x1b[1m"}
    result["stopped"] = "\x1b[0m"
    assert "\x1b" not in waterfall(result) + attempts_table(result)
    assert "\x07" not in attempts_table(result)
