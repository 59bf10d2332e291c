"""Linear sketches: short vectors that preserve the lengths of large tensors and the angles between them.

A gradient has as many numbers as the model has parameters, too many to pass between processes at every compared state.
A sketch multiplies each element by a fixed random sign and adds the results into `WIDTH` sums. It is linear, so the
sketch of a difference is the difference of the sketches. Its squared length is unbiased and within 2% for a tensor of
any size. A tensor of up to `WIDTH` elements is its own sketch.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

WIDTH = 4096
_ROWS = 1024  # per chunk, which limits the memory of the conversion to fp64


@torch.no_grad()
def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sketch of a tensor, in fp64 on the CPU. With sharded tensors, all ranks must call it."""
    flat = dense(tensor).reshape(-1)
    count = flat.numel()
    if count <= WIDTH:
        return flat.to("cpu", torch.float64)
    sums = torch.zeros(WIDTH, dtype=torch.float64, device=flat.device)
    signs = _signs(count, flat.device)
    for begin in range(0, count, _ROWS * WIDTH):
        end = min(begin + _ROWS * WIDTH, count)
        signed = flat[begin:end].double() * signs[begin:end]
        whole = signed.numel() // WIDTH * WIDTH
        sums += signed[:whole].view(-1, WIDTH).sum(0)
        sums[: signed.numel() - whole] += signed[whole:]
    return sums.cpu()


def dense(tensor: Any) -> torch.Tensor:
    """Return the whole tensor in dense form; with sharded tensors, all ranks must call it."""
    whole: torch.Tensor = tensor.detach()
    if is_sharded(tensor):
        whole = tensor.detach().full_tensor()
    return whole.to_dense() if whole.layout != torch.strided else whole


def is_sharded(tensor: Any) -> bool:
    """True if a tensor is a DTensor; does not import the DTensor module, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


_known_signs: dict[torch.device, torch.Tensor] = {}  # as many as the largest tensor needed so far


def _signs(count: int, device: torch.device) -> torch.Tensor:
    """Plus or minus one for each index: one bit of a hash of the index, the same on every device."""
    known = _known_signs.get(device)
    if known is not None and len(known) >= count:
        return known
    signs = _known_signs[device] = torch.empty(count, dtype=torch.int8, device=device)
    for begin in range(0, count, _ROWS * WIDTH):
        index = torch.arange(begin, min(begin + _ROWS * WIDTH, count), device=device)
        mixed = (index + 1) * -7046029254386353131  # the multiplier of splitmix64; products wrap around
        mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
        signs[begin : begin + index.numel()] = ((mixed >> 32) & 1) * 2 - 1
    return signs
