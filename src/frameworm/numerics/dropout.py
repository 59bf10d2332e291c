"""Dropout switched off for a comparison, whatever kernels would draw it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import _VF, nn
from torch.nn import functional

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
    """Whether a comparison has switched dropout off; for kernels of ours, which draw it themselves."""
    return bool(_switched_off)


class DropoutOff:
    """Makes torch's functions that drop elements keep them all; a compiled model must be traced inside.

    Random numbers that a model draws by other means are drawn as ever.

    Args:
        model: Its recurrent layers hold their own dropout.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [(layer, layer.dropout) for layer in model.modules() if isinstance(layer, nn.RNNBase)]
        self._patches = contextlib.ExitStack()

    def start(self) -> None:
        """Switch it off, until `stop`."""
        _switched_off.append(self)
        for holder, name, replacement in list(_held()):
            self._patches.enter_context(mock.patch.object(holder, name, replacement))
        for layer, _ in self._layers:
            layer.dropout = 0.0

    def stop(self) -> None:
        """Put everything back."""
        if self in _switched_off:
            _switched_off.remove(self)
        self._patches.close()
        for layer, share in self._layers:
            layer.dropout = share

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside it dropout is as in training."""
        self.stop()
        try:
            yield
        finally:
            self.start()


def _held() -> Iterator[tuple[object, str, Any]]:
    """Where torch's functions are found: their own modules, and every module that has imported one by name."""
    replacements: dict[int, Any] = {id(_attention): _attend}
    for name in (*_DROPPING, *(f"{name}_" for name in _DROPPING)):
        if hasattr(_VF, name):  # what the functions call, for those that are held elsewhere than in a module
            yield _VF, name, _keep
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
