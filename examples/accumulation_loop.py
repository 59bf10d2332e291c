"""Gradient accumulation and two optimizers: four micro-batches to a step, one optimizer for each half of the model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATION = 4


def main() -> None:
    """Train an autoencoder and print its loss."""
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(torch.randn(1280, 48)), batch_size=8, shuffle=True)
    encoder = nn.Sequential(nn.Linear(48, 128), nn.Tanh(), nn.Linear(128, 8))
    decoder = nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 48))
    optimizers = [
        torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9),
        torch.optim.AdamW(decoder.parameters(), lr=1e-3),
    ]
    for number, (batch,) in enumerate(loader, start=1):
        loss = F.mse_loss(decoder(encoder(batch)), batch)
        (loss / ACCUMULATION).backward()
        if number % ACCUMULATION == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    weights = [*encoder.parameters(), *decoder.parameters()]
    print(f"loss {loss.item():.6f}, checksum {sum(item.double().sum().item() for item in weights):.12f}")


if __name__ == "__main__":
    main()
