"""Modules: the call that torch.compile replaces, and what wraps a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from frameworm.torch_private.lookup import attribute


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """A module's call with its hooks, as written."""
    call: Callable[..., Any] = attribute(module, "_call_impl")
    return call


def compiled_call(module: nn.Module) -> Any:
    """What runs instead of `plain_call`, where `module.compile()` or `set_compiled_call` put it; None: nothing."""
    return attribute(module, "_compiled_call_impl")


def set_compiled_call(module: nn.Module, call: Any) -> None:
    """Run something instead of `plain_call`; None: nothing. Copies and saved models leave it out."""
    attribute(nn.Module, "_compiled_call_impl")  # where torch does not ask for it, nothing would be compiled
    module._compiled_call_impl = call


def is_wrapped_by_compiler(module: nn.Module) -> bool:
    """Whether a model is what `torch.compile(model)` returns."""
    return hasattr(module, "_orig_mod")


def without_compiler(module: nn.Module) -> nn.Module:
    """The model inside of what `torch.compile(model)` returns; every other model as it is.

    Without the attribute weights would go by other names, which checkpoints refuse.
    """
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def pre_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The forward pre-hooks of a module."""
    return list(attribute(module, "_forward_pre_hooks").values())


def change_own_tensors(module: nn.Module, change: Callable[[Any], Any]) -> None:
    """`module.to` for its own tensors without those of its children."""
    attribute(module, "_apply")(change, recurse=False)
