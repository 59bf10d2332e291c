"""A plain PyTorch loop: a small classifier, a validation and a checkpoint after each epoch."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def main() -> None:
    """Train on random points and print the losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(0)
    inputs = torch.randn(1600, 64)
    labels = (inputs[:, :8].sum(1) > 0).long()
    train, held_out = random_split(TensorDataset(inputs, labels), [1280, 320])
    train_loader = DataLoader(train, 32, shuffle=True, num_workers=options.workers)
    val_loader = DataLoader(held_out, 160)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()

    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(options.epochs):
            model.train()
            for batch, target in train_loader:
                optimizer.zero_grad()
                loss = criterion(model(batch), target)
                loss.backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                scores = [criterion(model(batch), target).item() for batch, target in val_loader]
            print(f"epoch {epoch}: train loss {loss.item():.6f}, validation loss {sum(scores) / len(scores):.6f}")
            torch.save(model.state_dict(), Path(folder) / "model.pt")
    print(f"checksum {sum(item.double().sum().item() for item in model.parameters()):.12f}")


if __name__ == "__main__":
    main()
