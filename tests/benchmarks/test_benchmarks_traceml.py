"""The comparison with TraceML: its scripts, and how answers are read and graded."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("traceml", "diagnosis", "planted", "planted_gpu", "harness", "lab")


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import traceml

    yield traceml
    for name in MODULES:
        sys.modules.pop(name, None)


def test_both_get_the_same_script(compared: ModuleType) -> None:
    assert set(compared.SCRIPTS) <= set(compared.PLANTED)
    for script in compared.SCRIPTS.values():
        plain, changed = ast.parse(script.plain()), ast.parse(script.for_traceml())
        assert "traceml" not in ast.unparse(plain)
        wrapped = [node for node in ast.walk(changed) if isinstance(node, ast.With) and "trace_step" in ast.dump(node)]
        assert len(wrapped) == 1
        # With its three lines taken out again it is the script that frameworm gets.
        changed.body = [node for node in changed.body if "traceml" not in ast.dump(node) or isinstance(node, ast.For)]
        loop = next(node for node in ast.walk(changed) if isinstance(node, ast.For) and wrapped[0] in node.body)
        loop.body = loop.body[:-1] + wrapped[0].body
        assert ast.unparse(changed) == ast.unparse(plain)


def summary(kind: str, severity: str, **sections: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "primary_diagnosis": {"kind": kind, "severity": severity, "summary": "why"},
        **{name: {"issues": issues} for name, issues in sections.items()},
    }


def test_answers_of_traceml_are_graded_in_its_own_words(compared: ModuleType) -> None:
    def right(expected: str, *args: Any, **sections: Any) -> Any:
        return compared.right_of_traceml(expected, compared.read_traceml(summary(*args, **sections)))

    straggler = [{"kind": "INPUT_STRAGGLER", "severity": "crit", "ranks": [1]}]
    assert right("straggler", "INPUT_STRAGGLER", "crit", step_time=straggler)
    assert not right("straggler", "INPUT_STRAGGLER", "crit", step_time=[{**straggler[0], "ranks": [0]}])
    assert right("checkpoint_stall", "RESIDUAL_HEAVY", "warn")
    assert not right("input_bound", "RESIDUAL_HEAVY", "warn")
    assert right("healthy", "COMPUTE_BOUND", "info")
    assert not right("healthy", "RESIDUAL_HEAVY", "warn")
    assert not right("healthy", "INSUFFICIENT_STEP_TIME_DATA", "info")
    assert right("memory_growth", "COMPUTE_BOUND", "info", step_memory=[{"kind": "CREEP_EARLY", "severity": "warn"}])
    assert not right("memory_growth", "COMPUTE_BOUND", "info", step_memory=[{"kind": "BALANCED", "severity": "info"}])
    no_device = [{"kind": "NO_GPU", "severity": "info"}]
    assert right("memory_growth", "COMPUTE_BOUND", "info", step_memory=no_device) is None
    assert not compared.right_of_traceml("input_bound", {"verdict": compared.FAILED, "problem": "late"})


def test_warnings_beside_the_verdict_are_kept(compared: ModuleType) -> None:
    issues = {
        "step_time": [{"kind": "INPUT_BOUND", "severity": "crit"}],
        "system": [{"kind": "HIGH_CPU", "severity": "warn"}],
        "process": [{"kind": "NORMAL", "severity": "info"}],
    }
    answer = compared.read_traceml(summary("INPUT_BOUND", "crit", **issues))
    assert (answer["verdict"], answer["also"]) == ("INPUT_BOUND", ["HIGH_CPU"])


def test_without_traceml_it_says_how_to_get_it(
    compared: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert compared.main([]) == 0
    assert "pip install traceml-ai" in capsys.readouterr().out


@pytest.mark.slow
def test_a_script_under_frameworm(compared: ModuleType, tmp_path: Path) -> None:
    answer = compared.ask_frameworm("slow_dataset", tmp_path)
    assert answer["verdict"] == "input_bound", answer
    assert answer["phases"]["data_wait"] > 0.4
