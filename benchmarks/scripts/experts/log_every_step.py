"""Speech-command style CNN whose author writes every number of every step into a CSV file."""

import argparse
import csv
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


class M5(nn.Module):
    def __init__(self, n_channel=16, n_output=12):
        super().__init__()
        self.conv1 = nn.Conv1d(1, n_channel, kernel_size=80, stride=16)
        self.bn1 = nn.BatchNorm1d(n_channel)
        self.conv2 = nn.Conv1d(n_channel, n_channel, kernel_size=3)
        self.bn2 = nn.BatchNorm1d(n_channel)
        self.conv3 = nn.Conv1d(n_channel, 2 * n_channel, kernel_size=3)
        self.bn3 = nn.BatchNorm1d(2 * n_channel)
        self.fc1 = nn.Linear(2 * n_channel, n_output)

    def forward(self, x):
        x = F.max_pool1d(F.relu(self.bn1(self.conv1(x))), 4)
        x = F.max_pool1d(F.relu(self.bn2(self.conv2(x))), 4)
        x = F.relu(self.bn3(self.conv3(x)))
        return self.fc1(x.mean(-1))


def write(writer, waiting, step):
    if waiting:
        rows = torch.stack([numbers for numbers, _ in waiting]).tolist()
        first = step - len(rows) + 1
        writer.writerows([first + i, *row, seconds] for i, (row, (_, seconds)) in enumerate(zip(rows, waiting)))
        waiting.clear()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--clips", type=int, default=3200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--log", default="metrics.csv")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tones = torch.randint(12, (args.clips,))
    t = torch.linspace(0, 1, 4000)
    clips = torch.sin(2 * torch.pi * (100 + 40 * tones[:, None]) * t) + 0.5 * torch.randn(args.clips, 4000)
    loader = DataLoader(TensorDataset(clips.unsqueeze(1), tones), batch_size=args.batch_size, shuffle=True)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    model = M5(args.channels).to(device)
    if device.type == "cuda":
        model.compile()  # slower on a CPU
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=0.0001, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=200, gamma=0.5)

    step, waiting = 0, []
    with open(args.log, "w", newline="") as f:
        writer = csv.writer(f)
        writer.writerow(["step", "loss", "accuracy", "grad_norm", "weight_norm", "seconds"])
        for epoch in range(args.epochs):
            model.train()
            progress = tqdm(loader, desc=f"epoch {epoch}")
            for data, target in progress:
                start = time.time()
                data, target = data.to(device), target.to(device)
                output = model(data)
                loss = F.cross_entropy(output, target)
                optimizer.zero_grad()
                loss.backward()
                grad_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
                optimizer.step()
                scheduler.step()
                weight_norm = torch.nn.utils.get_total_norm([p.detach() for p in model.parameters()])
                accuracy = (output.argmax(1) == target).float().mean()
                step += 1
                waiting.append((torch.stack([loss.detach(), accuracy, grad_norm, weight_norm]), time.time() - start))
                if len(waiting) == 50:  # the numbers are read, and written, fifty steps at a time
                    write(writer, waiting, step)
                    f.flush()
                    progress.set_postfix(loss=f"{loss.item():.4f}")
            write(writer, waiting, step)
            f.flush()
            torch.save(model.state_dict(), "m5.pt")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
