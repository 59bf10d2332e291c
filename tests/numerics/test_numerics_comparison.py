"""Outputs of one step, computed in several ways."""

from __future__ import annotations

import pytest
import torch

from frameworm.numerics.comparison import noise_of


def test_noise_is_the_root_mean_square_of_the_moves() -> None:
    baseline = {"loss": torch.zeros(2), "gradient of a": torch.ones(2), "gradient of b": torch.ones(2)}
    moved = [
        {"loss": torch.tensor([3.0, 4.0]), "gradient of a": torch.ones(2)},
        {"loss": torch.zeros(2)},
    ]
    found = noise_of(baseline, moved)
    assert found == pytest.approx({"loss": (25 / 2) ** 0.5, "gradient of a": 0.0, "gradient of b": 0.0})
