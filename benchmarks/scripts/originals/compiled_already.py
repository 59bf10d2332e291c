"""MLP-Mixer whose author already calls torch.compile and uses the fused optimizer."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channel = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.token(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel(self.n2(x))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--dim", type=int, default=64)
    p.add_argument("--depth", type=int, default=3)
    a = p.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(16, a.dim), *[MixerBlock(24, a.dim) for _ in range(a.depth)], nn.Flatten())
    model.append(nn.Linear(24 * a.dim, 8))
    model = torch.compile(model.to(device))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x_all = torch.randn(2048, 24, 16, device=device)
    y_all = x_all.mean(1)[:, :8].argmax(1)
    for step in range(a.steps):
        pick = torch.randint(2048, (a.batch_size,), device=device)
        loss = F.cross_entropy(model(x_all[pick]), y_all[pick])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if step % 50 == 0:
            print(f"{step=} loss={loss.item():.4f}")
    torch.save(model.state_dict(), "mixer.pt")
    print(f"final loss={loss.item():.6f}")


if __name__ == "__main__":
    main()
