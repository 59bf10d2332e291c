"""Optimizers, loss scales and the kernels behind them."""

from __future__ import annotations

from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor

from frameworm.torch_private.lookup import attribute, function

# torch's fused updates of many parameters, without the Python around them.
fused_adamw_ = function(torch, "_fused_adamw_")
fused_sgd_ = function(torch, "_fused_sgd_")


def hooks_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The hooks around the steps of one optimizer."""
    found = (attribute(optimizer, "_optimizer_step_pre_hooks"), attribute(optimizer, "_optimizer_step_post_hooks"))
    return [hook for hooks in found for hook in hooks.values()]


def hooks_of_all() -> list[Any]:
    """The hooks around the steps of every optimizer."""
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    return [hook for name in names for hook in attribute(torch_optimizer, name).values()]


def mark_stepped(optimizer: Any) -> None:
    """Say that an optimizer has stepped, where a scheduler of torch's asks; otherwise it warns, and nothing worse."""
    optimizer._opt_called = True


def is_patched_by_scheduler(step: Any) -> bool:
    """Whether it is a scheduler of torch's that has replaced an optimizer's `step`."""
    return hasattr(step, "_wrapped_by_lr_sched")


def make_state(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Have AdamW make the state that its first step would make; that step loads the compiler, for a second."""
    attribute(optimizer, "_init_group")(group, [], [], [], [], [], [])


def accepts_found_inf(optimizer: Any) -> bool:
    """Whether an optimizer leaves a step out by itself, told by a flag on the device; if unknown, the host asks."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def refuse_found_inf(optimizer: Any) -> None:
    """Have the host decide whether a step is left out, because the optimizer no longer can."""
    optimizer._step_supports_amp_scaling = False


def allow_eager_capturable(optimizer: Any) -> None:
    """Keep torch from warning that an optimizer made for a captured step also runs outside of it."""
    optimizer._warned_capturable_if_run_uncaptured = True


def orthogonalised(update: Tensor, group: dict[str, Any]) -> Tensor:
    """Muon's update of a matrix, as torch computes it."""
    import torch.optim._muon as muon

    compute = attribute(muon, "_zeropower_via_newtonschulz")
    made: Tensor = compute(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
    return made


def muon_factor(group: dict[str, Any], shape: torch.Size) -> float:
    """What torch's Muon multiplies a rate of one with, for a matrix of this shape."""
    import torch.optim._muon as muon

    factor: float = attribute(muon, "_adjust_lr")(1.0, group["adjust_lr_fn"], shape)
    return factor


def loss_scale(scaler: torch.amp.GradScaler) -> Tensor | None:
    """The scale on the device; the public way waits for it. None before the first step."""
    scale: Tensor | None = attribute(scaler, "_scale")
    return scale


def growth_tracker(scaler: torch.amp.GradScaler) -> Tensor | None:
    """Good steps since the scale last changed, on the device; None before the first step."""
    tracker: Tensor | None = attribute(scaler, "_growth_tracker")
    return tracker


def found_inf(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> Tensor | None:
    """The flag `unscale_` raised for bad gradients, still on the device."""
    flags: list[Tensor] = list(attribute(scaler, "_found_inf_per_device")(optimizer).values())
    return flags[0] if flags else None
