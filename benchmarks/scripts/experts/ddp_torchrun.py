"""DistributedDataParallel: torchrun --standalone --nproc-per-node 2 ddp_torchrun.py"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup():
    use_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("nccl" if use_cuda else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    if use_cuda:
        torch.cuda.set_device(local_rank)
    return dist.get_rank(), torch.device(f"cuda:{local_rank}" if use_cuda else "cpu")


class MLP(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.stem = nn.Linear(128, width)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(depth)])
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=12800)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    args = parser.parse_args()
    rank, device = setup()
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    inputs = torch.randn(args.samples, 128)
    dataset = TensorDataset(inputs, inputs[:, :10].argmax(1))
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    model = DDP(
        MLP(args.width, args.depth).to(device),
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            x, y = x.to(device), y.to(device)
            update = (step + 1) % args.accumulate == 0
            with contextlib.nullcontext() if update else model.no_sync():
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                    loss = F.cross_entropy(model(x), y)
                (loss / args.accumulate).backward()
            if update:
                optimizer.step()
                optimizer.zero_grad()
            if step % 20 and step < len(loader) - 1:
                continue  # nobody reads the mean of these
            average = loss.detach().clone()
            dist.all_reduce(average)
            average /= dist.get_world_size()
            if rank == 0 and step % 20 == 0:
                print(f"epoch {epoch} step {step} loss {average.item():.4f}", flush=True)
        if rank == 0:
            torch.save(model.module.state_dict(), "ddp_model.pt")
        dist.barrier()
    if rank == 0:
        print(f"final loss {average.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
