"""
Pretrain a small GPT on synthetic text; gradients are accumulated over several micro-batches.
$ python gpt_accumulation.py --max_iters 200
"""

import argparse
import math
import os
import time

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--out_dir", default="out")
parser.add_argument("--max_iters", type=int, default=200)
parser.add_argument("--log_interval", type=int, default=10)
parser.add_argument("--eval_interval", type=int, default=100)
parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
parser.add_argument("--batch_size", type=int, default=4)
parser.add_argument("--block_size", type=int, default=32)
parser.add_argument("--n_layer", type=int, default=2)
parser.add_argument("--n_head", type=int, default=2)
parser.add_argument("--n_embd", type=int, default=64)
parser.add_argument("--vocab_size", type=int, default=256)
parser.add_argument("--learning_rate", type=float, default=1e-3)
args = parser.parse_args()
warmup_iters, min_lr, weight_decay, grad_clip = 10, 1e-4, 1e-1, 1.0


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.wte = nn.Embedding(a.vocab_size, a.n_embd)
        self.wpe = nn.Embedding(a.block_size, a.n_embd)
        self.h = nn.ModuleList([Block(a.n_embd, a.n_head) for _ in range(a.n_layer)])
        self.ln_f = nn.LayerNorm(a.n_embd)
        self.lm_head = nn.Linear(a.n_embd, a.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight  # https://paperswithcode.com/method/weight-tying
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


os.makedirs(args.out_dir, exist_ok=True)
torch.manual_seed(1337)
rng = np.random.default_rng(1337)
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_float32_matmul_precision("high")
window = torch.arange(args.block_size + 1)
# a text in which every token depends on the one before
data = torch.from_numpy(np.cumsum(rng.integers(0, 4, 200_000)) % args.vocab_size)


def get_batch():
    ix = torch.randint(len(data) - args.block_size - 1, (args.batch_size,))
    rows = data[ix[:, None] + window]
    if device == "cuda":
        rows = rows.pin_memory().to(device, non_blocking=True)
    return rows[:, :-1], rows[:, 1:].contiguous()


def get_lr(it):
    if it < warmup_iters:
        return args.learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / max(1, args.max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (args.learning_rate - min_lr)


model = GPT(args).to(device)
model.compile()
params = [p for p in model.parameters() if p.requires_grad]
optim_groups = [
    {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
    {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(optim_groups, lr=args.learning_rate, betas=(0.9, 0.95), fused=True)
print(f"number of parameters: {sum(p.numel() for p in params) / 1e6:.2f}M")

t0 = time.time()
for iter_num in range(args.max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    for micro_step in range(args.gradient_accumulation_steps):
        X, Y = get_batch()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits, loss = model(X, Y)
        loss = loss / args.gradient_accumulation_steps
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    t1 = time.time()
    dt, t0 = t1 - t0, t1
    if iter_num % args.log_interval == 0:
        lossf = loss.item() * args.gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}, time {dt * 1000:.2f}ms")
    if iter_num and iter_num % args.eval_interval == 0:
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
        torch.save(checkpoint, os.path.join(args.out_dir, "ckpt.pt"))
print(f"final loss {loss.item() * args.gradient_accumulation_steps:.6f}")
