"""A workload of your own: a small CNN that tells noisy shapes apart.

Nothing is downloaded; the images are drawn here. From the repository's root:

    frameworm train --config examples/cnn.yaml
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from frameworm import Config, Workload

SHAPES = ("square", "disc", "cross")
SIZE = 16


def build(config: Config) -> Workload:
    """What the config's `workload` names: takes the config, returns a model and its data.

    Batches are (images, labels), and labels are integers: no loss_fn is needed, cross-entropy is meant.
    """
    own_settings = config.model.model_extra or {}
    model = ShapeClassifier(width=int(own_settings.get("width", 16)))
    return Workload(model, draw_shapes(3_000, config.seed), draw_shapes(600, config.seed + 1))


class ShapeClassifier(nn.Module):
    """Two convolutions, the strongest answer of each filter anywhere in the image, then one linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=5, stride=2, padding=2),
            nn.ReLU(),
        )
        self.head = nn.Linear(2 * width, len(SHAPES))

    def forward(self, images: Tensor) -> Tensor:
        """[batch, 1, SIZE, SIZE] to logits, [batch, shapes]."""
        logits: Tensor = self.head(self.features(images).amax(dim=(2, 3)))
        return logits


def draw_shapes(samples: int, seed: int) -> TensorDataset:
    """Shapes of random place and size under noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(SHAPES), (samples,), generator=generator)
    radius = torch.randint(3, 6, (samples, 1, 1), generator=generator)
    centre = torch.randint(5, SIZE - 5, (2, samples, 1, 1), generator=generator)
    line = torch.arange(SIZE)
    rows, columns = (line.view(1, -1, 1) - centre[0]).abs(), (line.view(1, 1, -1) - centre[1]).abs()
    inside = (rows <= radius) & (columns <= radius)
    drawings = torch.stack([inside, rows**2 + columns**2 <= radius**2, inside & ((rows == 0) | (columns == 0))])
    images = drawings[labels, torch.arange(samples)].float()
    images += 0.3 * torch.randn(images.shape, generator=generator)
    return TensorDataset(images.unsqueeze(1), labels)
