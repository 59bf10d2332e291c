"""Keypoint regression with random augmentation in the data set (Python's random, numpy and torch all draw)."""

import argparse
import os
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Keypoints(Dataset):
    def __init__(self, n, size, augment):
        rng = np.random.default_rng(5)
        self.points = rng.uniform(0.25, 0.75, (n, 2)).astype(np.float32)
        self.size, self.augment = size, augment
        self.grid = np.stack(np.meshgrid(np.linspace(0, 1, size), np.linspace(0, 1, size)), -1).astype(np.float32)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        point = self.points[i].copy()
        image = np.exp(-((self.grid - point) ** 2).sum(-1) / 0.005)
        if self.augment:
            if random.random() < 0.5:
                image, point[0] = image[:, ::-1], 1 - point[0]
            k = random.randint(-4, 4)
            image, point[1] = np.roll(image, k, axis=0), point[1] + k / self.size
            image = image * np.random.uniform(0.6, 1.4) + np.random.normal(0, 0.1, image.shape)
            for _ in range(3):  # cutout
                y, x = np.random.randint(0, self.size - 4, 2)
                image[y : y + 4, x : x + 4] = 0
        image = torch.from_numpy(np.ascontiguousarray(image, dtype=np.float32))
        if self.augment:
            image = image + 0.05 * torch.randn_like(image)
        return image.unsqueeze(0), torch.from_numpy(point)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=3200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    # torch seeds Python's random, numpy and itself in each worker, differently in every epoch
    workers = max(1, min(4, len(os.sched_getaffinity(0)) - 1))
    loader = DataLoader(
        Keypoints(args.samples, 48, True),
        args.batch_size,
        shuffle=True,
        num_workers=workers,
        pin_memory=device == "cuda",
        persistent_workers=True,
    )
    c = args.channels
    model = nn.Sequential(
        *[nn.Conv2d(1, c, 5, 2, 2), nn.ReLU(), nn.Conv2d(c, 2 * c, 5, 2, 2), nn.ReLU()],
        *[nn.Conv2d(2 * c, 4 * c, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * c * 36, 2)],
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(args.epochs):
        losses = []
        for images, points in loader:
            loss = nn.functional.smooth_l1_loss(
                model(images.to(device, non_blocking=True)), points.to(device, non_blocking=True), beta=0.05
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        losses = torch.stack(losses).tolist()
        print(f"epoch {epoch}: {np.mean(losses):.5f}")
        torch.save(model.state_dict(), "keypoints.pt")
    print(f"final loss {np.mean(losses[-20:]):.6f}")


if __name__ == "__main__":
    main()
