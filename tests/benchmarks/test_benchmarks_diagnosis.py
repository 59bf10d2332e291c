"""The campaign of planted faults: its own arithmetic, and a sample of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("diagnosis", "planted", "planted_gpu", "harness", "lab")


@pytest.fixture
def diagnosis(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import diagnosis

    yield diagnosis
    for name in MODULES:
        sys.modules.pop(name, None)


def outcome(verdict: str, *warnings: str) -> dict[str, Any]:
    findings = [{"code": code, "severity": "warning", "share": 0.2} for code in warnings]
    return {"verdict": verdict, "findings": findings, "wall_s": 1.0}


def test_there_are_enough_cases_of_every_kind(diagnosis: ModuleType) -> None:
    from frameworm.diagnose.rules.judge import CODES

    cases = diagnosis.CASES.values()
    assert len(cases) >= 20
    assert sum(case.expected == "healthy" for case in cases) >= 4
    assert all(case.expected in (*CODES, "healthy") for case in cases)
    # What needs another run to compare with, or says nothing bad, is not planted.
    unplanted = set(CODES) - {case.expected for case in cases}
    assert unplanted == {"negative_scaling", "compute_bound", "memory_underused"}


def test_right_and_wrong_are_counted(diagnosis: ModuleType) -> None:
    summary = diagnosis.summarise(
        {
            "leak": [outcome("memory_growth", "memory_growth"), outcome("healthy")],
            "healthy_compute": [outcome("healthy"), outcome("input_bound", "input_bound")],
        }
    )
    assert summary["confusion"] == {
        "memory_growth": {"memory_growth": 1, "healthy": 1},
        "healthy": {"healthy": 1, "input_bound": 1},
    }
    assert (summary["runs"], summary["right"], summary["accuracy"]) == (4, 2, 0.5)
    assert summary["false_findings_on_healthy"] == {"healthy_compute": ["input_bound"]}


def test_what_other_processes_do_is_no_fault_of_a_case(diagnosis: ModuleType) -> None:
    def found(code: str, **evidence: float) -> dict[str, Any]:
        return {"code": code, "severity": "warning", "share": 0.2, "evidence": evidence}

    others, crowd = found("cpu_oversubscribed", cores_of_others=1.5), found("cpu_oversubscribed", torch_threads=16.0)
    slow = found("input_bound")

    def judged(verdict: str, *findings: dict[str, Any]) -> tuple[str, list[str]]:
        left = diagnosis.apart_from_others({"verdict": verdict, "findings": list(findings), "notes": []})
        return left["verdict"], diagnosis.warnings_of(left)

    assert judged("cpu_oversubscribed", others) == ("healthy", [])
    assert judged("cpu_oversubscribed", others, slow) == ("input_bound", ["input_bound"])
    assert judged("input_bound", slow, others) == ("input_bound", ["input_bound"])
    assert judged("cpu_oversubscribed", crowd, slow) == ("cpu_oversubscribed", ["cpu_oversubscribed", "input_bound"])


def test_a_case_that_hangs_is_ended_and_counts_as_failed(diagnosis: ModuleType) -> None:
    found = diagnosis.run_case(diagnosis.Case("leak", "memory_growth", "", lambda folder, rank: None, deadline_s=0.5))
    assert found["verdict"] == "failed"
    assert "still running" in found["problem"]


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sample_of_the_campaign_is_judged_right(tmp_path: Path) -> None:
    cases = "slow_dataset,healthy_compute"
    for number in range(3):
        folder = tmp_path / str(number)
        command = [sys.executable, str(BENCHMARKS / "diagnosis.py"), "--cases", cases, "--out", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400)
        file = folder / "diagnosis-cpu.json"
        assert file.exists(), done.stdout + done.stderr
        results = json.loads(file.read_text())["results"]
        (healthy,) = results["cases"]["healthy_compute"]["runs"]
        if not any("vary too much" in note for note in healthy.get("notes", [])):  # a stall is no fault of the rules
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert (results["summary"]["runs"], results["summary"]["right"]) == (2, 2)
