"""Denoising diffusion on 16x16 images with a small U-Net and an exponential moving average of the weights."""

import argparse
import copy
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    def update(self, model):
        with torch.no_grad():
            torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), 1 - self.decay)


class ResBlock(nn.Module):
    def __init__(self, cin, cout, tdim):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, cin), nn.GroupNorm(4, cout)
        self.conv1, self.conv2 = nn.Conv2d(cin, cout, 3, padding=1), nn.Conv2d(cout, cout, 3, padding=1)
        self.time = nn.Linear(tdim, cout)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.skip(x)


class UNet(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.ch = ch
        self.time = nn.Sequential(nn.Linear(ch, 4 * ch), nn.SiLU(), nn.Linear(4 * ch, 4 * ch))
        self.stem = nn.Conv2d(3, ch, 3, padding=1)
        self.down1, self.down2 = ResBlock(ch, ch, 4 * ch), ResBlock(ch, 2 * ch, 4 * ch)
        self.mid = ResBlock(2 * ch, 2 * ch, 4 * ch)
        self.up2, self.up1 = ResBlock(4 * ch, ch, 4 * ch), ResBlock(2 * ch, ch, 4 * ch)
        self.out = nn.Sequential(nn.GroupNorm(4, ch), nn.SiLU(), nn.Conv2d(ch, 3, 3, padding=1))

    def forward(self, x, t):
        half = self.ch // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half, device=x.device) / half)
        angles = t[:, None].float() * freqs
        emb = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        h1 = self.down1(self.stem(x), emb)
        h2 = self.down2(F.avg_pool2d(h1, 2), emb)
        h = self.mid(F.avg_pool2d(h2, 2), emb)
        h = self.up2(torch.cat([F.interpolate(h, scale_factor=2), h2], 1), emb)
        h = self.up1(torch.cat([F.interpolate(h, scale_factor=2), h1], 1), emb)
        return self.out(h)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=16)
    parser.add_argument("--timesteps", type=int, default=1000)
    parser.add_argument("--ema-decay", type=float, default=0.995)
    parser.add_argument("--results", type=Path, default=Path("./results"))
    args = parser.parse_args()
    args.results.mkdir(exist_ok=True)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    model = UNet(args.channels).to(device, memory_format=torch.channels_last)
    ema = EMA(model, args.ema_decay)
    if device.type == "cuda":
        model.compile()  # no faster on a CPU
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.9, 0.99), fused=True)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, args.timesteps), 0).to(device)
    line = torch.linspace(-1, 1, args.image_size)
    images = torch.sin(3 * line[None, :, None] * torch.randn(1024, 1, 1) + 3 * line * torch.randn(1024, 1, 1))
    loader = DataLoader(
        TensorDataset(images[:, None].repeat(1, 3, 1, 1)), args.batch_size, shuffle=True, drop_last=True
    )

    def cycle(dl):
        while True:
            yield from dl

    batches = cycle(loader)
    for step in range(1, args.train_steps + 1):
        (x0,) = next(batches)
        x0 = x0.to(device)
        t = torch.randint(0, args.timesteps, (len(x0),)).to(device)
        noise = torch.randn(x0.shape).to(device)
        a = alphas[t].view(-1, 1, 1, 1)
        noisy = (a.sqrt() * x0 + (1 - a).sqrt() * noise).contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.mse_loss(model(noisy, t), noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model)
        if step % 50 == 0:
            print(f"step {step}/{args.train_steps} loss {loss.item():.4f}")
            torch.save({"model": model.state_dict(), "ema": ema.model.state_dict()}, args.results / "model.pt")
    check = sum(p.double().abs().sum().item() for p in ema.model.parameters())
    print(f"ema checksum {check:.4f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
