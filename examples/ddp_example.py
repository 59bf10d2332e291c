"""DistributedDataParallel on CPU: `torchrun --nproc-per-node 2 examples/ddp_example.py`."""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    """Train for two epochs; one rank may be told to be slow."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--delay-s", type=float, default=0.03)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    inputs = torch.randn(1280, 64)
    labels = (inputs[:, :8].sum(1) > 0).long()
    data = TensorDataset(inputs, labels)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    replicated = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replicated.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            if rank == options.slow_rank:
                time.sleep(options.delay_s)
            loss = F.cross_entropy(replicated(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.all_reduce(loss.detach())
    if rank == 0:
        print(f"loss {loss.item():.6f}")
        print(f"checksum {sum(item.double().sum().item() for item in model.parameters()):.12f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
