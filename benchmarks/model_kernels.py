"""How long the models' own Triton kernels take on a GPU, with the shapes of their tiles that ship and with others.

    PYTHONPATH=src python benchmarks/model_kernels.py --cases norm,causal,short,loss --rounds 5

- norm: layer norm's backward with the stream (kernels/norm.py), 65,536 tokens 768 wide: GPT-2 124M, 64 sequences
- causal: attention over 64 sequences of 1,024 tokens, 12 heads 64 wide, forward, and backward for queries and for keys
- short: attention over packed texts of 20 to 128 tokens, 8 heads 32 wide, forward and backward
- loss: softmax and its gradient over 9,472 rows of 50,304 logits

`torch` is what the same work takes by torch's own operations, compiled where they are not one operation already. Times
are CUDA events around `--repeats` launches; all shapes of a kernel take turns. So the shapes that ship can be checked,
and found anew for another GPU: they are constants beside the kernels. Each shape is compiled once, about a second of
the host (norm: three minutes); what is measured is written after every kernel.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from harness import RESULTS, as_data, interleave, names_among, table, tell_progress, timed, times_as_fast, write_results
from torch import Tensor

Work = Callable[[], object]
SHIPPED, BY_TORCH = "shipped", "torch"
SEED = 20


def shaped(work: Work, module: Any, names: tuple[str, ...], values: tuple[Any, ...]) -> Work:
    """The same work while constants of a module have other values."""

    def run() -> None:
        with mock.patch.multiple(module, **dict(zip(names, values))):
            work()

    return run


def with_shapes(work: Work, module: Any, names: tuple[str, ...], shapes: Iterable[tuple[Any, ...]]) -> dict[str, Work]:
    """The work with the shapes that ship, and with each of the others."""
    present = tuple(getattr(module, name) for name in names)
    found = {f"{SHIPPED} {_word(present)}": work}
    for values in shapes:
        if values != present:
            found[_word(values)] = shaped(work, module, names, values)
    return found


def _word(values: tuple[Any, ...]) -> str:
    return "x".join(_word(value) if isinstance(value, tuple) else str(value) for value in values)


def drawn(*sizes: int, device: torch.device) -> Tensor:
    """Random numbers: bf16 on a GPU; triton's interpreter takes fp32."""
    return torch.randn(sizes, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)


def norm(small: bool, device: torch.device) -> dict[str, dict[str, Work]]:
    """Layer norm's backward."""
    from frameworm.models.kernels import norm as norm_kernels
    from frameworm.models.stream_norm import norm_backward_in_steps

    rows, width = (16, 64) if small else (65_536, 768)
    gradient, stream, inputs = (drawn(rows, width, device=device) for _ in range(3))
    weight, means = torch.randn(width, device=device), inputs.float().mean(1)
    scales = (inputs.float().var(1, correction=0) + 1e-5).rsqrt()

    shapes = [
        shape
        for shape in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 3, 4))
        if 16 <= shape[0] * 32 // shape[1] <= 64 and shape[1] * shape[2] <= 32
    ]
    names = ("_ROWS", "_WARPS", "_PROGRAMS_EACH", "_STAGES")
    given = (gradient, stream, inputs, weight, means, scales)
    work = partial(norm_kernels.norm_backward, *given)
    reference = partial(torch.compile(norm_backward_in_steps, dynamic=False), *given)
    return {"norm": {**with_shapes(work, norm_kernels, names, shapes[:1] if small else shapes), BY_TORCH: reference}}


def causal(small: bool, device: torch.device) -> dict[str, dict[str, Work]]:
    """Attention over sequences of one length."""
    from frameworm.models import causal_attention

    sizes = (1, 128, 3, 1, 32) if small else (64, 1024, 3, 12, 64)
    heads = drawn(*sizes, device=device)
    bias = heads.new_zeros(heads[0, 0].numel())
    mixed, log_totals = causal_attention._causal_attention(heads, bias)
    gradient = torch.randn_like(mixed)
    forward = partial(causal_attention._causal_attention, heads, bias)
    backward = partial(causal_attention._causal_attention_backward, gradient, heads, mixed, log_totals)
    query, key, value = (part.detach().transpose(1, 2).requires_grad_() for part in heads.unbind(2))
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def torch_backward() -> object:
        return torch.autograd.grad(attended, (query, key, value), gradient.transpose(1, 2), retain_graph=True)

    tiles = [
        ((own, other, warps, stages, registers),)
        for own, other, (warps, stages), registers in itertools.product(
            (64, 128), (32, 64), ((4, 2), (4, 3), (8, 2), (8, 3)), (None, 96, 128, 168)
        )
        if registers is None or (own == 64 and warps == 4)  # more threads or rows would not fit into so few
    ][: 1 if small else None]
    shaped_by = partial(with_shapes, module=causal_attention, shapes=tiles)
    return {
        "causal forward": {
            **shaped_by(forward, names=("_FORWARD_TILES",)),
            BY_TORCH: lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True),
        },
        "causal backward, queries": {**shaped_by(backward, names=("_QUERY_TILES",)), BY_TORCH: torch_backward},
        "causal backward, keys": {**shaped_by(backward, names=("_KEY_TILES",)), BY_TORCH: torch_backward},
    }


