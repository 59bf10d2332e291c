"""The benchmarks' own arithmetic, and that the script runs from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import harness

    yield harness
    sys.modules.pop("harness", None)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_the_window_holds_the_same_steps_however_far_a_loop_reads_ahead(
    harness: ModuleType, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    now = [0.0]
    monkeypatch.setattr(harness, "perf_counter", lambda: now[0])
    batches = harness.TimedBatches([10, 20, 30], steps=20, first=4, device=torch.device("cpu"))
    now[0] = 1000.0  # start-up
    seen: list[Any] = []
    waiting: deque[Any] = deque()
    for batch in batches.loader():
        waiting.append(batch)
        if len(waiting) > ahead:
            seen.append(waiting.popleft())
            now[0] += 2.0
    now[0] += 500.0  # the end of the run
    assert batches.step_s() == pytest.approx(2.0)
    assert seen[:4] == [10, 20, 30, 10]


@pytest.mark.slow
def test_rounds_take_turns_and_the_first_does_not_count(harness: ModuleType) -> None:
    order: list[str] = []

    def block(name: str) -> Any:
        def run() -> Any:
            order.append(name)
            return harness.Sample(float(len(order)), 0.0, 0.0)

        return run

    measured = harness.interleave({name: block(name) for name in "abc"}, 3, lambda text: None)
    assert "".join(order) == "abcbcacababc"
    assert [sample.step_s for sample in measured["a"].rounds] == [6, 8, 10]
    assert measured["a"].warmup.step_s == 1
    assert list(measured) == ["a", "b", "c"]


def test_ratios_are_taken_within_a_round(harness: ModuleType) -> None:
    def measured(*steps: float) -> Any:
        samples = [harness.Sample(step, 0.0, 0.0) for step in steps]
        return harness.Measured(samples[0], samples)

    # The machine slows down over the rounds, both contenders alike: the ratio does not see it.
    found = harness.paired(measured(2, 4, 8, 16, 32), measured(1, 2, 4, 8, 16), harness.ratio)
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)


def test_the_interval_of_a_median(harness: ModuleType) -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 100.0]
    found = harness.bootstrap_median(values)
    assert found.value == 4.0
    assert 1.0 < found.low < 4.0 < found.high
    assert harness.bootstrap_median(values) == found
    assert harness.bootstrap_median([3.0] * 5).high == 3.0


@pytest.mark.slow
def test_the_script_runs_and_finds_the_same_loss(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "overhead.py"), "--cases", "mlp", "--contenders", "bare,frameworm"]
    command += ["--rounds", "5", "--steps", "20", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    case = json.loads(path.read_text())["results"]["mlp"]
    assert case["contenders"]["frameworm"]["same_loss"]
    assert len(case["contenders"]["bare"]["rounds"]) == 5
    assert "frameworm" in done.stdout
