"""JSON files and `--json` output have the keys and types they had; see `golden_outlines` for what may differ.

The files of run folders are checked where the runs are made: in `test_golden_losses` and `test_golden_runs`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_cases import run_tasks
from golden_outlines import VERB_GROUPS, check, disagreements, outline, prepare


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", VERB_GROUPS)
def test_verbs_give_the_same_keys(group: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    for (found,) in run_tasks([f"verb:{name}" for name in VERB_GROUPS[group]], 1, tmp_path).values():
        assert check(found) == []


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"a": 1, "b": [{"c": "x"}], "d": {"e": True}}, []),
        ({"a": None, "b": [], "d": None}, []),
        ({"a": 2.5, "b": [{"c": None}], "d": {"e": False}}, []),
        ({"a": "1", "b": [{"c": "x"}], "d": {"e": True}}, ["a: string instead of number"]),
        ({"b": [{"c": "x"}], "d": {"e": True}}, ["a: is gone"]),
        ({"a": 1, "b": [{"f": "x"}], "d": {"e": True}}, ["b[].c: is gone", "b[].f: is new"]),
        ({"a": 1, "b": [{"c": "x"}], "d": {}}, ["d.e: is gone"]),
    ],
)
def test_a_change_of_keys_is_noticed(changed: object, told: list[str]) -> None:
    expected = outline({"a": 1, "b": [{"c": "x"}], "d": {"e": True}})
    assert disagreements(outline(changed), expected) == told