def short(small: bool, device: torch.device) -> dict[str, dict[str, Work]]:
    """Attention over packed texts."""
    from frameworm.models import short_attention

    lengths = torch.randint(
        20, 41 if small else 129, (2 if small else 128,), generator=torch.Generator().manual_seed(SEED)
    )
    offsets = F.pad(lengths.cumsum(0), (1, 0)).int().to(device)
    tokens, longest = int(lengths.sum()), int(lengths.max())
    heads = drawn(tokens, 3, 1 if small else 8, 32, device=device)
    mixed, log_totals = short_attention._short_attention(heads, offsets, longest, False)
    gradient = torch.randn_like(mixed)
    forward = partial(short_attention._short_attention, heads, offsets, longest, False)
    backward = partial(
        short_attention._short_attention_backward, gradient, heads, mixed, log_totals, offsets, longest, False
    )
    tiles = [
        ((own, other, warps, stages),)
        for own, other, (warps, stages) in itertools.product((32, 64, 128), (32, 64), ((2, 2), (4, 2), (4, 3), (8, 2)))
    ][: 1 if small else None]
    shaped_by = partial(with_shapes, module=short_attention, shapes=tiles)
    return {
        "short forward": shaped_by(forward, names=("_FORWARD_TILES",)),
        "short backward": shaped_by(backward, names=("_BACKWARD_TILES",)),
    }


def loss(small: bool, device: torch.device) -> dict[str, dict[str, Work]]:
    """Softmax and its gradient over the logits; the gradient of a gradient is as good to time."""
    from frameworm.models import linear_loss
    from frameworm.models.kernels import cross_entropy as kernels

    rows, words = (2, 9_000) if small else (9_472, 50_304)
    logits = drawn(rows, words, device=device)
    targets = torch.randint(0, words, (rows,), device=device)
    losses = torch.empty(rows, device=device)

    shapes = [
        (256 * parts * warps, parts, warps, programs)
        for parts, warps, programs in itertools.product((1, 2, 4), (4, 8, 16), (2, 3, 4, 6, 8))
        if warps * programs <= 64
    ]
    given = (logits, targets, losses, -100, True)
    work = partial(kernels.cross_entropy_rows, *given)
    names = ("_BLOCK", "_PARTS", "_WARPS", "_PROGRAMS_EACH")
    reference = partial(torch.compile(linear_loss._cross_entropy_rows, dynamic=False), *given)
    return {"loss": {**with_shapes(work, kernels, names, shapes[:1] if small else shapes), BY_TORCH: reference}}


CASES = {"norm": norm, "causal": causal, "short": short, "loss": loss}


def why_not(work: Work) -> str | None:
    """Why a shape cannot be used, if it cannot: too much shared memory, or nothing the compiler knows."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def measure(name: str, contenders: dict[str, Work], rounds: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """All shapes of one kernel in turns."""
    tell_progress(f"{name}: {len(contenders)} ways")
    ships = next(label for label in contenders if label.startswith(SHIPPED))
    others = {label: work for label, work in contenders.items() if label not in (ships, BY_TORCH)}
    refused = {label: why for label, work in others.items() if (why := why_not(work)) is not None}
    blocks = {
        label: partial(timed, work, repeats, device) for label, work in contenders.items() if label not in refused
    }
    found = interleave(blocks, rounds, lambda text: None)
    ranked = sorted(found, key=lambda label: found[label].step_s)
    rows = [(label, f"{found[label].step_s * 1e6:.1f}") for label in ranked[:6]]
    rows += [(label, f"{found[label].step_s * 1e6:.1f}") for label in (ships, BY_TORCH) if label in ranked[6:]]
    print(f"\n{name}\n{table(('rows x ... as named beside the kernel', 'us'), rows)}", flush=True)
    shapes = [label for label in ranked if label != BY_TORCH]
    results: dict[str, Any] = {
        "us": {label: found[label].step_s * 1e6 for label in ranked},
        "refused": refused,
        "best_beside_shipped": as_data(times_as_fast(found[shapes[0]], found[ships])),
    }
    if BY_TORCH in found:
        results["shipped_beside_torch"] = as_data(times_as_fast(found[ships], found[BY_TORCH]))
    return results


def main() -> int:
    """Time the kernels asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=names_among(CASES), default=list(CASES), help="names, comma between")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=10, help="launches in a row")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, also without a GPU in triton's interpreter")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" and not arguments.smoke:
        print("the kernels are for GPUs, and there is none here; --smoke tries the script with TRITON_INTERPRET=1")
        return 2
    torch.manual_seed(SEED)
    results = {}
    settings = {"rounds": arguments.rounds, "repeats": arguments.repeats, "cases": arguments.cases}
    for case in arguments.cases:
        for name, contenders in CASES[case](arguments.smoke, device).items():
            results[name] = measure(name, contenders, arguments.rounds, arguments.repeats, device)
            written = write_results("model_kernels", device, settings, results, arguments.out)
    print(f"written to {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
