"""docs/benchmarks/index.md has one row per stored result: what it is, the command, its date and its commit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = {path.name: path for path in (ROOT / "benchmarks" / "results").glob("*.json")}
INDEX = (ROOT / "docs" / "benchmarks" / "index.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| \[[^\]]+\]\(../../benchmarks/results/([^)]+)\) \| `(\w+\.py)(.*?)` \| ([\d-]{10}) \| (?:in )?`(\w+)` \|$",
    re.M,
)
ROWS = {row[0]: row for row in ROW.findall(INDEX)}


def test_each_result_has_one_row() -> None:
    assert len(ROW.findall(INDEX)) == len(ROWS)
    assert set(ROWS) == set(RESULTS)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_the_row_is_that_of_the_result(name: str) -> None:
    _, script, options, date, commit = ROWS[name]
    source = (ROOT / "benchmarks" / script).read_text(encoding="utf-8")
    assert all(f'"{option}"' in source for option in re.findall(r"--[a-z-]+", options) if option != "--set")
    result = json.loads(RESULTS[name].read_text(encoding="utf-8"))
    assert result.get("commit", result.get("committed_in", "")).startswith(commit)
    assert result.get("measured", date).startswith(date)
