"""Autograd, profiler, processes and files: what torch is doing in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from frameworm.torch_private.lookup import attribute, function

# Whether a torch.profiler records at this moment; asked in every step.
profiler_enabled: Callable[[], bool] = function(torch._C._autograd, "_profiler_enabled")


def run_after_backward(callback: Callable[[], None]) -> None:
    """Have autograd call something when the backward pass that runs now has nothing left to compute."""
    attribute(torch.autograd.Variable, "_execution_engine").queue_callback(callback)


def run_backward(loss: torch.Tensor) -> None:
    """`loss.backward()`, unseen by modes that watch functions of torch."""
    engine = attribute(torch.autograd.Variable, "_execution_engine")
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True)


def in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return bool(attribute(torch._C, "_current_graph_task_id")() != -1)


def cuda_lost_in_fork() -> bool:
    """Whether CUDA was begun before this process was forked, after which it cannot be used here."""
    return bool(attribute(torch.cuda, "_is_in_bad_fork")())


def attention_order() -> list[int]:
    """Kernels for attention in the order in which torch tries them."""
    return list(attribute(torch._C, "_get_sdp_priority_order")())


def set_attention_order(order: Iterable[int]) -> None:
    """Change `attention_order` for the process; the public way does so for the length of a context only."""
    attribute(torch._C, "_set_sdp_priority_order")(list(order))


def names_of_functions(names: str, owners: Iterable[Any]) -> frozenset[Any]:
    """All functions that go by these names in some modules and in the one where torch keeps built-in layers."""
    places = (*owners, torch._C._nn)
    found = [getattr(owner, name, None) for name in names.split() for owner in places]
    return frozenset(item for item in found if item is not None)


# Where `torch.save` writes the entries of an archive, as (owner, name) for a patch; without it files are not signed.
SAVE_ARCHIVE = (torch.serialization, "_save")
