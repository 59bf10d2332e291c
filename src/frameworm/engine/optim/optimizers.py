"""Build the optimizer that a config names."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from frameworm.config.resolve import effective_lr
from frameworm.config.schema import Config
from frameworm.engine.optim.muon import MUON_EPS, MuonAdamW, hidden_matrices
from frameworm.errors import ConfigError, EnvironmentSetupError
from frameworm.torch_private.names import COMPILER

log = logging.getLogger("frameworm")
# Config name -> package (also the name of the extra that installs it), module, class.
_PACKAGES = {
    "adamw8bit": ("bitsandbytes", "bitsandbytes.optim", "AdamW8bit"),
    "schedulefree": ("schedulefree", "schedulefree", "AdamWScheduleFree"),
}


def build_optimizer(model: nn.Module, config: Config, beside: Iterable[nn.Parameter] = ()) -> torch.optim.Optimizer:
    """Build the optimizer that a config names; vectors (biases, norms) are not decayed.

    Args:
        beside: Trained parameters outside the model.

    Raises:
        ConfigError: If Muon is asked for and the model has no hidden matrix to train.
        EnvironmentSetupError: If the optimizer's package is not installed.
    """
    _leave_compiler_out()
    training = config.training
    parameters = [item for item in (*model.parameters(), *beside) if item.requires_grad]
    hidden = _for_muon(model) if training.optimizer == "muon" else []
    taken = set(map(id, hidden))
    matrices = [item for item in parameters if item.ndim >= 2 and id(item) not in taken]
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
    if training.optimizer in _PACKAGES:
        return _of_package(training.optimizer, groups, lr=lr, betas=training.betas, eps=training.eps)
    if hidden:
        muon = {"rule": "muon", "momentum": training.muon_momentum, "eps": MUON_EPS}
        groups = [{"params": hidden, "weight_decay": training.weight_decay, **muon}, *groups]
        log.info(
            "Muon updates %d matrices of hidden layers (%s numbers), AdamW the other %d parameters (%s)",
            len(hidden),
            f"{sum(item.numel() for item in hidden):,}",
            len(parameters) - len(hidden),
            f"{sum(item.numel() for item in parameters if id(item) not in taken):,}",
        )
        return MuonAdamW(groups, lr=lr, betas=training.betas, eps=training.eps, fused=fused)
    return torch.optim.AdamW(groups, lr=lr, betas=training.betas, eps=training.eps, fused=fused)


def _of_package(name: str, groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """Create an optimizer from an optional package."""
    package, module, kind = _PACKAGES[name]
    try:
        made = getattr(importlib.import_module(module), kind)(groups, **settings)
    except ImportError as error:
        raise EnvironmentSetupError(
            f"training.optimizer: {name} needs the package {package}: pip install 'frameworm[{package}]' ({error}), or "
            "use adamw"
        ) from None
    optimizer: torch.optim.Optimizer = made
    return optimizer


def _for_muon(model: nn.Module) -> list[nn.Parameter]:
    hidden = [item for item in hidden_matrices(model) if item.requires_grad]
    if not hidden:
        raise ConfigError(
            f"training.optimizer: muon is for the matrices of hidden layers, and {type(model).__name__} trains none; "
            "use adamw"
        )
    return hidden


def _leave_compiler_out() -> None:
    """Create, save and load optimizers without importing torch's compiler.

    The first call of these methods imports it, for more than a second, only to exclude them from compilation.
    """
    if COMPILER in sys.modules:
        return
    for name in ("add_param_group", "state_dict", "load_state_dict"):
        plain = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if plain is not None:
            setattr(plain, "__dynamo_disable", plain)  # where torch caches the excluded function
