"""How one model runs on many devices: a small base, and one file per family of strategies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from frameworm.errors import ModelError

# From a state and a bucket of gradients to the future of what the ranks make of it: a communication hook of DDP.
Hook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


class Strategy:
    """One way to run a model. This base is the strategy `single`: one process, one device."""

    name = "single"

    def __init__(self, device: torch.device, rank: int = 0, world_size: int = 1) -> None:
        self.device = device
        self.rank = rank
        self.world_size = world_size

    def place(self, model: nn.Module) -> nn.Module:
        """Put the model on the device and return the module the step calls; refuse what cannot be trained this way."""
        check_trainable(model)
        return model.to(self.device)

    def no_sync(self) -> AbstractContextManager[None]:
        """Hold back the gradient synchronisation of a backward pass inside this context."""
        return contextlib.nullcontext()

    def wrap_hook(self, wrap: Callable[[Hook], Hook]) -> bool:
        """Send gradients through `wrap(hook)`, hook being what sends them now; false where no hook sends any.

        To be called once, between `place` and the first step.
        """
        return False

    def sum_over_ranks(self, value: torch.Tensor) -> None:
        """Replace a tensor by its sum over all ranks, on the device, without making the host wait on a GPU."""

    def sync_buffers(self, model: nn.Module) -> None:
        """Give every rank rank 0's buffers, so that validation and checkpoints see one model."""

    def explain(self, error: RuntimeError) -> Exception:
        """The error as the user should see it; by default the same."""
        return error

    def check_gradients(self, model: nn.Module) -> None:
        """Called once after the first backward pass; refuses a model this strategy would train wrongly."""

    def communicated_bytes(self, model: nn.Module) -> int | None:
        """Gradient bytes each rank hands to the collectives per step."""
        return 0


def check_trainable(model: nn.Module) -> None:
    """Refuse models that no strategy can train, before anything has moved.

    Raises:
        ModelError: There is nothing to train, a parameter is not initialised, or the parameters lie on several devices.
    """
    devices: dict[torch.device, str] = {}
    trainable = False
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"parameter {name} is not initialised yet (a lazy layer): run one batch through the model before "
                "handing it to the trainer"
            )
        devices.setdefault(parameter.device, name)
        trainable = trainable or parameter.requires_grad
    if not trainable:
        raise ModelError("the model has no parameter that requires a gradient, so there is nothing to train")
    if any(device.type == "meta" for device in devices):
        name = next(name for device, name in devices.items() if device.type == "meta")
        raise ModelError(f"parameter {name} is on the meta device and has no values: materialise the model first")
    if len(devices) > 1:
        (first, first_name), (second, second_name) = list(devices.items())[:2]
        raise ModelError(
            f"the model lies on several devices ({first_name} on {first}, {second_name} on {second}); "
            "put it on one device and choose a strategy (parallel.strategy) to spread it"
        )
