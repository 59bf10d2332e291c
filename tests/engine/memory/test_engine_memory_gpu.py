"""Memory limits and out of memory on a real GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from frameworm import Callback, Trainer
from frameworm.config.schema import MemoryConfig
from frameworm.engine.memory.guard import DeviceGauge, MemoryGuard
from frameworm.errors import MemoryLimitError, OutOfMemoryError
from frameworm.launch.stopping import StopRequest
from frameworm.records.schema import StepRecord

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MEBIBYTE = 2**20


@pytest.fixture
def room() -> Iterator[Any]:
    """Leave torch so many bytes beyond what it holds."""

    def limit(more_bytes: int) -> float:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        fraction = (torch.cuda.memory_reserved() + more_bytes) / total
        torch.cuda.set_per_process_memory_fraction(fraction)
        return fraction

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


class Wide(nn.Module):
    """16 MiB of activations per sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs[:, None, :].expand(-1, MEBIBYTE // 2, -1)
        return torch.tanh(rows * 1.0000001).mean(1) @ self.weight


def _data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 8, generator=generator), torch.randint(0, 4, (samples,)))


def _train(size: int, accumulation: int, **settings: Any) -> tuple[Any, torch.Tensor]:
    model = Wide()
    trainer = Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=None, accumulation=accumulation, **settings
    )
    record = trainer.train(DataLoader(_data(32), size))
    return record, model.weight.detach().cpu()


def test_the_error_of_a_real_gpu(room: Any) -> None:
    room(256 * MEBIBYTE)
    with pytest.raises(OutOfMemoryError) as failure:
        _train(12, 1)  # the first of two such tensors fits
    assert "ran out of GPU memory in step 1 (forward, micro-batch 1 of 1, 12 samples)" in str(failure.value)
    assert failure.value.held["rest"] > 16 * MEBIBYTE


def test_halving_fits_what_did_not_and_trains_the_same(room: Any) -> None:
    _, expected = _train(2, 8)
    room(256 * MEBIBYTE)
    record, after = _train(16, 1, on_oom="halve_micro_batch")
    assert record.batch.micro < 16
    assert record.batch.global_ == 16
    assert torch.allclose(after, expected, atol=1e-5)


def test_a_leak_on_the_gpu_stops_the_run(room: Any) -> None:
    class Leak(Callback):
        kept: list[torch.Tensor] = []  # noqa: RUF012

        def on_step(self, step: StepRecord) -> None:
            self.kept.append(torch.empty(16 * MEBIBYTE, dtype=torch.uint8, device="cuda"))

    fraction = room(2048 * MEBIBYTE)
    model = nn.Linear(8, 4)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[Leak()],
        run_dir=None,
        monitoring_interval=1e-6,
        memory_fraction=fraction,
    )
    try:
        with pytest.raises(MemoryLimitError, match="memory of cuda:0"):
            trainer.train(DataLoader(_data(1600), 4))
    finally:
        Leak.kept.clear()


def test_unused_cache_is_trimmed_without_waiting_for_the_device() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    gauge = DeviceGauge(torch.device("cuda", 0))
    pools = max(0, gauge.unused_bytes())  # of graphs that other tests captured
    settings = MemoryConfig(monitoring_interval=1e-9, cache_size_limit=pools + 64 * MEBIBYTE)
    guard = MemoryGuard(settings, [gauge], StopRequest(), lambda: "")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(1, 6):
            guard.before_step(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Blocks that one after the other are too small for the next: reserved adds up, allocated does not.
    for size in (64, 128, 256):
        del_me = torch.empty(size * MEBIBYTE, dtype=torch.uint8, device="cuda")
        del del_me
    assert gauge.unused_bytes() > pools + 64 * MEBIBYTE
    guard.before_step(6)
    assert gauge.unused_bytes() <= pools
