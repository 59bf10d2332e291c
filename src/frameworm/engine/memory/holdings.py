"""What holds the memory: parameters, gradients, optimizer state, and the largest live tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from frameworm.torch_private.tensors import local_part

MEBIBYTE = 2**20
MOST_TENSORS = 5
# This many scalars that still hold a graph are no coincidence.
MANY_GRAPHS = 100


@dataclass(frozen=True)
class Held:
    """Bytes on one device, or in one process, by what holds them."""

    parameters: int
    gradients: int
    optimizer_state: int
    rest: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.parameters + self.gradients + self.optimizer_state + self.rest

    def to_dict(self) -> dict[str, int]:
        """Return the parts by name."""
        return asdict(self)

    def in_words(self) -> str:
        """Describe the parts in one line."""
        return (
            f"parameters {mebibytes(self.parameters)}, gradients {mebibytes(self.gradients)}, optimizer state "
            f"{mebibytes(self.optimizer_state)}, activations and the rest {mebibytes(self.rest)}"
        )


def mebibytes(count: float) -> str:
    """Format bytes for people."""
    size = count / MEBIBYTE
    return f"{size:,.1f} MiB" if size < 100 else f"{size:,.0f} MiB"


def held_by(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, *, peak: bool = False) -> Held:
    """Measure what this rank holds on its device.

    Args:
        model: The model.
        optimizer: Its optimizer.
        device: The device.
        peak: Whether the total is the peak so far (GPU only), since what failed to fit may be freed by now.
    """
    parameters = list(model.parameters())
    gradients = [item.grad for item in parameters if item.grad is not None]
    # A ZeroRedundancyOptimizer keeps its part in an inner optimizer.
    state = getattr(optimizer, "optim", optimizer).state
    held = [
        _bytes(group, device)
        for group in (
            [*parameters, *model.buffers()],
            gradients,
            [value for values in state.values() for value in values.values() if isinstance(value, Tensor)],
        )
    ]
    if device.type == "cuda":
        total = torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)
    else:
        total = int(psutil.Process().memory_info().rss)
    return Held(held[0], held[1], held[2], max(total - sum(held), 0))


def largest_tensors(device: torch.device, most: int = MOST_TENSORS) -> list[str]:
    """Describe the largest groups of live tensors of one shape and dtype that Python knows of."""
    sizes: dict[tuple[tuple[int, ...], str, bool], tuple[int, int]] = {}
    seen: set[int] = set()
    graphs = 0
    for tensor in _live_tensors():
        try:
            storage = tensor.untyped_storage()
            if tensor.device.type != device.type or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            key = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.grad_fn is not None
            graphs += tensor.dim() == 0 and key[2]
            count, total = sizes.get(key, (0, 0))
            sizes[key] = count + 1, total + storage.nbytes()
        except Exception:
            continue
    ranked = sorted(sizes.items(), key=lambda item: -item[1][1])[:most]
    lines = [
        f"{count} x {list(shape)} {kind}{', with a graph' if graph else ''}: {mebibytes(total)}"
        for (shape, kind, graph), (count, total) in ranked
    ]
    if graphs >= MANY_GRAPHS:
        lines.append(f"{graphs} scalars keep the graph of their step: keep loss.detach() or loss.item(), not the loss")
    return lines


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> str:
    """Describe in a few lines what holds memory right now."""
    held = held_by(model, optimizer, device)
    where = "this process" if device.type == "cpu" else str(device)
    lines = [f"{where} holds {mebibytes(held.total)}: {held.in_words()}"]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        lines.append(
            f"allocated {mebibytes(torch.cuda.memory_allocated(device))}, reserved "
            f"{mebibytes(torch.cuda.memory_reserved(device))}, free on the device {mebibytes(free)} of "
            f"{mebibytes(total)}; this process on the host {mebibytes(psutil.Process().memory_info().rss)}"
        )
    tensors = largest_tensors(device)
    if tensors:
        lines += ["largest tensors made in training:", *(f"  {line}" for line in tensors)]
    return "\n".join(lines)


def _live_tensors() -> Iterator[Tensor]:
    for item in gc.get_objects():
        # isinstance reads __class__, which has side effects on some objects.
        if issubclass(type(item), Tensor):
            yield item


def _bytes(tensors: Iterable[Any], device: torch.device) -> int:
    """Sum the bytes of distinct storages on the device; of a sharded tensor, this rank's shard."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        own = local_part(tensor)
        if own.device.type == device.type:
            storage = own.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
