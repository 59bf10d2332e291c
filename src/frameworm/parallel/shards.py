"""Between whole tensors and the shards of them that torch's fully_shard leaves on each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory; a plain tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: DTensor, device: torch.device) -> torch.Tensor:
    """The whole tensor on every rank; all ranks must call it. Parts that wait in host memory are sent from `device`."""
    part = tensor.to_local()
    if part.device.type != device.type:
        tensor = _like(tensor, part.to(device))
    return tensor.full_tensor()


def shard_of(value: torch.Tensor, like: DTensor) -> DTensor:
    """This rank's shard of a whole value, cut and placed as `like` is; a copy, and nobody is asked."""
    mesh = like.device_mesh
    parts = value.chunk(mesh.size(), 0)
    rank = mesh.get_local_rank()
    part = parts[rank] if rank < len(parts) else value[:0]
    own = like.to_local()
    assert part.shape == own.shape, (part.shape, own.shape)
    return _like(like, part.to(own.device, copy=True))


def gathered(state: Any, device: torch.device, keep: bool, seen: dict[int, torch.Tensor] | None = None) -> Any:
    """A copy of nested state in host memory with whole tensors; all ranks must call it, in the same order.

    Args:
        state: Tensors, shards and plain values in dicts and lists.
        device: Where collectives work.
        keep: Whether this rank wants the result; the others get None in place of tensors.
        seen: What was copied already: tensors that are the same object stay the same.
    """
    seen = {} if seen is None else seen
    if isinstance(state, torch.Tensor):
        if id(state) not in seen or not keep:
            full = whole(state, device) if isinstance(state, DTensor) else state
            if not keep:
                return None
            seen[id(state)] = full.detach().to("cpu", copy=True)
        return seen[id(state)]
    if isinstance(state, dict):
        return {name: gathered(part, device, keep, seen) for name, part in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(gathered(part, device, keep, seen) for part in state)
    return state


def _like(tensor: DTensor, part: torch.Tensor) -> DTensor:
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
