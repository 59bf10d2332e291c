"""Graph network training that dies on a bad sample after some steps."""

import argparse

import torch
from torch import nn


class GraphConv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.own, self.near = nn.Linear(cin, cout), nn.Linear(cin, cout, bias=False)

    def forward(self, x, adjacency):
        return torch.relu(self.own(x) + self.near(adjacency @ x))


def load_graph(i, n, device, bad):
    g = torch.Generator().manual_seed(i)
    adjacency = (torch.rand(n, n, generator=g) < 0.05).float()
    adjacency = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
    if i == bad:
        raise ValueError(f"graph {i}: node 17 has no features")
    x = torch.randn(n, 32, generator=g)
    return x.to(device), adjacency.to(device), (adjacency @ x).sum(1).gt(0).long().to(device)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--graphs", type=int, default=400)
    parser.add_argument("--bad", type=int, default=120)
    parser.add_argument("--nodes", type=int, default=256)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = nn.ModuleList([GraphConv(32, 64), GraphConv(64, 64)]).to(device)
    head = nn.Linear(64, 2).to(device)
    optimizer = torch.optim.RMSprop([*layers.parameters(), *head.parameters()], lr=1e-3)
    for i in range(args.graphs):
        x, adjacency, y = load_graph(i, args.nodes, device, args.bad)
        for layer in layers:
            x = layer(x, adjacency)
        loss = nn.functional.cross_entropy(head(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 20 == 0:
            print(f"graph {i} loss {loss.item():.4f}", flush=True)
    torch.save(layers.state_dict(), "gnn.pt")


if __name__ == "__main__":
    main()
