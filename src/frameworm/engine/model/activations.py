"""Activation checkpointing: layers whose activations are recomputed in backward instead of being kept.

A layer's class is replaced by a subclass of the same name whose `forward` recomputes. The module thus stays the same
object with the same state dict, and its copies, replicas and compiled versions recompute too.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from frameworm.config.schema import MemoryConfig
from frameworm.errors import ConfigError
from frameworm.models.blocks import find_repeated_blocks

Mode = Literal["off", "full", "selective"]

# What `selective` keeps: expensive to compute, small to store. Everything else is recomputed.
_KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::convolution",
        "aten::_scaled_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "torch_attn::_varlen_attn",
        "frameworm::linear",
        "frameworm::short_attention",
        "frameworm::causal_attention",
        "flex_attention",
    }
)
_BASE = "_frameworm_recomputes"
_made: dict[tuple[type[nn.Module], Mode], type[nn.Module]] = {}


def apply_checkpointing(model: nn.Module, memory: MemoryConfig) -> list[nn.Module]:
    """Apply the checkpointing that the `memory` section asks for; see `apply`."""
    return apply(model, memory.activation_checkpointing, memory.checkpoint_modules)


def apply(
    model: nn.Module, mode: Mode, classes: Sequence[str] | None = None, *, whole: bool = False
) -> list[nn.Module]:
    """Make layers of a model recompute their activations in backward.

    Gradients stay bit-identical, including dropout. A second call replaces the first; `off` undoes it.

    Args:
        model: The model, not compiled or wrapped yet.
        mode: `full` recomputes whole layers, `selective` everything but matrix products and attention, `off` nothing.
        classes: Class names of the modules to recompute; None for the model's `checkpoint_layers`, its ModuleList
            `layers`, or the blocks it repeats.
        whole: Whether layers keep their fused operations (`own_kernels`) under `selective`. By default these are turned
            off, because a fused operation can only be kept or recomputed as a whole.

    Returns:
        The modules that recompute.

    Raises:
        ConfigError: If the model repeats no block, has no module of a named class, or a chosen module overrides
            `forward` on the instance.
    """
    chosen = [] if mode == "off" else find_layers(model, classes)
    for module in chosen:
        if "forward" in vars(module):
            raise ConfigError(
                f"memory.activation_checkpointing: a {type(module).__name__} has a forward of its own instead of its "
                "class's, which cannot be recomputed; define forward in the class"
            )
    for module in model.modules():
        base = getattr(type(module), _BASE, None)
        if base is not None:
            module.__class__ = base
            vars(module).pop("own_kernels", None)
    for module in chosen:
        module.__class__ = _recomputing(type(module), mode)
        if mode == "selective" and not whole and hasattr(module, "own_kernels"):
            module.own_kernels = False  # type: ignore[assignment]
    return chosen


def find_layers(model: nn.Module, classes: Sequence[str] | None = None) -> list[nn.Module]:
    """Find the modules to recompute; see `apply`."""
    if classes:
        return _of_classes(model, classes)
    declared = getattr(model, "checkpoint_layers", None)
    if declared is None:
        layers = getattr(model, "layers", None)
        declared = layers if isinstance(layers, nn.ModuleList) else None
    if declared is None:
        declared = find_repeated_blocks(model)
    if not declared:
        raise ConfigError(
            f"memory.activation_checkpointing: {type(model).__name__} has no block that it repeats; name the classes "
            "of the modules to recompute in memory.checkpoint_modules, or in Python "
            f"enable_gradient_checkpointing(modules=[...]) ({_candidates(model)})"
        )
    return _unique(declared)


def _of_classes(model: nn.Module, classes: Sequence[str]) -> list[nn.Module]:
    present = {type(module).__name__ for module in model.modules()}
    for name in classes:
        if name not in present:
            whose = type(model).__name__
            raise ConfigError(
                f"memory.checkpoint_modules: {whose} has no module of a class {name}; {_candidates(model)}"
            )
    chosen: list[nn.Module] = []
    inside: set[nn.Module] = set()  # modules() yields a module before its submodules, which are recomputed with it
    for module in model.modules():
        if type(module).__name__ in classes and module not in inside:
            chosen.append(module)
            inside.update(module.modules())
    return chosen


def _unique(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list(dict.fromkeys(modules))


def _candidates(model: nn.Module) -> str:
    """Describe the classes that occur more than once, which are candidates for layers."""
    inner = [module for module in model.modules() if module is not model]
    nested = Counter(type(module).__name__ for module in inner if any(True for _ in module.children()))
    simple = Counter(type(module).__name__ for module in inner if any(True for _ in module.parameters()))
    for counts in (nested, simple):
        repeated = [name for name, count in counts.most_common() if count > 1 and name != "ModuleList"]
        if repeated:
            return f"it repeats {', '.join(repeated[:5])}"
    return "it repeats none"


def _recomputing(base: type[nn.Module], mode: Mode) -> type[nn.Module]:
    """Return the recomputing subclass; one per class and mode, so the compiler sees layers of one class."""
    if (base, mode) not in _made:
        _made[base, mode] = _make_recomputing(base, mode)
    return _made[base, mode]


def _make_recomputing(base: type[nn.Module], mode: Mode) -> type[nn.Module]:
    more: dict[str, Any] = {}
    if mode == "selective":
        more["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return base.forward(self, *args, **kwargs)
        function = functools.partial(base.forward, self)
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True, **more, **kwargs)

    def reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        return _restored, (base, mode), self.__dict__

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    own: dict[str, Any] = {**names, "forward": forward, "__reduce_ex__": reduce, _BASE: base}
    return type(base.__name__, (base,), own)


def _restored(base: type[nn.Module], mode: Mode) -> nn.Module:
    """Create an empty module for copy and pickle to fill."""
    recomputing = _recomputing(base, mode)
    module: nn.Module = recomputing.__new__(recomputing)
    return module


def _policy(_context: Any, operation: Callable[..., Any], *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    name = str(operation.name()) if hasattr(operation, "name") else str(operation)
    kept = name.split(".")[0] in _KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
