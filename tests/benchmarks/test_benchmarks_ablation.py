"""The ablation's arithmetic, and that its GPU part runs: on a CPU, with few steps."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("ablation")
    for file in BENCHMARKS.glob("*.py"):
        sys.modules.pop(file.stem, None)


def gain(low: float, high: float) -> dict[str, object]:
    return {"gain": {"value": (low + high) / 2, "low": low, "high": high}}


def test_a_trick_is_condemned_only_by_both_its_workloads(ablation: ModuleType) -> None:
    cases = (ablation.Case("a", "quickstart.yaml"), ablation.Case("a", "zoo:graph"))
    mine, zoo = (case.name for case in cases)
    assert ablation.verdicts({mine: gain(0.99, 1.02), zoo: gain(1.0, 1.01)}, cases) == {"a": "condemned"}
    assert ablation.verdicts({mine: gain(1.01, 1.04), zoo: gain(1.0, 1.01)}, cases) == {"a": "kept"}
    assert ablation.verdicts({mine: gain(0.9, 1.2), zoo: gain(1.0, 1.01)}, cases) == {"a": "open"}
    assert ablation.verdicts({mine: gain(0.99, 1.02)}, cases) == {"a": "not measured yet"}
    failed = {mine: gain(0.99, 1.02), zoo: {"error": "no model"}}
    assert ablation.verdicts(failed, cases) == {"a": "not measured yet"}


def test_every_case_names_settings_and_switches_that_exist(ablation: ModuleType, tmp_path: Path) -> None:
    for case in (*ablation.CPU, *ablation.GPU):
        assert (case.on != case.off) or case.switch in ablation.SWITCHES
        if not case.workload.startswith("zoo:"):
            on, off = (ablation.config_of(case, side, "cpu", tmp_path) for side in (True, False))
            assert on != off


@pytest.mark.slow
def test_each_switch_takes_something_away(ablation: ModuleType) -> None:
    replaced = """
import sys; sys.path.insert(0, sys.argv[1])
import ablation
from frameworm.engine.optim.half_weights import HalfWeights
from frameworm.engine.optim.host_adamw import HostAdamW
from frameworm.engine.optim.update import Update
from frameworm.models import attention
from frameworm.parallel import replicated
places = [(HostAdamW, "suits"), (attention, "_may_look"), (attention, "suits_short_kernels"), (HalfWeights, "of"),
          (Update, "find_one_pass"), (replicated, "EarlyShares")]
before = [owner.__dict__[name] for owner, name in places]
for switch in ablation.SWITCHES.values():
    switch()
assert all(owner.__dict__[name] is not old for (owner, name), old in zip(places, before))
"""
    subprocess.run([sys.executable, "-c", replaced, str(BENCHMARKS)], check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.long
def test_the_gpu_part_can_be_rehearsed_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "ablation.py"), "--part", "gpu", "--device", "cpu", "--steps", "3"]
    words = ["--only", "half_weights", "--workloads", "own", "--starts", "1", "--rounds", "2", "--out", str(tmp_path)]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, *words],
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert "not measured yet" in done.stdout  # the other cases
    found = json.loads((tmp_path / "ablation-rehearsal-cpu.json").read_text())
    stored = found["results"]["cases"]["half_weights, quickstart"]
    assert len(stored["rounds"]) == 2
    assert stored["without"] == "switch: half_weights"
