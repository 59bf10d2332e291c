"""docs/tutorials/own_model.md: its blocks run one after the other, and do what the page says."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "tutorials" / "own_model.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": "__main__"}
    first = None
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/tutorials/own_model.md, block {number + 1}", "exec"), names)
        first = first or names.get("result")
    result = names["result"]
    assert first is not None
    assert first.steps == 112
    assert first.steps < result.steps < 12 * 56, "the callback has stopped it"
    assert result.stop_reason == "early_stop"
    assert result.quality.metrics["val_f1"] > 0.95
    scores = names["trainer"].evaluate(names["held_out"])
    assert scores["f1"] == pytest.approx(result.quality.metrics["val_f1"])
    assert names["answers"].shape == (512, 2)
    with (tmp_path / "runs" / "own" / "metrics.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len([row for row in rows if row["epoch/val_f1"]]) == result.steps // 56, "one run to the tracker"
    assert (tmp_path / "own.safetensors").exists()
