"""Traces of a real device: each planted wait is found under its name."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from frameworm import Trainer
from frameworm.observe.clocks.nvtx import PhaseRanges, nvtx_functions
from frameworm.observe.trace.read import read_trace
from frameworm.records.trace import DeviceTime, TraceSummary
from frameworm.report.run.trace_text import render_trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZE = 4096


def record(path: Path, step: Callable[[], None]) -> tuple[TraceSummary, DeviceTime]:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA],
        schedule=torch.profiler.schedule(wait=1, warmup=2, active=4, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        profile_memory=True,
        acc_events=True,  # without it torch warns, and a warning here is an error
    ) as profiler:
        for _ in range(7):
            step()
            profiler.step()
    summary = read_trace(path)
    assert summary.device is not None
    device = summary.device
    assert device.compute_s + sum(device.waits_s.values()) == pytest.approx(device.wall_s, rel=1e-6)
    assert render_trace(summary)
    return summary, device


def multiply(matrix: torch.Tensor, times: int = 20) -> None:
    for _ in range(times):
        torch.mm(matrix, matrix)


def test_a_full_device_is_busy(tmp_path: Path) -> None:
    matrix = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    summary, device = record(tmp_path / "t.json", lambda: multiply(matrix, 100))
    assert device.compute_s > 0.85 * device.wall_s
    assert summary.kernels is not None
    assert summary.kernels.matmul_s["tensor_core"] == pytest.approx(sum(summary.kernels.matmul_s.values()))
    assert summary.operators_by_device[0].name == "aten::mm"
    assert summary.peak_device_bytes


def test_fp32_products_are_told_from_tensor_cores(tmp_path: Path) -> None:
    matrix = torch.randn(SIZE, SIZE, device="cuda")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        summary, _ = record(tmp_path / "t.json", lambda: multiply(matrix))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert summary.kernels is not None
    assert summary.kernels.matmul_s["fp32"] == pytest.approx(sum(summary.kernels.matmul_s.values()))


def test_a_sleeping_host_is_a_host_wait(tmp_path: Path) -> None:
    matrix = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        multiply(matrix, 4)
        time.sleep(0.03)

    _, device = record(tmp_path / "t.json", step)
    assert device.waits_s["host"] > 0.7 * device.wall_s
    assert device.waits_s["synchronisation"] < 0.1 * device.wall_s


def test_asking_for_a_value_is_a_synchronisation(tmp_path: Path) -> None:
    matrix = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        multiply(matrix, 50)
        matrix[0, 0].item()
        time.sleep(0.002)

    _, device = record(tmp_path / "t.json", step)
    assert device.waits_s["synchronisation"] > 4 * device.waits_s["host"]
    assert device.waits_s["synchronisation"] > 0.004


def test_a_slow_loader_is_data_loading(tmp_path: Path) -> None:
    class Slow(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            time.sleep(0.01)
            return super().__getitem__(index)

    matrix = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    batches = iter(DataLoader(Slow(torch.randn(40, 4)), 4))

    def step() -> None:
        next(batches)
        multiply(matrix, 2)

    _, device = record(tmp_path / "t.json", step)
    assert device.waits_s["data_loading"] > 0.7 * device.wall_s


def test_copies_from_pageable_and_pinned_memory(tmp_path: Path) -> None:
    pageable = torch.randn(16 << 20)
    pinned = pageable.pin_memory()

    def step() -> None:
        multiply(pageable[:4096].view(64, 64).cuda())
        pinned.cuda(non_blocking=True)
        pageable.cuda()

    summary, device = record(tmp_path / "t.json", step)
    sources = {item.source: item for item in summary.copies if item.direction == "HtoD"}
    assert set(sources) == {"Pageable", "Pinned"}
    assert sources["Pinned"].bytes == 4 * 4 * (16 << 20)
    assert device.waits_s["transfer"] > 0.3 * device.wall_s


@pytest.mark.parametrize("capture", ["off", "step"])
def test_a_window_in_a_run_on_the_device(tmp_path: Path, capture: str) -> None:
    def train(name: str, trace: str) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        data = TensorDataset(torch.randn(32 * 40, 64), torch.randint(0, 4, (32 * 40,)))
        trainer = Trainer(
            model, optimizer, run_dir=tmp_path / name, device="cuda", seed=2, capture=capture, trace=trace, nvtx=True
        )
        trainer.train(DataLoader(data, 32), epochs=1)
        return torch.cat([item.detach().flatten() for item in model.parameters()])

    assert torch.equal(train("plain", "off"), train("traced", "window"))
    summary = read_trace(tmp_path / "traced" / "trace-rank0.pt.trace.json.gz")
    assert len(summary.steps) == 5
    assert summary.device is not None
    assert summary.device.busy_s > 0
    assert (tmp_path / "traced" / "trace-rank0-summary.json").exists()


def test_nvtx_takes_our_ranges() -> None:
    functions = nvtx_functions()
    assert functions is not None
    ranges = PhaseRanges(*functions)
    ranges.begin()
    ranges.mark("forward")
    ranges.end_step()
