"""Avoid host waits for a GPU: while batches are copied to it, and where the script reads its loss."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from frameworm.attach.patches import Patches
from frameworm.attach.trial.switches import Switches
from frameworm.torch_private.tensors import parse_to

_Function = Callable[..., Any]


def intercept_host_waits(switches: Switches, patches: Patches) -> None:
    """Set the switches of tensors."""
    if switches.non_blocking:
        for name in ("to", "cuda"):
            patches.set(torch.Tensor, name, copying_ahead)
    if switches.late_losses:
        patches.set(torch.Tensor, "item", LateLosses().around)


def copying_ahead(original: _Function) -> _Function:
    """Wrap `Tensor.to` or `Tensor.cuda` to make copies from the host to a GPU asynchronous.

    The copy is ordered with the GPU's computation, and torch keeps page-locked memory until it is done. Copies to the
    host are unchanged, since the host may read them at once.
    """

    @functools.wraps(original)
    def copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type == "cpu" and copies_to_gpu(original.__name__, args, kwargs):
            kwargs["non_blocking"] = True
        return original(tensor, *args, **kwargs)

    return copy


def copies_to_gpu(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of `Tensor.to` or `Tensor.cuda` copies to a GPU without saying whether the host waits."""
    if len(args) > 1 or kwargs.keys() - {"device", "dtype"}:
        return False
    if name == "cuda":
        return True
    if not args and "device" not in kwargs:
        return False
    device = parse_to(*args, **kwargs).device
    return device is not None and device.type == "cuda"


class LateLosses:
    """Makes `loss.item()` not wait: each place in the code gets the value that it asked for the last time.

    The first read waits. Values read in evaluation are exact, as they have no gradient.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[CodeType, int], tuple[torch.Tensor, torch.Event]] = {}

    def around(self, original: _Function) -> _Function:
        """Wrap `Tensor.item`."""

        @functools.wraps(original)
        def item(tensor: Any) -> Any:
            if is_dynamo_compiling() or not (tensor.requires_grad and tensor.is_cuda):
                return original(tensor)
            frame = sys._getframe(1)
            place = (frame.f_code, frame.f_lasti)
            before = self._held.get(place)
            copy = torch.empty((), dtype=tensor.dtype, pin_memory=True)
            copy.copy_(tensor.detach().reshape(()), non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(tensor.device))
            self._held[place] = (copy, copied)
            if before is None:
                return original(tensor)
            before[1].synchronize()
            return original(before[0])

        return item
