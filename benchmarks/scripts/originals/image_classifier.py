"""Train a small ConvNet on 32x32 images.

Usage: python image_classifier.py --epochs 4
"""

import argparse
import os
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset

MEAN = np.array([0.49, 0.48, 0.45], dtype=np.float32)
STD = np.array([0.25, 0.24, 0.26], dtype=np.float32)


class ToyImages(Dataset):
    """Ten noisy patterns, stored as uint8 like CIFAR."""

    def __init__(self, count, seed):
        patterns = np.random.default_rng(0).integers(0, 255, (10, 32, 32, 3))
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, 10, count)
        noise = rng.integers(0, 255, (count, 32, 32, 3))
        self.images = (0.3 * patterns[self.labels] + 0.7 * noise).astype(np.uint8)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, idx):
        image = self.images[idx].astype(np.float32) / 255.0
        image = (image - MEAN) / STD
        image = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode="reflect")[2:-2, 2:-2]
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))), int(self.labels[idx])


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.conv3 = nn.Conv2d(2 * width, 4 * width, 3, padding=1)
        self.fc1 = nn.Linear(4 * width * 16, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.max_pool2d(F.relu(self.conv3(x)), 2)
        x = torch.flatten(x, 1)
        return self.fc2(F.relu(self.fc1(x)))


def test(model, loader, device):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            correct += (model(data).argmax(1) == target).sum().item()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--train-size", type=int, default=1600)
    parser.add_argument("--log-interval", type=int, default=50)
    args = parser.parse_args()

    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_loader = DataLoader(ToyImages(args.train_size, 1), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(ToyImages(512, 2), batch_size=256)
    model = Net(args.width).to(device)
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()

    best = 0.0
    os.makedirs("outputs", exist_ok=True)
    for epoch in range(1, args.epochs + 1):
        model.train()
        start = time.time()
        for batch_idx, (data, target) in enumerate(train_loader):
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            output = model(data)
            loss = criterion(output, target)
            loss.backward()
            optimizer.step()
            if batch_idx % args.log_interval == 0:
                print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}]\tLoss: {loss.item():.6f}")
        accuracy = test(model, test_loader, device)
        print(f"epoch {epoch}: accuracy {accuracy:.4f}, took {time.time() - start:.1f}s")
        if accuracy > best:
            best = accuracy
            torch.save(model.state_dict(), os.path.join("outputs", "best.pt"))
    print(f"final loss: {loss.item():.6f}")


if __name__ == "__main__":
    main()
