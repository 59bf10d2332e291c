"""The planted cases that need a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import torch
from planted import HEALTHY, fit, planted
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from frameworm import RunRecord


def layers(width: int, count: int) -> nn.Module:
    return nn.Sequential(
        *(part for _ in range(count) for part in (nn.Linear(width, width), nn.ReLU())), nn.Linear(width, 4)
    )


def batches(size: int, width: int, steps: int, **settings: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(size, width).repeat(4, 1), torch.randint(0, 4, (4 * size,)))
    sampler = torch.arange(size * steps) % (4 * size)
    return DataLoader(data, size, sampler=sampler.tolist(), **settings)


def prepared(size: int, width: int, steps: int) -> list[Any]:
    """Batches that lie on the device."""
    batch = (torch.randn(size, width, device="cuda"), torch.randint(0, 4, (size,), device="cuda"))
    return [batch] * steps


@planted("pageable_copies", "transfer_bound", "80 MB of pageable batch for a small model", needs="cuda")
def pageable_copies(folder: Path, rank: int) -> RunRecord:
    batch = (torch.randn(5_000, 4_096), torch.randint(0, 4, (5_000,)))
    return fit(nn.Linear(4_096, 4), [batch] * 300, folder, device="cuda", mixed_precision="bf16", trace="window")


@planted("item_every_step", "sync_stall", "figures of every layer's output are read as they come", needs="cuda")
def item_every_step(folder: Path, rank: int) -> RunRecord:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        value = batch[0]
        for part in model:  # type: ignore[attr-defined]
            value = part(value)
            for figure in (value.mean(), value.std(), value.amin(), value.amax()):
                figure.item()
        return nn.functional.cross_entropy(value, batch[1])

    return fit(
        layers(2_048, 30), prepared(12_288, 2_048, 200), folder, device="cuda", mixed_precision="bf16", trace="window",
        loss_fn=loss_fn,
    )  # fmt: skip


@planted("tiny_kernels", "host_bound", "100 layers, 64 wide", needs="cuda")
def tiny_kernels(folder: Path, rank: int) -> RunRecord:
    return fit(layers(64, 100), prepared(256, 64, 600), folder, device="cuda", mixed_precision="bf16", trace="window")


@planted("tiny_batch_gpu", "small_batch", "batches of 4", needs="cuda")
def tiny_batch_gpu(folder: Path, rank: int) -> RunRecord:
    return fit(layers(2_048, 20), prepared(4, 2_048, 2_500), folder, device="cuda", mixed_precision="bf16")


@planted("fp32_matrix_products", "precision_unused", "large products in fp32, without tensor cores", needs="cuda")
def fp32_matrix_products(folder: Path, rank: int) -> RunRecord:
    return fit(layers(8_192, 8), prepared(8_192, 8_192, 30), device="cuda", mixed_precision="off", tf32=False)


@planted("memory_near_full", "memory_pressure", "96% of the memory the process may use", needs="cuda")
def memory_near_full(folder: Path, rank: int) -> RunRecord:
    total = torch.cuda.get_device_properties(0).total_memory
    ballast = torch.empty(int(0.93 * 0.9 * total), dtype=torch.uint8, device="cuda")
    record = fit(
        layers(4_096, 8), prepared(16_384, 4_096, 300), folder, device="cuda", mixed_precision="bf16",
        memory_fraction=0.9,
    )  # fmt: skip
    del ballast
    return record


@planted("throttled_clock", "throttled", "the clock is locked low (needs the right to do so)", needs="clock")
def throttled_clock(folder: Path, rank: int) -> RunRecord:
    subprocess.run(["nvidia-smi", "-lgc", "345,345"], check=True, capture_output=True)
    try:
        return fit(layers(4_096, 16), prepared(8_192, 4_096, 80), device="cuda", mixed_precision="bf16")
    finally:
        subprocess.run(["nvidia-smi", "-rgc"], check=False, capture_output=True)


@planted("healthy_gpu", HEALTHY, "large products in bf16, data on the device", needs="cuda")
def healthy_gpu(folder: Path, rank: int) -> RunRecord:
    return fit(layers(8_192, 8), prepared(8_192, 8_192, 200), device="cuda", mixed_precision="bf16")
