"""Starts training in the background, prints the process id and returns at once; the log goes to train.log."""

import argparse
import os
import sys


def daemonise(log):
    if os.fork():
        os._exit(0)
    os.setsid()
    pid = os.fork()
    if pid:
        print(f"training in the background, pid {pid}, log {log}", flush=True)
        os._exit(0)
    with open(log, "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)


def train(steps):
    import torch
    from torch import nn

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.GRU(16, 64, batch_first=True).to(device)
    head = nn.Linear(64, 1).to(device)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
    for step in range(steps):
        x = torch.randn(32, 20, 16, device=device)
        loss = (head(model(x)[0][:, -1]).squeeze(1) - x.sum((1, 2)) / 20).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "background.pt")
    print(f"final loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--log", default="train.log")
    args = parser.parse_args()
    sys.stdout.flush()
    daemonise(args.log)
    train(args.steps)
