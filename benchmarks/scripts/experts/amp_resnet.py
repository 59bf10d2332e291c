"""ResNet on small images with automatic mixed precision (float16 + GradScaler on a GPU, float32 on a CPU)."""

import argparse
import os

import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader, TensorDataset


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or cin != cout:
            self.shortcut = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width, blocks, num_classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        layers, channels = [], width
        for stage in range(3):
            for block in range(blocks):
                cout = width * 2**stage
                layers.append(BasicBlock(channels, cout, 2 if stage and not block else 1))
                channels = cout
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x):
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


def make_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(10, (n,), generator=g)
    base = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(base[y] * 0.5 + torch.randn(n, 3, 32, 32, generator=g), y)


def get_args():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--steps-per-epoch", type=int, default=50)
    p.add_argument("-b", "--batch-size", type=int, default=8)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--width", type=int, default=8)
    p.add_argument("--blocks", type=int, default=1)
    p.add_argument("--output", default="checkpoint.pth.tar")
    return p.parse_args()


def main(args):
    torch.manual_seed(42)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    use_amp = device == "cuda"
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    model = ResNet(args.width, args.blocks).to(device, memory_format=torch.channels_last)
    model.compile()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True)
    scaler = GradScaler(device, enabled=use_amp)
    train_set = make_data(args.batch_size * args.steps_per_epoch, 1)
    loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, pin_memory=use_amp)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(loader))

    for epoch in range(args.epochs):
        model.train()
        total, seen = torch.zeros((), device=device), 0
        for images, labels in loader:
            images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            with autocast(device, dtype=torch.float16 if use_amp else torch.bfloat16, enabled=use_amp):
                loss = criterion(model(images), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            total += loss.detach() * len(labels)
            seen += len(labels)
        total = total.item()
        print(f"Epoch [{epoch + 1}/{args.epochs}] loss {total / seen:.4f} lr {scheduler.get_last_lr()[0]:.5f}")
        state = {
            "epoch": epoch,
            "model": model.state_dict(),
            "optim": optimizer.state_dict(),
            "amp": scaler.state_dict(),
        }
        torch.save(state, args.output + ".tmp")
        os.replace(args.output + ".tmp", args.output)
    print(f"final loss {total / seen:.6f}")


if __name__ == "__main__":
    main(get_args())
