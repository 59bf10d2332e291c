"""The tensors that a training step changes: copies them, restores them in place, and passes them to other processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frameworm.numerics.sketch import dense, is_sharded

Named = dict[str, torch.Tensor]


class StepTensors:
    """Live tensors by name. Values are copied into them, so that the addresses in a CUDA graph stay valid.

    Args:
        parameters: Names and parameters.
        buffers: Names and buffers.
        optimizer: Its state for these parameters is included; state that does not exist yet is looked up at every call.
        others: Returns further tensors, such as a loss scale, which may appear later.
        restored: Called after values were restored, for copies of them elsewhere; tensors keep their version counters.
        own_shards: Use only this process's shard of sharded tensors; otherwise the whole tensor.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        buffers: Iterable[tuple[str, torch.Tensor]],
        optimizer: torch.optim.Optimizer | None = None,
        others: Callable[[], Mapping[str, torch.Tensor]] = dict,
        *,
        restored: Callable[[], None] = lambda: None,
        own_shards: bool = False,
    ) -> None:
        self.parameters = dict(parameters)
        self.buffers = dict(buffers)
        self._optimizer = optimizer
        self._others = others
        self._restored = restored
        self._own_shards = own_shards

    def live(self) -> Named:
        """Return all tensors as they are now, without copying."""
        found: Named = {f"parameter {name}": item.data for name, item in self.parameters.items()}
        found.update((f"buffer {name}", item) for name, item in self.buffers.items())
        found.update((f"other {name}", item) for name, item in self._others().items())
        for name, state in self._optimizer_states():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[f"optimizer {name} {key}"] = value
        return {name: own_shard(item) for name, item in found.items()} if self._own_shards else found

    def _optimizer_states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._optimizer is not None:
            for name, item in self.parameters.items():
                if self._optimizer.state.get(item):
                    yield name, self._optimizer.state[item]

    @torch.no_grad()
    def copy(self) -> Named:
        """Return copies of all values, including the plain numbers in the optimizer's state."""
        found = {name: tensor.detach().clone() for name, tensor in self.live().items()}
        for name, state in self._optimizer_states():
            for key, value in state.items():
                if isinstance(value, (int, float)):
                    found[f"optimizer {name} {key}"] = torch.tensor(value, dtype=torch.float64)
        return found

    @torch.no_grad()
    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Write saved values into the live tensors of the same names; other tensors are unchanged."""
        for name, tensor in self.live().items():
            value = saved.get(name)
            if value is None:
                continue
            if is_sharded(tensor) and not is_sharded(value):
                value = _distributed_like(value, tensor)
            tensor.copy_(value)
        for name, state in self._optimizer_states():
            set_numbers(state, name, saved)
        self._restored()

    def forget_new(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Delete the optimizer state of parameters that had none when the values were saved."""
        if self._optimizer is None:
            return
        for name, item in self.parameters.items():
            state = self._optimizer.state.get(item, {})
            tensors = [key for key, value in state.items() if isinstance(value, torch.Tensor)]
            if tensors and not any(f"optimizer {name} {key}" in saved for key in tensors):
                del self._optimizer.state[item]


def set_numbers(state: dict[str, Any], name: str, saved: Mapping[str, torch.Tensor]) -> None:
    """Set the plain numbers in a parameter's optimizer state to saved ones."""
    for key, value in state.items():
        if isinstance(value, (int, float)) and (kept := saved.get(f"optimizer {name} {key}")) is not None:
            state[key] = type(value)(kept.item())


def _distributed_like(value: torch.Tensor, sharded: Any) -> torch.Tensor:
    from torch.distributed.tensor import distribute_tensor  # already imported: a sharded tensor exists

    return distribute_tensor(value.to(sharded.device), sharded.device_mesh, sharded.placements)


@torch.no_grad()
def own_shard(tensor: Any) -> torch.Tensor:
    """Return this process's part of a tensor, without copying."""
    own: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return own


def whole(saved: Mapping[str, torch.Tensor]) -> Named:
    """Return saved tensors unsharded and on the CPU; all ranks must call it."""
    return {name: dense(tensor).cpu() for name, tensor in saved.items()}


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that appears under its name only once it is complete."""
    partial = path.with_suffix(".partial")
    checked = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # takes half the time, for a file that exists for seconds
    try:
        torch.save(dict(content), partial)
    finally:
        torch.serialization.set_crc32_options(checked)
    partial.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Read a file written by `write`; only tensors and plain values are allowed."""
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return content
