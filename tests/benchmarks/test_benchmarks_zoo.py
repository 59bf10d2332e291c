"""The zoo's table: what failed is told, the best loop is the expert, and groups are averaged over what was measured."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def zoo() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        import zoo

        yield zoo
        for name in ("zoo", "harness"):
            sys.modules.pop(name, None)


EXPERT = """
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if given["--loops"] == "compile":
    sys.exit("no compiler")
print("a warning of a library")
print(json.dumps({"samples_per_s": 20.0 if given["--loops"] == "graphs" else 5.0, "peak_bytes": 100}))
"""


def entry(loops: list[dict[str, Any]], rate: float) -> dict[str, Any]:
    tuned = {"samples_per_s": rate, "peak_bytes": 110}
    return {
        "loops": loops,
        "search": {"wall_s": 60.0, "changes": {"gpu.capture": {"before": "off", "after": "step"}}},
        "tuned": tuned,
    }


def test_a_loop_that_fails_says_why_and_the_best_is_the_expert(
    zoo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "expert.py").write_text(EXPERT, encoding="utf-8")
    loops = zoo.run_loops(tmp_path, "vit", ["plain", "compile", "graphs"], "cpu", 60.0)
    assert [item.get("samples_per_s") for item in loops] == [5.0, None, 20.0]
    assert loops[1]["error"] == "no compiler"
    results = {"vit": entry(loops, 30.0), "unet": entry(loops[1:2], 1.0)}
    assert zoo.row_of("vit", results["vit"])[-1] == "capture=step"
    assert zoo.row_of("vit", results["vit"])[2:8] == ["20", "graphs", "30", "1.50x", "6.00x", "1.10"]
    assert zoo.row_of("unet", results["unet"])[1:8] == ["-"] * 7
    assert zoo.ratios(results, ("vit", "bert", "unet"), "best") == [1.5]
    capsys.readouterr()
    zoo.tell(results)
    assert "host-bound, of the expert: 1.50x on average over 1 of 6" in capsys.readouterr().out


def test_a_loop_keeps_its_figures_until_it_is_measured_again(zoo: ModuleType) -> None:
    earlier = [{"loop": "graphs", "samples_per_s": 3.0}, {"loop": "plain", "samples_per_s": 1.0}]
    loops = zoo.merged(earlier, [{"loop": "graphs", "samples_per_s": 4.0}])
    assert [(item["loop"], item["samples_per_s"]) for item in loops] == [("plain", 1.0), ("graphs", 4.0)]


def test_of_a_search_it_keeps_what_was_found_and_tried(zoo: ModuleType) -> None:
    attempt = {"label": "gpu.capture=step", "status": "accepted", "reason": "2 x", "proof": {"outputs": [1] * 500}}
    kept = zoo.in_short({"attempts": [attempt], "baseline": {"setup_s": 1.0}, "final": None})
    assert kept["attempts"] == [{"label": "gpu.capture=step", "status": "accepted", "reason": "2 x"}]
    assert kept["baseline"] == {"seconds_per_sample": None, "setup_s": 1.0, "verdict": None}
