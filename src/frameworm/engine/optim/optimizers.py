"""Optimizers from a config."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from frameworm.config.resolve import effective_lr
from frameworm.config.schema import Config


def build_optimizer(model: nn.Module, config: Config, beside: Iterable[nn.Parameter] = ()) -> torch.optim.Optimizer:
    """The optimizer a config names; vectors (biases, norms) are not decayed.

    Args:
        beside: Parameters that train beside the model.
    """
    _leave_compiler_out()
    training = config.training
    parameters = [item for item in (*model.parameters(), *beside) if item.requires_grad]
    matrices = [item for item in parameters if item.ndim >= 2]
    vectors = [item for item in parameters if item.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    lr = effective_lr(config)
    fused = config.gpu.fused_optimizer is not False and all(item.is_floating_point() for item in parameters)
    if training.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=training.momentum, fused=fused)
    return torch.optim.AdamW(groups, lr=lr, betas=training.betas, eps=training.eps, fused=fused)


def _leave_compiler_out() -> None:
    """Let optimizers be made, saved and loaded without the compiler.

    Their first call of these loads it, for more than a second, only to say that it is not to look into them.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in ("add_param_group", "state_dict", "load_state_dict"):
        plain = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if plain is not None:
            setattr(plain, "__dynamo_disable", plain)  # where torch keeps what it made of it
