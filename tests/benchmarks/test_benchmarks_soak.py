"""A minute of the soak, and that it would notice a leak or a drift."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import soak

    yield soak
    for name in ("soak", "harness"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_minute_of_training_and_resuming_leaks_nothing(tmp_path: Path) -> None:
    """In a process of its own, where nothing else is alive."""
    command = [sys.executable, str(BENCHMARKS / "soak.py"), "--minutes", "1", "--out", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert (tmp_path / "soak-cpu.json").exists(), done.stdout + done.stderr
    results = json.loads((tmp_path / "soak-cpu.json").read_text())["results"]
    assert results["cycles"] >= 4
    assert results["drifts"] == []
    leaks = {name for name, trend in results["trends"].items() if trend["leaks"]}
    assert leaks <= {"memory_bytes"}, done.stdout
    # In its first minute the allocator still spreads; the parameters and states of a cycle's trainings are 230 kB.
    low, _ = results["trends"]["memory_bytes"]["interval"]
    assert low is None or low < 64 * 1024, done.stdout
    for name in ("open_files", "threads", "children", "tensors"):
        series = results["trends"][name]["series"]
        assert max(series[len(series) // 2 :]) <= max(series[: len(series) // 2]), name


def test_a_leak_stands_out_from_noise(soak: ModuleType) -> None:
    draw = random.Random(0)
    noise = [300e6 + draw.gauss(0, 200e3) for _ in range(400)]
    steady = soak.trend(noise)
    assert steady.low < 0 < steady.high
    leaking = soak.trend([value + 20_000 * cycle for cycle, value in enumerate(noise)])
    assert leaking.low > soak.BOUNDS["memory_bytes"]
    assert leaking.slope == pytest.approx(20_000, rel=0.05)
    assert soak.trend([7.0] * 20) == (0, 0, 0)
    spikes = [7.0 + 40 * (cycle % 10 == 0) for cycle in range(100)]
    assert soak.trend(spikes).slope == 0


def test_a_few_points_prove_no_leak(soak: ModuleType) -> None:
    for count in (1, 2, 9):
        assert soak.trend([1e6 * cycle for cycle in range(count)]).low < 0


@pytest.mark.slow
def test_other_numbers_are_a_drift(soak: ModuleType, tmp_path: Path) -> None:
    whole, _ = soak.train(tmp_path / "whole", "cpu", ())
    assert len(whole.steps) == soak.STEPS
    parts, _ = soak.train(tmp_path / "parts", "cpu", (5, 7))
    assert whole.differs(parts) is None
    moved = {**parts.parameters, "layers.0.bias": parts.parameters["layers.0.bias"] + 1e-6}
    assert whole.differs(parts._replace(parameters=moved)) == "layers.0.bias"
    assert whole.differs(parts._replace(steps={**parts.steps, 3: 0.0})) == "step losses"
    assert whole.differs(parts._replace(epochs=[])) == "epoch losses"
