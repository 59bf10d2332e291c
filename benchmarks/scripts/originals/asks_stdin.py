"""Asks before it overwrites a checkpoint, then trains a matrix factorisation."""

import argparse
import sys

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", default="factors.pt")
    args = parser.parse_args()
    answer = input(f"Train and overwrite {args.out}? [y/N] ")
    if answer.strip().lower() != "y":
        sys.exit("aborted")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    users, items = nn.Embedding(2000, 32).to(device), nn.Embedding(3000, 32).to(device)
    optimizer = torch.optim.Adam([*users.parameters(), *items.parameters()], lr=1e-2)
    for step in range(args.steps):
        user, item = torch.randint(2000, (1024,), device=device), torch.randint(3000, (1024,), device=device)
        rating = ((user * 7 + item * 3) % 5).float() / 4
        loss = ((users(user) * items(item)).sum(1) - rating).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(step, loss.item())
    torch.save({"users": users.state_dict(), "items": items.state_dict()}, args.out)
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
