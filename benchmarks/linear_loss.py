"""Linear head and cross-entropy, forward and backward: torch's own, ours, and Liger's where it is installed.

    PYTHONPATH=src python benchmarks/linear_loss.py --tokens 16384 --words 50304,128256 --width 2048 --rounds 5

All compute under bf16 autocast on a GPU and in fp32 on a CPU, from the same hidden states and weights. `torch` holds
the logits and, cast to fp32, once more, as Hugging Face's models do; `compiled` is the same by torch.compile. Liger
does not follow autocast, so it is given bf16. The loss of each is shown beside its time and, on a GPU, its peak memory
above what the inputs take.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import RESULTS, as_data, interleave, table, tell_progress, timed, times_as_fast, write_results
from torch import Tensor

from frameworm.models.linear_loss import linear_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
OURS, LIGER = "ours", "liger"
SEED = 20


def by_torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Logits, cast to fp32, then the loss."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def contenders(device: torch.device) -> dict[str, Loss]:
    """Who takes part here."""
    found: dict[str, Loss] = {"torch": by_torch, OURS: linear_cross_entropy}
    if device.type == "cuda":
        found["compiled"] = torch.compile(by_torch, dynamic=False)
        try:
            library = importlib.import_module("liger_kernel.transformers.functional")
        except ImportError:
            tell_progress("liger is not here: pip install liger-kernel")
        else:
            fused = library.liger_fused_linear_cross_entropy
            found[LIGER] = lambda hidden, weight, targets: fused(hidden.bfloat16(), weight.bfloat16(), targets)
    return found


def measure(tokens: int, words: int, width: int, rounds: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """All contenders in turns on one size."""
    hidden = torch.randn(tokens, width, device=device, requires_grad=True)
    weight = (torch.randn(words, width, device=device) * 0.02).requires_grad_()
    targets = torch.randint(words, (tokens,), device=device)
    losses: dict[str, float] = {}
    peaks: dict[str, int | None] = {}

    def step(loss_of: Loss) -> Tensor:
        hidden.grad = weight.grad = None
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(hidden, weight, targets)
        loss.backward()
        return loss.detach()

    blocks = {}
    for name, loss_of in contenders(device).items():
        losses[name] = float(step(loss_of))
        peaks[name] = _peak_bytes(partial(step, loss_of), device)
        blocks[name] = partial(timed, partial(step, loss_of), repeats, device)
    found = interleave(blocks, rounds, lambda text: None)
    rows = [
        (
            name,
            f"{found[name].step_s * 1e3:.2f}",
            "" if peaks[name] is None else f"{(peaks[name] or 0) / 2**20:,.0f}",
            f"{losses[name]:.4f}",
        )
        for name in found
    ]
    print(f"\n{tokens:,} tokens, {words:,} words\n{table(('', 'ms', 'peak MiB', 'loss'), rows)}", flush=True)
    ratios = {name: as_data(times_as_fast(found[OURS], found[name])) for name in found if name != OURS}
    times = {name: item.step_s * 1e3 for name, item in found.items()}
    return {"ms": times, "peak_bytes": peaks, "loss": losses, "ours_times_as_fast": ratios}


def _peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def main() -> int:
    """Time every size asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--words", default="32000,50304,128256", help="sizes of the vocabulary, comma between")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=10, help="steps in a row")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED)
    sizes = [int(words) for words in arguments.words.split(",")]
    settings = {name: getattr(arguments, name) for name in ("tokens", "width", "rounds", "repeats")}
    results = {}
    for words in sizes:
        results[str(words)] = measure(
            arguments.tokens, words, arguments.width, arguments.rounds, arguments.repeats, device
        )
    print(f"written to {write_results('linear_loss', device, settings, results, arguments.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
