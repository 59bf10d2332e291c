"""What the tests of this folder train: a small classifier on a data set that it can learn."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset


def data(count: int = 24) -> TensorDataset:
    """Two classes, by the sign of the sum of six features; the same at every call."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def classifier() -> nn.Sequential:
    """Two layers; the same weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
