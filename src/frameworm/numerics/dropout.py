"""Switches dropout off for a comparison, whichever kernels implement it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from frameworm.torch_private.operators import FUNCTIONS

_DROPPING = (
    "dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "feature_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
)
_attention = functional.scaled_dot_product_attention
_switched_off: list[DropoutOff] = []


def dropout_is_off() -> bool:
    """True if a comparison has switched dropout off; for our own kernels, which implement dropout themselves."""
    return bool(_switched_off)


class DropoutOff:
    """Makes torch's dropout functions keep all elements; a compiled model must be traced while this is active.

    Random numbers that a model draws in other ways are unaffected.

    Args:
        model: Its recurrent layers have their own dropout.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [(layer, layer.dropout) for layer in model.modules() if isinstance(layer, nn.RNNBase)]
        self._patches = contextlib.ExitStack()

    def start(self) -> None:
        """Switch dropout off until `stop`."""
        _switched_off.append(self)
        for holder, name, replacement in list(_held()):
            self._patches.enter_context(mock.patch.object(holder, name, replacement))
        for layer, _ in self._layers:
            layer.dropout = 0.0

    def stop(self) -> None:
        """Restore everything."""
        if self in _switched_off:
            _switched_off.remove(self)
        self._patches.close()
        for layer, share in self._layers:
            layer.dropout = share

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Context manager in which dropout is active, as in training."""
        self.stop()
        try:
            yield
        finally:
            self.start()


def _held() -> Iterator[tuple[object, str, Any]]:
    """Yield every place that holds torch's functions: their modules, and modules that imported one by name."""
    replacements: dict[int, Any] = {id(_attention): _attend}
    for name in (*_DROPPING, *(f"{name}_" for name in _DROPPING)):
        if hasattr(FUNCTIONS, name):  # called by the functions, for copies of those that are stored outside a module
            yield FUNCTIONS, name, _keep
        for owner in (functional, torch):
            if hasattr(owner, name):
                replacements[id(getattr(owner, name))] = _keep
    for module in list(sys.modules.values()):
        held = getattr(module, "__dict__", {})
        if held is not globals():
            yield from (
                (module, name, replacements[id(value)]) for name, value in held.items() if id(value) in replacements
            )


def _keep(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return input


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    *args: Any,
    **options: Any,
) -> torch.Tensor:
    return _attention(query, key, value, attn_mask, 0.0, *args, **options)
