"""The benchmark of captured ranks: its windows, its arithmetic, and a rehearsal of it on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("ranks_gpu", "gpt_mfu", "harness", "live", "peers", "contenders", "cases")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import ranks_gpu

    yield ranks_gpu
    for name in MODULES:
        sys.modules.pop(name, None)


def kernel(name: str, start: float, end: float, device: Any = torch.autograd.DeviceType.CUDA) -> Any:
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))


def test_kernels_of_nccl_are_not_computing(ranks: ModuleType) -> None:
    events = [
        kernel("gemm", 0, 300_000),
        kernel("gelu", 200_000, 400_000),  # beside it, on another stream
        kernel("ncclDevKernel_AllReduce", 350_000, 900_000),
        kernel("aten::mm", 0, 1_000_000, torch.autograd.DeviceType.CPU),
    ]
    shares = ranks.busy(SimpleNamespace(events=lambda: events), 1.0)
    assert shares == pytest.approx({"computing": 0.4, "gpu_idle": 0.6, "in_nccl": 0.55})


def test_a_free_gate_times_its_window_and_lets_the_loop_end(ranks: ModuleType) -> None:
    gate = ranks.FreeGate(3, 5, "cpu")
    read = [batch for _ in range(20) for batch in gate.batches(range(7))]
    assert len(read) == gate.plan.total
    assert gate.told["step_us"] > 0
    assert not gate.open


def test_the_quicker_pass_is_shown_and_all_are_kept(ranks: ModuleType) -> None:
    passes = [{"thread_us": 3.0, "step_us": 9.0}, {"failed": "x"}, {"thread_us": 2.0, "step_us": 8.0, "notes": []}]
    shown = ranks._both(passes)
    assert (shown["thread_us"], shown["step_us"]) == (2.0, 8.0)
    assert shown["passes"] == passes
    table = ranks.draw({"pair": {"ours": shown, "other": ranks._both([{"failed": "x"}])}})
    assert "failed" in table


@pytest.mark.slow
def test_it_runs_on_a_cpu(tmp_path: Path) -> None:
    data = os.environ.get("FRAMEWORM_DATA")
    if data is None:
        pytest.skip("needs real AG News: set FRAMEWORM_DATA")
    command = [
        sys.executable,
        str(BENCHMARKS / "ranks_gpu.py"),
        "--device",
        "cpu",
        "--data",
        data,
        "--cases",
        "ag_news",
    ]
    command += ["--parts", "alone,predict", "--rounds", "2", "--warmup", "4", "--steps", "6", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "ranks_gpu-cpu.json").read_text())["results"]
    case = results["alone"]["ag_news"]
    assert case["failed"] == {}
    assert set(case["contenders"]) == {"single", "ddp"}
    assert 0.1 < case["cost_of_ddp"]["value"] < 10, "far from exact where others take the cores"
    rows = results["predict"]["ag_news"]["fabrics"]["nvlink4"]["rows"]
    assert [row["world_size"] for row in rows] == [1, 2, 4, 8]
