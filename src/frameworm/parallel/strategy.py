"""How one model runs on many devices: a small base, and one file per family of strategies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from frameworm.errors import ModelError
from frameworm.parallel.beside import Beside
from frameworm.parallel.named_state import laid_out, names_in_groups, to_names, to_numbers
from frameworm.parallel.shards import HeldState, loaded
from frameworm.records.observations import Compression

# From a state and a bucket of gradients to the future of what the ranks make of it: a communication hook of DDP.
Hook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


class Strategy:
    """One way to run a model. This base is the strategy `single`: one process, one device."""

    name = "single"
    acts_after_steps = False  # whether `after_step` does anything
    keeps_own_copy = False  # whether model and optimizer differ from rank to rank between meetings
    shards_parameters = False  # whether a rank holds parts of parameters, and calling the model is a collective

    def __init__(self, device: torch.device, rank: int = 0, world_size: int = 1) -> None:
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self.beside = Beside()

    def place_beside(self, beside: Beside) -> None:
        """Train these beside the model, from rank 0's values; called once, before `place`."""
        self.beside = beside
        beside.place(self.device)

    def place(self, model: nn.Module) -> nn.Module:
        """Put the model on the device and return the module the step calls; refuse what cannot be trained this way."""
        check_trainable(model, self.beside.parameters.values())
        return model.to(self.device)

    def follow(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module | None:
        """Called between two steps, on all ranks, when parameters were frozen, unfrozen or given to the optimizer.

        Returns:
            The module that the step calls from now on; None: the same.
        """
        return None

    def average_beside(self, parameters: list[nn.Parameter]) -> None:
        """Average the gradients of parameters beside the model over the ranks; called after backward."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse an optimizer that this strategy cannot take, before anything has moved."""

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer to use; called once, after `place` and before anything reads its parameters."""
        return optimizer

    def given(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer that the user holds, who may add parameter groups to it."""
        return optimizer

    def adopt_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over the groups that were added to the user's optimizer."""

    def owner_of(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int | None:
        """The one rank that updates a parameter; None: every rank updates it, or its part of it."""
        return None

    def send_from_owners(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        """Give every rank the values that the owners have in these parameters."""

    @property
    def update_device(self) -> torch.device:
        """Where parameters are updated."""
        return self.device

    @property
    def note(self) -> str | None:
        """What the summary must say about this way of training, if anything."""
        return None

    @property
    def gradient_ranks(self) -> int:
        """How many ranks' gradients are averaged in every step."""
        return self.world_size

    def no_sync(self) -> AbstractContextManager[None]:
        """Hold back the gradient synchronisation of a backward pass inside this context."""
        return contextlib.nullcontext()

    def wrap_hook(self, wrap: Callable[[Hook], Hook]) -> bool:
        """Send gradients through `wrap(hook)`, hook being what sends them now; false where no hook sends any.

        To be called once, between `place` and the first step.
        """
        return False

    def after_step(self, model: nn.Module, step: int) -> bool:
        """Called with the number of attempted steps after each, on all ranks, where `acts_after_steps` is set.

        Returns:
            Whether the ranks met.
        """
        return False

    def scale_losses_by(self, scale: Callable[[], Any]) -> None:
        """Told once, before the first step: `scale()` is what losses are multiplied with, None for nothing."""

    def rank_state(self) -> dict[str, Any] | None:
        """What this rank must remember beside the model to go on as if it had never stopped."""
        return None

    def load_rank_state(self, state: dict[str, Any] | None, saved_world_size: int) -> list[str]:
        """Continue with what `rank_state` gave, None where nothing was kept; returns what the user should know."""
        return []

    def describe_compression(self) -> Compression | None:
        """What compression did to the gradients so far; None where none was asked for."""
        return None

    def close(self) -> None:
        """The training is over."""

    def held_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> HeldState:
        """What this rank holds of `model` and `optimizer`; together the ranks hold all of it."""
        names = names_in_groups(self.named_parameters(model), optimizer.param_groups)
        return HeldState({"model": model.state_dict(), "optimizer": to_names(optimizer.state_dict(), names)})

    def load_model_state(self, model: nn.Module, saved: dict[str, Any]) -> None:
        """Continue with the model of a checkpoint, whose tensors are stored ones."""
        model.load_state_dict(loaded(saved))

    def load_optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        """Continue with the optimizer of a checkpoint, whose tensors are stored ones.

        Raises:
            ValueError: It is of another optimizer.
        """
        names = names_in_groups(self.named_parameters(model), optimizer.param_groups)
        optimizer.load_state_dict(laid_out(to_numbers(loaded(saved), names), optimizer))

    def named_parameters(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the model, and those beside it."""
        yield from model.named_parameters()
        yield from self.beside.parameters.items()

    def own_gradients(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        """What this rank holds of the gradients that are there; changing it changes them."""
        return [item.grad for item in parameters if item.grad is not None]

    def norm_over_ranks(
        self, parameters: list[nn.Parameter], gradients: list[torch.Tensor], norm: torch.Tensor
    ) -> torch.Tensor:
        """The norm of whole gradients.

        Args:
            parameters: Whose gradients they are.
            gradients: What this rank holds of them.
            norm: Of that.
        """
        return norm

    def after_evaluation(self, model: nn.Module) -> None:
        """Forward passes without backward are over."""

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
        """Bytes each rank hands to the collectives in a step, for gradients or whatever stands in for them."""
        return 0


def check_trainable(model: nn.Module, beside: Iterable[torch.Tensor] = ()) -> None:
    """Refuse models that no strategy can train, before anything has moved.

    Args:
        beside: Parameters that train beside it.

    Raises:
        ModelError: There is nothing to train, a parameter is not initialised, or the parameters lie on several devices.
    """
    devices: dict[torch.device, str] = {}
    trainable = any(item.requires_grad for item in beside)
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
