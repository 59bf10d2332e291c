"""A loop under Accelerate with gradient accumulation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Train for two epochs and print the loss."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    inputs = torch.randn(1280, 64)
    labels = (inputs[:, :8].sum(1) > 0).long()
    loader = DataLoader(TensorDataset(inputs, labels), 16, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for batch, target in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(batch), target)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.6f}")
    accelerator.print(f"checksum {sum(item.double().sum().item() for item in model.parameters()):.12f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
