"""Compressed gradients of two ranks that share one GPU, by gloo and by NCCL."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compression_cases import Net
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from frameworm.launch.process_group import cleanup
from frameworm.parallel.compression.hook import METHODS, CompressionHook
from frameworm.parallel.replicas import check_replicas

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _join(backend: str, rank: int, world_size: int, folder: str) -> None:
    """Two ranks of NCCL on one GPU: each must believe to be on a host of its own."""
    torch.cuda.set_device(0)
    if backend == "nccl":
        cleanup()
        os.environ["NCCL_HOSTID"] = f"host-{rank}"
        dist.init_process_group(
            "nccl",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            device_id=torch.device("cuda", 0),
        )


def _train(method: str, rank: int, steps: int) -> tuple[nn.Module, list[float], int]:
    torch.manual_seed(0)
    model = Net().cuda()
    hook = CompressionHook(method, model=model, ratio=0.05)
    wrapped = DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=0.03, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for step in range(steps):
        draw = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(8, 20, generator=draw).cuda()
        loss = nn.functional.mse_loss(wrapped(inputs), inputs[:, :3].sin())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    check_replicas(model, steps)
    sent = hook.take_sent_bytes()
    hook.close()
    return model, [float(loss) for loss in losses], sent


def _all_methods(rank: int, world_size: int, backend: str, folder: str) -> dict[str, Any]:
    _join(backend, rank, world_size, folder)
    found = {}
    for method in METHODS:
        _, losses, sent = _train(method, rank, 60)
        found[method] = (losses[0], sum(losses[-5:]) / 5, sent)
    return found


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_every_method_learns_and_keeps_the_replicas_alike(
    run_ranks: Callable[..., list[Any]], backend: str, tmp_path: Path
) -> None:
    for found in run_ranks(_all_methods, 2, (backend, str(tmp_path)), timeout_s=100):
        plain = found["off"][2]
        for method, (first, last, sent) in found.items():
            assert last < 0.8 * first, method
            assert method == "off" or sent < 0.6 * plain, method
