"""Smoke test of a speech model: three steps, then done."""

import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Conv1d(1, 32, 80, 16), nn.ReLU(), nn.Conv1d(32, 64, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool1d(1))
head = nn.Linear(64, 35)
model.to(device), head.to(device)
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-3)
for step in range(3):
    waves, words = torch.randn(16, 1, 8000, device=device), torch.randint(35, (16,), device=device)
    loss = nn.functional.cross_entropy(head(model(waves).squeeze(-1)), words)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
print(f"final loss {loss.item():.6f}")
